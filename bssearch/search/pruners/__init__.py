"""Pruners stop trials early or pause them."""
