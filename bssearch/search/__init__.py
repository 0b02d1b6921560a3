"""Search over batch sizes: engine, driver, samplers and pruners."""
