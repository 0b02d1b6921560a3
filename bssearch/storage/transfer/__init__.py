"""Studies that are stored whole, and read whole."""
