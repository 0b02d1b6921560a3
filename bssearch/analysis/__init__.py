"""Analysis of a study's trials: the optimum, the law of batch size and rules of thumb."""
