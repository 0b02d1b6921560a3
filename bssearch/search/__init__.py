"""The search: engine, planner, driver, samplers, pruners, leases and history."""
