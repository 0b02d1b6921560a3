"""Connections: URLs, engines and their errors."""
