"""Answers from several databases at once."""
