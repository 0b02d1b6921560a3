"""Ask, run, record, tell: the search over batch sizes."""
