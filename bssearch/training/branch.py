"""Trials that continue a longer run from its checkpoint."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import Branch
from bssearch.training.course import first_line
from bssearch.training.schedule import BranchSchedule, OwnSchedule, Schedule
from bssearch.training.trainer import Trainer
from bssearch.training.trial_checkpoint import IDENTITY, TRAINING

FORMAT_HINT = (
    'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "samples": samples}, '
    "path) writes one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A checkpoint's content, on the CPU; None if missing.

    ``model`` maps names to tensors, ``optimizer`` is one state_dict or a list, ``average`` a bssearch trial's averaged
    weights.
    """

    model: Mapping[str, Any]
    optimizer: Any = None
    average: list[torch.Tensor] | None = None
    step: int | None = None
    samples: int | None = None

    @property
    def learning_rate(self) -> float | None:
        """The optimizer's largest saved learning rate."""
        states = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        groups = [group for one in states if isinstance(one, Mapping) for group in one.get("param_groups") or ()]
        rates = [group.get("lr") for group in groups if isinstance(group, Mapping)]
        return max((float(rate) for rate in rates if isinstance(rate, int | float | torch.Tensor)), default=None)

    def samples_at(self, batch_size: int) -> int | None:
        """Samples seen, else steps × ``batch_size``."""
        return self.samples if self.samples is not None or self.step is None else self.step * batch_size


def read_checkpoint(path: Path) -> SavedRun:
    """Read a checkpoint.

    Raises:
        NotFoundError: The file does not exist.
        UsageError: It is no checkpoint, has non-finite weights, or an invalid step or samples.
    """
    if not path.exists():
        raise NotFoundError(f"checkpoint {path} does not exist")
    if path.is_dir():
        raise UsageError(f"checkpoint {path} is a folder; it must be a file", hint=FORMAT_HINT)
    saved = _of_trial(path) or _of_run(path, _load(path))
    for name, value in saved.model.items():
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not bool((value.float() if value.element_size() == 1 else value).isfinite().all())
        ):
            raise UsageError(f"checkpoint {path}: {name} has values that are not finite")
    return saved


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise UsageError(
            f"checkpoint {path} cannot be read as tensors and plain values: {first_line(error)}", hint=FORMAT_HINT
        ) from error


def _of_run(path: Path, content: Any) -> SavedRun:
    if not isinstance(content, Mapping):
        raise UsageError(f"checkpoint {path} is a {type(content).__name__}; expected a dict", hint=FORMAT_HINT)
    model = content.get("model")
    if isinstance(model, Mapping):
        return SavedRun(
            model=model,
            optimizer=content.get("optimizer"),
            step=_count(path, content, "step"),
            samples=_count(path, content, "samples"),
        )
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return SavedRun(model=content)
    found = ", ".join(sorted(str(name) for name in content)[:8]) or "nothing"
    raise UsageError(
        f"checkpoint {path} holds {found}; it must hold model, a state_dict, or be a state_dict", hint=FORMAT_HINT
    )


def _of_trial(path: Path) -> SavedRun | None:
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if not {IDENTITY, TRAINING} <= set(archive.namelist()):
                return None
            configuration = json.loads(json.loads(archive.read(IDENTITY))["configuration"])
            with archive.open(TRAINING) as member:
                training = torch.load(member, map_location="cpu", weights_only=True)
        trainer = training["trainer"]
        return SavedRun(
            model={**trainer["model"], **trainer["extra"]},
            optimizer=trainer["optimizer"],
            average=trainer["average"],
            step=trainer["steps"],
            samples=trainer["steps"] * configuration["batch_size"],
        )
    except Exception as error:
        raise UsageError(f"checkpoint {path} of a trial cannot be read: {first_line(error)}") from error


def _count(path: Path, content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if value is None or (type(value) is int and value >= 0):
        return value
    raise UsageError(f"checkpoint {path}: {name} = {value!r} must be a whole number >= 0")


def continue_from(trainer: Trainer, branch: Branch, batch_size: int) -> None:
    """Start a branch with a fresh trainer, its own data order and optimizer options.

    Raises as `read_checkpoint`, and `UsageError` for another model or optimizer.
    """
    path = Path(branch.checkpoint)
    saved = read_checkpoint(path)
    load_weights(trainer.model, saved.model, path)
    try:
        trainer.updates.take_over(saved.optimizer, saved.average)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"checkpoint {path}: its optimizer is not that of the study: {error}",
            hint="leave 'optimizer' out of the file, and the optimizer begins anew; or let the spec's be the run's",
        ) from error
    assert not isinstance(trainer.schedule, BranchSchedule), "a trainer continues one checkpoint"
    trainer.schedule = branch_schedule(trainer.schedule, branch, batch_size)


def branch_schedule(run: Schedule | OwnSchedule, branch: Branch, batch_size: int) -> BranchSchedule:
    """A branch's schedule, from the whole run's at this batch size.

    At an unknown position a constant rate is past its warmup; other rates raise `UsageError`.
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
    """Copy saved weights into a model; ``saved`` may have buffers without a place in its state_dict.

    Raises `UsageError` unless names and shapes agree.
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
