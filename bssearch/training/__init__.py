"""The training loop, its honest clock and checkpoints, device checks and probes."""
