"""The law of batch size."""
