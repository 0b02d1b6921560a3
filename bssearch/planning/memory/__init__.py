"""The memory of a training step: of numbers alone (`numbers`), or of a model traced with fake tensors (`traced`).

`traced`, `trace`, `kernels` and `models` import torch; the others do not.
"""
