"""The model of the time to the target."""
