"""What is trained: the protocol, and a file per workload."""
