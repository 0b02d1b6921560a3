"""Executors: worker processes, a Ray cluster or this process."""
