"""Rights: the roles of a team's server."""
