"""Plans before anything runs, from numbers or traced models."""
