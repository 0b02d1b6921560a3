"""The exponential moving average (EMA) of a model's weights, which evaluation uses in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bssearch.errors import UsageError
from bssearch.records import Configuration


class AveragedWeights:
    """The average of a model's parameters and floating-point buffers, which starts at what they are now.

    After each optimizer step: average ← decay · average + (1 − decay) · weights (Polyak & Juditsky 1992; in this form
    Tarvainen & Valpola 2017, eq. 2). Counters and masks, buffers of integers or with infinities, stay the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        buffers = (buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.isfinite().all())
        self._weights = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
        self._averages = [tensor.clone() for tensor in self._weights]
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Take the model's present weights into the average."""
        self._average(self._averages, self._weights, None)

    def begin_again(self) -> None:
        """Let the average be what the weights are now."""
        _copy(self._weights, self._averages)

    def state(self) -> list[torch.Tensor]:
        """Return the averages themselves, to be saved."""
        return self._averages

    def restore(self, averages: list[torch.Tensor]) -> None:
        """Take over saved averages."""
        _copy(averages, self._averages)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averages as its weights inside the block, at the addresses of its own."""
        kept = [tensor.clone() for tensor in self._weights]
        _copy(self._averages, self._weights)
        try:
            yield
        finally:
            _copy(kept, self._weights)


def ema_decay_of(configuration: Configuration) -> float | None:
    """Return the decay of a configuration's average, None for no average. Raises `UsageError` outside of (0, 1)."""
    value = configuration.parameters.get("ema_decay")
    if value is None:
        return None
    if isinstance(value, bool | str) or not 0 < value < 1:
        raise UsageError(f"ema_decay = {value!r} must be a number in (0, 1), or none for no average of the weights")
    return float(value)


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
