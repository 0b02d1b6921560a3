"""One training loop with an honest clock."""
