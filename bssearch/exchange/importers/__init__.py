"""Imports of runs and studies from files; wrong contents raise `UsageError` with their place."""
