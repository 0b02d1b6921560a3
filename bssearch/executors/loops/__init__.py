"""Trials of a user's loop: script, function or notebook."""
