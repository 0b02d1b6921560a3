"""Experiment trackers that a study reports to, in one process beside the driver."""
