"""The law of batch size: steps to the target by batch size, and predictions from the law."""
