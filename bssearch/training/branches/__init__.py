"""A trial that goes on from a checkpoint of a longer run, for some samples: a branch of it."""
