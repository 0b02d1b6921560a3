"""Objectives of a study; `base` holds their interface."""
