"""Where trials run: in worker processes here (`local`) or on a cluster (`ray`), or in this process (`inline`)."""
