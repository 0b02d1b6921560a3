"""Workloads: the protocol, and a file per workload."""
