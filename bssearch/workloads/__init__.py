"""What is trained: the protocol in `base`, then one file per workload."""
