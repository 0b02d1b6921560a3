"""What a study asks, and what one trial trains with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

ParameterValue = bool | int | float | str | None


class Goal(StrEnum):
    """Which way the metric is better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"

    @property
    def sign(self) -> str:
        """The sign between a metric and its target."""
        return "≥" if self is Goal.MAXIMIZE else "≤"


class Phase(StrEnum):
    """Why a trial runs.

    `TO_BUDGET`: to see which metric a batch size comes to, past the target to its limit; `GROWTH`: to find out how its
    batch should grow.
    """

    SEARCH = "search"
    CONFIRM = "confirm"
    AUDIT = "audit"
    TO_BUDGET = "to_budget"
    GROWTH = "growth"
    PROBE = "probe"


class TrialState(StrEnum):
    """Where a trial stands, or how it ended. Only `REACHED` has a time-to-target.

    `PAUSED` is an end like `PRUNED`, from which a trial may yet go on.
    """

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    REACHED = "reached"
    PRUNED = "pruned"
    CAPPED = "capped"
    EXHAUSTED = "exhausted"
    OOM = "oom"
    DIVERGED = "diverged"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        """Whether the trial has ended; one that is paused may go on."""
        return self not in {TrialState.QUEUED, TrialState.RUNNING}

    @property
    def is_censored(self) -> bool:
        """Whether the trial was stopped before its target: its time-to-target is longer than what it ran."""
        return self in {TrialState.PAUSED, TrialState.PRUNED, TrialState.CAPPED, TrialState.EXHAUSTED}

    @property
    def is_missing(self) -> bool:
        """Whether the trial says nothing about its configuration and costs no budget."""
        return self in {TrialState.FAILED, TrialState.LOST, TrialState.CANCELLED}


def to_json(record: object) -> str:
    """Return a record as compact JSON with sorted keys; infinities and NaN are refused."""
    return _json(asdict(record))  # type: ignore[call-overload]


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The metric value to reach on the validation part."""

    metric: str
    value: float
    goal: Goal = Goal.MAXIMIZE

    @property
    def in_words(self) -> str:
        """The target for people, as in "accuracy ≥ 0.9"."""
        return f"{self.metric} {self.goal.sign} {self.value:g}"

    def gain(self, metric: float) -> float:
        """Return the metric with its sign set so that more is better."""
        return metric if self.goal is Goal.MAXIMIZE else -metric

    def shortfall(self, metric: float) -> float:
        """Return how far the metric is from the target: positive when missed, zero or less when reached."""
        return self.gain(self.value) - self.gain(metric)

    def is_met_by(self, metric: float) -> bool:
        """Return whether the metric reaches the target; NaN never does."""
        return self.shortfall(metric) <= 0


MAKE_TRAINER = ":make_trainer"
"""What follows the file in the name of a workload that is no script, but makes a trainer for each trial."""

LARGEST_METRIC = 1e100
"""The largest absolute value of a metric: a choice; squares and sums of such stay finite in double precision."""


def is_metric(value: float) -> bool:
    """Return whether a number may be a metric: it is finite, and not beyond `LARGEST_METRIC`."""
    return abs(value) <= LARGEST_METRIC


BATCH_SCHEDULE, BATCH_STAGES = "batch_schedule", "batch_stages"
"""The parameters of a configuration whose batch grows: the schedule's name, and its stages after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one trial trains with, as really run: derived values, not the coordinates that were sampled.

    ``batch_size`` is the effective one: micro-batch × accumulation steps × world size.
    ``parameters`` holds the optimizer's and the schedule's own (momentum, beta1, horizon_samples, clip_norm, …), and
    what lets the batch grow (`bssearch.records.batch_schedule`): ``batch_size`` is then the one that it begins with.
    """

    batch_size: int
    learning_rate: float
    micro_batch_size: int
    accumulation_steps: int = 1
    world_size: int = 1
    warmup_epochs: float = 0.0
    weight_decay: float = 0.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    optimizer: str = "sgd"
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return a short digest that two runs share exactly when they run the same configuration."""
        values = {name: getattr(self, name) for name in _FIELDS} | {"parameters": dict(self.parameters)}
        return hashlib.sha256(_json(values).encode()).hexdigest()[:12]

    def in_micro_batches(self, micro_batch_size: int) -> Configuration:
        """Return what trains the same in micro-batches of another size, which divides the batch size."""
        steps = self.batch_size // (micro_batch_size * self.world_size)
        return replace(self, micro_batch_size=micro_batch_size, accumulation_steps=steps)

    def trains_like(self, other: Configuration) -> bool:
        """Return whether two configurations differ at most in how they split a batch into micro-batches."""
        return self._whole == other._whole

    @property
    def _whole(self) -> Configuration:
        whole = self.in_micro_batches(1)
        if not self.grows:
            return whole
        stages = re.sub(r"/\d+", "", str(self.parameters.get(BATCH_STAGES)))
        return replace(whole, parameters={**self.parameters, BATCH_STAGES: stages})

    @property
    def grows(self) -> bool:
        """Return whether the batch size is that of a first stage (`bssearch.records.batch_schedule`)."""
        return BATCH_SCHEDULE in self.parameters


_FIELDS = tuple(one.name for one in fields(Configuration))


WITH_CUDA_GRAPHS = frozenset({"reduce-overhead", "max-autotune"})
"""The modes of ``torch.compile`` that replay CUDA graphs on a GPU (``torch._inductor.list_mode_options``)."""


# Hyperparameters of the user's own, as a configuration holds them: under ``model.NAME`` and ``loss.NAME``.

OWN_GROUPS = ("model", "loss")
"""What they are handed to: a workload's ``build_model`` or its ``loss``."""

ModelParameters = tuple[tuple[str, ParameterValue], ...]
"""What a model is built with, as (name, value) by name: configurations that differ in it take other steps."""


def own_parameters(configuration: Configuration) -> dict[str, ParameterValue]:
    """Return the user's own parameters of a configuration by their bare names: ``{"hidden": 64, "alpha": 0.5}``.

    No name stands in both groups.
    """
    both = (parameters_of_group(configuration.parameters, group) for group in OWN_GROUPS)
    return {name: value for own in both for name, value in own.items()}


def parameters_of_group(parameters: Mapping[str, ParameterValue], group: str) -> dict[str, ParameterValue]:
    """Return those of a configuration's parameters that are ``model``'s, or ``loss``'s, by their bare names."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def model_parameters(configuration: Configuration) -> ModelParameters:
    """Return the own parameters that a configuration's model is built with; empty where there are none."""
    return tuple(sorted(parameters_of_group(configuration.parameters, OWN_GROUPS[0]).items()))
