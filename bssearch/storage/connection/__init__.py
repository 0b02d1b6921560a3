"""How a database is reached: its URL, its engine, and what is done where it is away or refuses."""
