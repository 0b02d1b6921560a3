"""Questions to several databases, and to all matching studies in them."""
