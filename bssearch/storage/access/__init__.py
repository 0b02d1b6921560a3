"""Who may do what with a database: the roles of a team's server and their rights, and files that must not be shared."""
