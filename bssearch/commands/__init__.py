"""The verbs as plain functions: what the command line calls, and Python too."""
