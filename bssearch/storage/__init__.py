"""The only SQL: tables, their migrations and the store over them."""
