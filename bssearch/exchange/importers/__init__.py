"""Importers of runs and studies from files. A `UsageError` names the place of a wrong value."""
