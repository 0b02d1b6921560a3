"""What a study minimises: one object for each objective."""
