"""The pages of a web server that only reads."""
