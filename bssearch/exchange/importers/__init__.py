"""Importers of runs and studies from files."""
