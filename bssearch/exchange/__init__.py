"""Imports, exports, boards and Optuna studies."""
