"""Runs and studies that were made elsewhere, read from files."""
