"""A trainer put where the checkpoint of a longer run stands, to go on at a batch size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.records import Branch
from bssearch.training.branches.checkpoint import read_checkpoint
from bssearch.training.own.schedule import OwnSchedule
from bssearch.training.schedule import Schedule


class Continued(Protocol):
    """The trainer of a branch: its model, its schedule, and what takes over an optimizer's state."""

    model: nn.Module
    schedule: Schedule | OwnSchedule | BranchSchedule

    def take_over(self, optimizer: Any, average: list[torch.Tensor] | None) -> None:
        """Begin with an optimizer's state, None for a new one, and with an average of the weights."""
        ...


@dataclass(frozen=True, slots=True)
class BranchSchedule:
    """The run's schedule from the checkpoint on, for ``steps`` steps; ``offset`` are the steps before.

    Where the optimizer begins anew the rate may rise over the first ``rise`` steps: step s has (s + 1)/(rise + 1) of
    it. The run's own warmup is no warmup of the branch.
    """

    run: Schedule | OwnSchedule
    offset: int
    steps: int
    rise: int = 0
    warmup_steps: int = 0

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate for a step of the branch, counted from 0."""
        return self.run.factor(self.offset + step) * min(1.0, (step + 1) / (self.rise + 1))

    def is_over(self, step: int) -> bool:
        """Return whether the branch has seen its samples."""
        return step >= self.steps


def continue_from(trainer: Continued, branch: Branch, batch_size: int) -> None:
    """Put a fresh trainer where a branch begins; the order of the data stays the trainer's own.

    The optimizer's options (rate, betas, weight decay) are those of the trainer, its state is the checkpoint's. Raises
    what `read_checkpoint` does, and `UsageError` where the checkpoint is that of another model or optimizer.
    """
    path = Path(branch.checkpoint)
    saved = read_checkpoint(path)
    load_weights(trainer.model, saved.model, path)
    try:
        trainer.take_over(saved.optimizer, saved.average)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"checkpoint {path}: its optimizer is not that of the study: {error}",
            hint="leave 'optimizer' out of the file, and the optimizer begins anew; or let the spec's be the run's",
        ) from error
    assert not isinstance(trainer.schedule, BranchSchedule), "a trainer continues one checkpoint"
    trainer.schedule = branch_schedule(trainer.schedule, branch, batch_size)


def branch_schedule(run: Schedule | OwnSchedule, branch: Branch, batch_size: int) -> BranchSchedule:
    """Return the schedule of a branch at a batch size, ``run`` being that of a whole run at that batch size.

    Raises `UsageError` where the rate depends on a position that is not known. A constant rate is then past its warmup.
    """
    if branch.start_samples is None:
        if isinstance(run, OwnSchedule) or run.horizon_steps is not None:
            raise UsageError(
                f"checkpoint {branch.checkpoint} says neither step nor samples, and the learning rate depends on them",
                hint="--at says the samples before each checkpoint",
            )
        offset = run.warmup_steps
    else:
        offset = round(branch.start_samples / batch_size)
    return BranchSchedule(run, offset, steps=branch.samples // batch_size, rise=round(branch.rise_samples / batch_size))


@torch.no_grad()
def load_weights(model: nn.Module, saved: Mapping[str, Any], path: Path) -> None:
    """Give a model saved weights where its own lie; buffers that no state_dict has may be among the saved.

    Raises `UsageError` naming the first parameter or buffer that is missing, of another shape, or not the model's.
    """
    own = model.state_dict()
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            continue
        found = saved.get(name)
        if not isinstance(found, torch.Tensor) or found.shape != value.shape:
            there = f"of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else "missing"
            raise UsageError(
                f"checkpoint {path} is that of another model: {name} of shape {tuple(value.shape)} is {there} in it"
            )
    buffers = dict(model.named_buffers())
    if unknown := [name for name in saved if name not in own and name not in buffers]:
        raise UsageError(f"checkpoint {path} is that of another model, which has no {unknown[0]}")
    model.load_state_dict({name: value for name, value in saved.items() if name in own})
