"""The commands that take studies out of a database, and into another."""
