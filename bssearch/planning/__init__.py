"""Plans from numbers, stored studies or traced models, without training."""
