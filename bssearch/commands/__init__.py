"""The commands as plain functions, called by the command line and from Python."""
