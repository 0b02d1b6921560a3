"""The boards that a team looks at already: each in a process of its own, told of a study's trials by JSON lines."""
