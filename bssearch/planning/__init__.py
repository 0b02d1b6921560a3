"""What can be known before anything runs: pure arithmetic over numbers that are given, and models only traced."""
