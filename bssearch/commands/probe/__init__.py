"""``probe``: the measurements of a study's device and model. `bssearch.training.probes` is what a worker measures of them."""
