"""Ghost batch normalisation (Hoffer, Hubara & Soudry 2017, "Train longer, generalize better", arXiv 1705.08741, § 4).

Batch normalisation over groups of a fixed size, whatever the batch: a larger batch then changes the optimisation and
not the noise in the statistics.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Running = tuple[torch.Tensor | None, torch.Tensor | None]


def convert_batch_norms(model: nn.Module, ghost_batch_size: int) -> int:
    """Turn the batch norms of a model into ghost batch norms, in place; return how many there are.

    They are `BATCH_NORMS` and classes derived from them. Parameters, buffers and their names stay.
    """
    norms: list[Any] = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    for norm in norms:
        norm.__class__ = _ghost_class(norm.__class__)
        norm.ghost_batch_size = ghost_batch_size
    return len(norms)


class GhostNorm:
    """What goes before a batch norm's class, to be mixed into it.

    In training each ``ghost_batch_size`` consecutive samples are normalised by their own mean and (biased) variance;
    the samples that are left over, or a batch smaller than that, form a smaller group; a single one that is left over
    joins the last group. The running statistics move, by the norm's momentum, toward the mean over the groups of their
    means and unbiased variances. Evaluation is that of the batch norm. Raises `ValueError`, as the batch norm does, for
    a batch of one value per channel.
    """

    ghost_batch_size: int

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Normalise inputs (samples, channels, …)."""
        samples, channels = input.shape[:2]
        if not self.training or samples <= self.ghost_batch_size:
            whole: torch.Tensor = super().forward(input)  # type: ignore[misc]
            return whole
        self._check_input_dim(input)
        groups, rest = divmod(samples, self.ghost_batch_size)
        if rest == 1:
            groups, rest = groups - 1, self.ghost_batch_size + 1
        pieces = [(input[: samples - rest], groups, self._running(groups))] if groups else []
        if rest:
            pieces.append((input[samples - rest :], 1, self._running(1)))
        momentum = self._count_batch()
        outputs = [self._normalise(*piece, momentum) for piece in pieces]
        if self.track_running_stats:
            means, variances = zip(*(running for _, _, running in pieces), strict=True)
            self.running_mean.copy_(torch.cat(means).view(-1, channels).mean(0))
            self.running_var.copy_(torch.cat(variances).view(-1, channels).mean(0))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _running(self: Any, groups: int) -> Running:
        """Return the running mean and variance (groups · channels) of each group, which all start from the norm's."""
        if not self.track_running_stats:
            return None, None
        return self.running_mean.repeat(groups), self.running_var.repeat(groups)

    def _normalise(self: Any, input: torch.Tensor, groups: int, running: Running, momentum: float) -> torch.Tensor:
        """Normalise groups of equal size: side by side they are channels of one batch norm."""
        channels, rest = input.shape[1], input.shape[2:]
        side_by_side = input.reshape(groups, -1, channels, *rest).transpose(0, 1).flatten(1, 2)
        scale, shift = (self.weight.repeat(groups), self.bias.repeat(groups)) if self.affine else (None, None)
        output = functional.batch_norm(side_by_side, *running, scale, shift, True, momentum, self.eps)
        return output.reshape(-1, groups, channels, *rest).transpose(0, 1).flatten(0, 1)

    def _count_batch(self: Any) -> Any:
        """Count the batch and return the weight of its statistics in the running ones."""
        if not self.track_running_stats:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


@functools.cache
def _ghost_class(kind: Any) -> Any:
    """Return the one class for ghost norms of a kind: compiled graphs are found again by it."""
    return type(f"Ghost{kind.__name__}", (GhostNorm, kind), {})
