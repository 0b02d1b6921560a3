"""The queue of studies and the workers that serve it."""
