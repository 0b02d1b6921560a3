"""The commands as plain functions, for the command line and Python."""
