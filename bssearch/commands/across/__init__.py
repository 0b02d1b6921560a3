"""What is asked of several databases, and of all studies in them that match."""
