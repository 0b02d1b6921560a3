"""What people look at: the page of a study and its plots."""
