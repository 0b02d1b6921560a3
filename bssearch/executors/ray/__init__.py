"""Trials on a Ray cluster, with an actor per slot."""
