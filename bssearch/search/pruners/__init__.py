"""Pruners stop or pause trials."""
