"""The order of bssearch's own loop, for a loader of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from bssearch.errors import UsageError


class SeededSampler(Sampler[int]):
    """The rows of one epoch after the other, each a new permutation; the last, incomplete batch is left out.

    Each pass is the next epoch; its length is a whole number of batches. The first one leaves out what the first
    ``after_steps`` steps of ``batch_size`` samples have seen. Raises `UsageError` where a batch is larger than the
    data.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, *, after_steps: int = 0) -> None:
        if batch_size > samples:
            raise UsageError(f"batch_size = {batch_size} must be <= {samples}, the number of training samples")
        self._samples = samples
        self._whole = samples - samples % batch_size
        self._generator = torch.Generator().manual_seed(seed)
        passed, self._seen = divmod(after_steps * batch_size, self._whole)
        for _ in range(passed):
            self._next_epoch()

    @property
    def is_at_start(self) -> bool:
        """Return whether the next pass is a whole epoch."""
        return self._seen == 0

    def __len__(self) -> int:
        return self._whole

    def __iter__(self) -> Iterator[int]:
        rows = self._next_epoch()[self._seen : self._whole]
        self._seen = 0
        yield from rows.tolist()

    def _next_epoch(self) -> torch.Tensor:
        return torch.randperm(self._samples, generator=self._generator)


class RankSampler(SeededSampler):
    """One rank's share of what `SeededSampler` yields: of each micro-batch of all ranks ``share`` rows in a row.

    So the samples of a batch are the same, however many ranks share it.
    """

    def __init__(
        self, samples: int, batch_size: int, seed: int, *, share: int, rank: int, ranks: int, after_steps: int = 0
    ) -> None:
        super().__init__(samples, batch_size, seed, after_steps=after_steps)
        self._share = share
        self._rank = rank
        self._ranks = ranks

    def __len__(self) -> int:
        return super().__len__() // self._ranks

    def __iter__(self) -> Iterator[int]:
        rows = list(super().__iter__())
        for start in range(self._rank * self._share, len(rows), self._ranks * self._share):
            yield from rows[start : start + self._share]
