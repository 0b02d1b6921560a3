"""The commands that make pages: of a study as a file, and served in a browser."""
