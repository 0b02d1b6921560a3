"""The sections of `tests/gpu_evidence.py`: the measurements of three calls on one GPU."""
