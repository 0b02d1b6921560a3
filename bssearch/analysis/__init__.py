"""Findings from records: the law, objectives, the verdict and rules of thumb."""
