"""A model of the time to the target over batch size and the rest, and the sampler that asks it."""
