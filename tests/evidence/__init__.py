"""The sections of `tests/gpu_evidence.py`: what three calls measure on one GPU."""
