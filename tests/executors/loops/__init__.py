"""Tests of users' loops."""
