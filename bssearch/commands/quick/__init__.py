"""``quick``: a batch size in a minute, before any search, and how often such answers held."""
