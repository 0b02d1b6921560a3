"""Plans, made before anything runs."""
