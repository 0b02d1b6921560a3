"""Trials whose batch grows."""
