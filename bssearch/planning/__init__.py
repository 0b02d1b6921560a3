"""Plans before anything runs: arithmetic over given numbers, and traced models."""
