"""Workloads: the protocol, a file per workload, and the templates of `init`."""
