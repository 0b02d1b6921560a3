"""The target and the configuration of a trial, and the phases and states of trials."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

ParameterValue = bool | int | float | str | None


class Goal(StrEnum):
    """The direction in which the metric improves."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"

    @property
    def sign(self) -> str:
        return "≥" if self is Goal.MAXIMIZE else "≤"


class Phase(StrEnum):
    """The purpose of a trial.

    `TO_BUDGET` trains past the target, `GROWTH` searches a batch schedule, `DEVICES` trains on more devices.
    """

    SEARCH = "search"
    CONFIRM = "confirm"
    AUDIT = "audit"
    TO_BUDGET = "to_budget"
    GROWTH = "growth"
    DEVICES = "devices"
    PROBE = "probe"


class TrialState(StrEnum):
    """The state of a trial. Only `REACHED` has a time-to-target, and only `PAUSED` may resume."""

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
        return self not in {TrialState.QUEUED, TrialState.RUNNING}

    @property
    def is_censored(self) -> bool:
        """True if the trial stopped before the target. The last miss is a lower bound of the time-to-target."""
        return self in {TrialState.PAUSED, TrialState.PRUNED, TrialState.CAPPED, TrialState.EXHAUSTED}

    @property
    def is_missing(self) -> bool:
        """True if the trial has no result and uses no budget."""
        return self in {TrialState.FAILED, TrialState.LOST, TrialState.CANCELLED}

    @property
    def has_result(self) -> bool:
        return self.is_finished and not self.is_missing


def to_json(record: object) -> str:
    """Return compact JSON with sorted keys. Raises ValueError on NaN and infinities."""
    return _json(asdict(record))  # type: ignore[call-overload]


_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A metric value to reach on the validation part."""

    metric: str
    value: float
    goal: Goal = Goal.MAXIMIZE

    @property
    def in_words(self) -> str:
        return f"{self.metric} {self.goal.sign} {self.value:g}"

    def gain(self, metric: float) -> float:
        """The metric, negated if smaller is better."""
        return metric if self.goal is Goal.MAXIMIZE else -metric

    def shortfall(self, metric: float) -> float:
        """The distance to the target, at most 0 if the metric meets the target."""
        return self.gain(self.value) - self.gain(metric)

    def is_met_by(self, metric: float) -> bool:
        """True if the metric meets the target, which NaN never does."""
        return self.shortfall(metric) <= 0

    def is_above_one(self, high: float) -> bool:
        """True if the metric's name and the target imply a share, but metrics up to ``high`` exceed 1."""
        return 0 < self.value <= 1 < high and _SHARE.fullmatch(self.metric) is not None

    def is_in_other_unit(self, low: float, high: float) -> bool:
        """True if the target may be a share and the metrics percent, or the reverse."""
        is_rate = self.goal is Goal.MAXIMIZE or _RATE.fullmatch(self.metric) is not None
        return is_rate and (0 < self.value < 1 < low <= high <= 100 or 0 <= low <= high <= 1 < self.value <= 100)

    def is_percent_of_share(self, low: float, high: float) -> bool:
        """True if the target is in percent, but the metrics up to ``high`` > 0.5 are shares."""
        is_share = self.goal is Goal.MAXIMIZE and _SHARE.fullmatch(self.metric) is not None
        return is_share and low >= 0 and 0.5 < high <= 1 < self.value <= 100

    def in_unit_of(self, metric: float) -> float:
        """The target's value in the unit of ``metric``: a share or percent."""
        return self.value * (100 if metric > 1 else 0.01)


_SHARE = re.compile(r"(?:.*[/_. ])?(?:acc|accuracy|f1|auc|auroc|precision|recall|map|top[-_]?\d)", re.IGNORECASE)
_RATE = re.compile(r"(?:.*[/_. ])?(?:error|err|wer|cer|eer)(?:[/_. ]?rate)?", re.IGNORECASE)  # may be in percent

MAKE_TRAINER = ":make_trainer"  # suffix of a workload that makes a trainer per trial

LARGEST_METRIC = 1e100  # sums of squares stay finite in double precision


def is_metric(value: float) -> bool:
    """True if the value is a number within ± `LARGEST_METRIC`."""
    return abs(value) <= LARGEST_METRIC


BATCH_SCHEDULE, BATCH_STAGES = "batch_schedule", "batch_stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Values that a trial trains with. ``batch_size`` = micro-batch × accumulation steps × world size.

    With a batch schedule (in ``parameters``), ``batch_size`` is the first stage's batch size.

    Example: ``bssearch.Configuration(batch_size=64, micro_batch_size=64, learning_rate=0.1)``
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
        """The digest that identifies the configuration."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return hashlib.sha256(_json({**values, "parameters": dict(self.parameters)}).encode()).hexdigest()[:12]

    def in_micro_batches(self, micro_batch_size: int) -> Configuration:
        """The configuration with another micro-batch size, which must divide a device's share of the batch."""
        steps = self.batch_size // (micro_batch_size * self.world_size)
        return replace(self, micro_batch_size=micro_batch_size, accumulation_steps=steps)

    def on_devices(self, world_size: int, micro_batch_size: int) -> Configuration:
        """The configuration on ``world_size`` devices. Micro-batches must divide a device's share of the batch."""
        return replace(self, world_size=world_size).in_micro_batches(micro_batch_size)

    def trains_like(self, other: Configuration) -> bool:
        """True if at most the micro-batch size and the devices differ between the configurations."""
        return self._whole == other._whole

    @property
    def _whole(self) -> Configuration:
        whole = self.on_devices(1, 1)
        if not self.grows:
            return whole
        stages = re.sub(r"/\d+", "", str(self.parameters.get(BATCH_STAGES)))
        return replace(whole, parameters={**self.parameters, BATCH_STAGES: stages})

    @property
    def grows(self) -> bool:
        """True if the configuration has a batch schedule."""
        return BATCH_SCHEDULE in self.parameters


# Compile modes (see ``torch._inductor.list_mode_options``)
WITH_CUDA_GRAPHS = frozenset({"reduce-overhead", "max-autotune"})


# User-defined hyperparameters; a configuration stores them as ``GROUP.NAME``, such as ``model.hidden``.

OWN_GROUPS = ("model", "loss", "augmentation")  # for a workload's ``build_model``, ``loss`` and ``augment``

ModelParameters = tuple[tuple[str, ParameterValue], ...]  # sorted; step times depend on them


def own_parameters(configuration: Configuration) -> dict[str, ParameterValue]:
    """Return the user's parameters without the prefixes of groups. The names stay unique."""
    both = (parameters_of_group(configuration.parameters, group) for group in OWN_GROUPS)
    return {name: value for own in both for name, value in own.items()}


def parameters_of_group(parameters: Mapping[str, ParameterValue], group: str) -> dict[str, ParameterValue]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def model_parameters(configuration: Configuration) -> ModelParameters:
    return tuple(sorted(parameters_of_group(configuration.parameters, OWN_GROUPS[0]).items()))
