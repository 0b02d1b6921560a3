"""Read-only pages: a calculator and the studies of databases."""
