"""What people look at: the page of a study, its plots, the page of a simulation."""
