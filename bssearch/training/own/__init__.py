"""What a workload may do itself: its batches, its optimizers and their updates, its schedule, its training step."""
