"""The queue that nodes serve: studies submitted, listed, paused and resumed; and the worker of a node."""
