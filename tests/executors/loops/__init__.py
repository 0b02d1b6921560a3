"""Tests of loops of the user's own."""
