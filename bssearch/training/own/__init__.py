"""What a workload may do itself: its batches, its optimizers, its schedule, its training step."""
