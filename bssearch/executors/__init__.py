"""Where trials run: in worker processes (`local`) or in this process (`inline`); each passes one contract suite."""
