"""Executors run trials: in local worker processes (`local`), on a Ray cluster (`ray`) or in this process (`inline`)."""
