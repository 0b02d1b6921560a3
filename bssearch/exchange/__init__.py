"""Imports, exports, experiment trackers and Optuna studies."""
