"""The calculator: from a query string to plans, with the functions of the command line."""
