"""Measurements of a device and a model in isolation."""
