"""Objectives of a study; `base` has the interface of objectives."""
