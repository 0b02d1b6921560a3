"""Which trials stop early, and which pause."""
