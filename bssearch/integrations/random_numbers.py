"""The global random generators, kept over what must not move them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bssearch.integrations.assignment import Evaluate, Metrics


def unmoved(evaluate: Evaluate) -> Metrics:
    """Return what an evaluation finds; whatever it draws, the training's random numbers are those without it."""
    put_back = kept_random_numbers()
    try:
        return evaluate()
    finally:
        put_back()


def kept_random_numbers() -> Callable[[], None]:
    """Return what puts the global random generators back to where they are now."""
    from bssearch.training.trial_checkpoint import RandomState

    states = RandomState(_device_of_generators())
    kept = states.state()
    return lambda: states.restore(kept)


def _device_of_generators() -> torch.device:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if initialized else torch.device("cpu")
