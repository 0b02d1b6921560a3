"""Isolated measurements of a device and a model."""
