"""Imports of runs and studies from files."""
