"""Plans from numbers or traced models, before any trial."""
