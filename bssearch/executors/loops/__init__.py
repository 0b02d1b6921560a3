"""Trials of a user's loop in a script, function or notebook."""
