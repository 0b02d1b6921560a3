"""Whether the losses of a step's micro-batches add up to that of its batch, in a Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bssearch.errors import UsageError
from bssearch.integrations.random_numbers import kept_random_numbers

LEAST_CHANGE = 1e-3
"""The share by which a loss must change where it is divided by twice as many items: a choice, far below a half."""


def check_counts_items(model: torch.nn.Module) -> Callable[[], None]:
    """Have a model's next loss looked at; return what calls that off.

    A Trainer hands ``num_items_in_batch``, the items of all micro-batches of a step, to each model that takes further
    arguments, and leaves it to the model to divide by it. A model that takes it and goes on with the mean over its
    micro-batch has gradients that are as many times too large as there are micro-batches: `UsageError` is raised in its
    forward pass. Random numbers stay as they are.
    """

    def look(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        items = given.get("num_items_in_batch")
        if items is None or not isinstance(output, Mapping) or output.get("loss") is None:
            return
        handle.remove()
        once, twice = (_loss(module, args, {**given, "num_items_in_batch": times * items}) for times in (1, 2))
        if abs(once - twice) <= LEAST_CHANGE * abs(once):
            raise UsageError(
                f"the loss of {type(module).__name__} does not count num_items_in_batch: a batch in several "
                "micro-batches would have gradients as many times too large",
                hint="model.accepts_loss_kwargs = False, before the Trainer is made: that divides the loss itself then",
            )

    handle = model.register_forward_hook(look, with_kwargs=True)
    return handle.remove


def _loss(model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> float:
    put_back = kept_random_numbers()
    try:
        with torch.no_grad():
            return float(model(*args, **given)["loss"])
    finally:
        put_back()
