"""Importers of runs and studies from files; a `UsageError` names the place of a wrong value."""
