"""The training loop, its clock, checkpoints, device checks and probes."""
