"""Model of the time to the target."""
