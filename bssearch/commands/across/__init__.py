"""Questions to several databases at once."""
