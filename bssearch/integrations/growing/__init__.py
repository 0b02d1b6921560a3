"""Loops of the user's own whose batch grows."""
