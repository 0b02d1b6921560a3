"""Trials of user commands and scripts."""
