"""Engine, planner, driver, samplers, pruners, leases and history."""
