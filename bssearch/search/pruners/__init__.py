"""Which trials are stopped early, and which wait."""
