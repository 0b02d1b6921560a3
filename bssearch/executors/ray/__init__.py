"""Trials on a Ray cluster: one actor for each slot, which owns the slot's worker process on its node."""
