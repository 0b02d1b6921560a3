"""People's own training as trials: a loop in a script of theirs, a function, a notebook."""
