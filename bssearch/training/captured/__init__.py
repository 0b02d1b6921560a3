"""The whole optimizer step as CUDA graphs, which a device replays without waiting for Python."""
