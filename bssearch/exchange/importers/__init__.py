"""Runs and studies that were made elsewhere, read from files: an importer a file, and what they share."""
