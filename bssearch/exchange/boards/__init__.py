"""Experiment trackers, in one process beside the driver."""
