"""Search over batch sizes."""
