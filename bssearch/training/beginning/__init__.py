"""What is done before the time of a trial starts."""
