"""The law of batch size: steps to the target, step time, and both together."""
