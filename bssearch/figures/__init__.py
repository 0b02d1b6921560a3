"""Charts, plots and the page of a study."""
