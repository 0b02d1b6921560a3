"""Trials on a Ray cluster, an actor per slot."""
