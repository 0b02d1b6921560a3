"""``probe``: measurements of a study's device and model; `bssearch.training.probes` makes them in a worker."""
