"""Exports of studies."""
