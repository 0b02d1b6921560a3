"""Random numbers of the data, apart from those of the training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(seed: int, position: int) -> int:
    """Return the seed, 32 bits, of one position in the data of a trial's seed."""
    return int(np.random.SeedSequence([seed % 2**63, position]).generate_state(1)[0])


@contextmanager
def seeded(seed: int, position: int) -> Iterator[None]:
    """Seed the global generators of the host for one position in the data; afterwards put back their states.

    What is drawn inside is then the same in any process, and leaves the trial's own random numbers alone.
    """
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = seed_of(seed, position)
    random.seed(drawn)
    np.random.seed(drawn)
    torch.default_generator.manual_seed(drawn)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
