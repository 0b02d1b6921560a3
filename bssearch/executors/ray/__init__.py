"""Trials on a Ray cluster; one actor per slot owns the worker process."""
