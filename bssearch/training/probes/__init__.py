"""What this device and this model can do, measured in isolation."""
