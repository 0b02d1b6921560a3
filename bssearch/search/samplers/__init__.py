"""Which configuration a search tries next."""
