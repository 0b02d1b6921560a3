"""Whole studies: import, copy and merge."""
