"""Where a trial runs: one long-lived worker process per slot."""
