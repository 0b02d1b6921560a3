"""Recorded tables played again on a virtual clock."""
