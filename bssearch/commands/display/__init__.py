"""What people see in Python and on a terminal: a run as it goes on, and its answer in a notebook."""
