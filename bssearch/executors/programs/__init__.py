"""Trials run by user commands and scripts."""
