"""Pages over the same functions as the commands: a calculator, and the studies of a database, all read-only."""
