"""Trials that are programs of the user's own: commands and scripts, what they report, and how they end."""
