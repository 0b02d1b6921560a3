"""Records in, findings out: the law, objectives, the verdict and rules of thumb."""
