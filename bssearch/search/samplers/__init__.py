"""Samplers choose the next configuration of a search."""
