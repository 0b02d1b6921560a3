"""Measurements of a study's device and model, made by `bssearch.training.probes`."""
