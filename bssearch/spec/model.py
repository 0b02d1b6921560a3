"""The model of a study's spec, and the hash of the question it asks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from bssearch import registry
from bssearch.records import Configuration, Goal, Objective, ParameterValue, Target, TrainingSettings
from bssearch.space import (
    OPTIMIZER_SETTINGS,
    OPTIONAL,
    REGULAR,
    Domain,
    Optimizer,
    SearchSpace,
    StrictModel,
    bounds,
    split_batch,
    within_limits,
)

QUESTION_FIELDS = ("workload", "workload_settings", "target", "objective", "space", "default", "training")
IMPORTED = "imported"
"""The workload of a study whose runs were made elsewhere: none that could be run."""

Positive = Annotated[float, Field(gt=0)]


class TargetSpec(StrictModel):
    """The metric value to reach on the validation part."""

    metric: str
    value: float
    goal: Goal = Goal.MAXIMIZE


class DefaultSpec(StrictModel):
    """The configuration in use today: the first trial, and the baseline of every speed-up.

    What is left out takes the space's fixed value; what the space searches must be given. ``learning_rate`` is the
    actual one at ``batch_size``. It may lie outside the space.
    """

    batch_size: int = Field(ge=1)
    learning_rate: Positive
    warmup_epochs: float | None = None
    weight_decay: float | None = None
    dropout: float | None = None
    label_smoothing: float | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    optimizer: Optimizer | None = None
    schedule: Literal["constant", "cosine", "linear"] | None = None
    horizon_samples: int | None = None

    _limits = field_validator(*REGULAR, *OPTIONAL, "horizon_samples")(within_limits)


class SamplerSpec(StrictModel):
    """How the configurations to try are chosen.

    ``auto`` chooses batch size and all else by a model of the time to the target. ``tpe``, ``gp`` and ``random`` are
    Optuna's: they choose the rest once the batch size has been allocated, at random for the first ``startup_trials``.
    ``grid`` tries every combination of a space of lists.
    """

    name: Literal["auto", "tpe", "gp", "random", "grid"] = "auto"
    startup_trials: int = Field(default=6, ge=1)


class PrunerSpec(StrictModel):
    """When a trial is stopped early.

    ``cap``: past ``slack`` × the incumbent's time-to-target. ``safe``, ``balanced`` and ``fast``: also paused while its
    pace leaves it no chance, the sooner the later the name. ``race``: also stopped where it is worse now than the
    incumbent was at 1/``lag`` of the time. ``median``, ``asha`` and ``hyperband``: also what Optuna's pruner of that
    name prunes. ``none``: only at the budget's limit.

    Without ``slack`` it follows from how much the study's own seeds differ. Paused trials take at most
    ``checkpoint_gib`` of disk.
    """

    name: Literal["safe", "balanced", "fast", "race", "cap", "median", "asha", "hyperband", "none"] = "balanced"
    slack: float | None = Field(default=None, ge=1)
    lag: float = Field(default=3.0, gt=1)
    checkpoint_gib: float = Field(default=10.0, ge=0, le=1e6)


class ConfirmSpec(StrictModel):
    """Fresh seeds for the finalists: the ``top`` best batches, two configurations each, the default, the largest.

    Each has ``runs`` of them. With ``max_runs`` those that are not told apart go on, seed by seed, until the
    recommendation is settled, they have had so many, or the confirmation's runs have taken ``train_seconds`` together.
    """

    top: int = Field(default=2, ge=1)
    runs: int = Field(default=3, ge=0)
    max_runs: int | None = Field(default=None, ge=1, le=10_000)
    train_seconds: float | None = Field(default=None, gt=0, le=1e9)

    @model_validator(mode="after")
    def _more_runs_than_the_first(self) -> Self:
        if self.max_runs is not None and self.max_runs < self.runs:
            raise ValueError(f"max_runs = {self.max_runs} must be >= runs = {self.runs}")
        if self.max_runs is not None and self.runs == 0:
            raise ValueError(f"runs = 0 confirms nothing: with max_runs = {self.max_runs} it must be >= 1")
        if self.train_seconds is not None and self.max_runs is None:
            raise ValueError(
                f"train_seconds = {self.train_seconds:g} ends the runs after the first {self.runs}: it needs max_runs"
            )
        return self


class BudgetSpec(StrictModel):
    """What the search may spend; confirmation comes on top. ``wall_seconds`` counts the time trials were running.

    It ends before that where no trial is expected to better the incumbent's time by a share of ``least_improvement``,
    as far as the sampler can say: ``auto`` does.
    """

    trials: int = Field(ge=1, le=1_000_000)
    trial_train_seconds: float = Field(gt=0, le=1e9)
    wall_seconds: float | None = Field(default=None, gt=0, le=1e9)
    least_improvement: float = Field(default=0.02, ge=0, lt=1)


class TrainingSpec(StrictModel):
    """How the steps are computed; see `bssearch.records.TrainingSettings`, whose fields these are."""

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    compile: Literal["none", "default", "reduce-overhead"] = "none"
    channels_last: bool = False
    fused: bool | None = None
    activation_checkpointing: bool = False
    deterministic: bool = False
    ghost_batch_size: int | None = Field(default=None, ge=2)
    data: Literal["auto", "device", "host"] = "auto"
    loader_workers: int = Field(default=2, ge=0, le=256)
    measure_noise: bool = True

    @property
    def record(self) -> TrainingSettings:
        """Return the settings as the record that every layer speaks."""
        return TrainingSettings(**self.model_dump())


class ExecutorSpec(StrictModel):
    """Where trials run: ``slots`` at once, each with ``threads`` CPU threads on ``device``.

    ``local`` runs each slot in a worker process of this machine; ``inline`` runs one trial at a time in this very
    process, for a debugger. A trial without progress for ``hang_seconds`` counts as hung. ``memory_limit_gib`` pretends
    a device with less memory than it has; on the CPU it limits the data segment of each worker.
    """

    name: str = "local"
    slots: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    hang_seconds: Positive = 300.0
    memory_limit_gib: float | None = Field(default=None, gt=0, le=1e6)

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if not registry.is_known("executors", name):
            raise ValueError(f"{name!r} is not known; there are {', '.join(registry.names('executors'))}")
        return name

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return the limit in bytes, None without one."""
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * 2**30)


class StudySpec(StrictModel):
    """Everything a study is asked: read from a file by `load_spec`, or made in Python."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    workload: str = Field(min_length=1)
    workload_settings: dict[str, JsonValue] = Field(default_factory=dict)
    target: TargetSpec
    objective: Objective = Objective.TIME_TO_TARGET
    price_per_device_hour: float | None = Field(default=None, gt=0, le=1e9)
    space: SearchSpace
    default: DefaultSpec
    training: TrainingSpec = TrainingSpec()
    sampler: SamplerSpec = SamplerSpec()
    pruner: PrunerSpec = PrunerSpec()
    confirm: ConfirmSpec = ConfirmSpec()
    budget: BudgetSpec
    seed: int = Field(default=0, ge=0, lt=2**31)
    executor: ExecutorSpec = ExecutorSpec()

    @field_validator("default")
    @classmethod
    def _default_is_whole(cls, default: DefaultSpec, info: ValidationInfo) -> DefaultSpec:
        space = info.data.get("space")
        if isinstance(space, SearchSpace):
            whole_configuration(default, space)
        return default

    @model_validator(mode="after")
    def _rungs_to_compare(self) -> Self:
        trials_needed = len({*self.space.rungs, self.default.batch_size})
        if self.budget.trials < trials_needed:
            raise ValueError(
                f"budget.trials = {self.budget.trials} must be >= {trials_needed}, one for each batch size to try"
            )
        return self

    @model_validator(mode="after")
    def _grid_of_lists(self) -> Self:
        if self.sampler.name == "grid":
            ranges = [
                dimension.name.removeprefix("reference_")  # the learning rate's coordinate
                for dimension in self.space.dimensions()
                if not dimension.choices
            ]
            if ranges:
                raise ValueError(f"sampler = grid needs lists of values: {', '.join(ranges)} is given as a range")
        return self

    @property
    def record_target(self) -> Target:
        """Return the target as the record that every layer speaks."""
        return Target(metric=self.target.metric, value=self.target.value, goal=self.target.goal)

    @property
    def default_configuration(self) -> Configuration:
        """Return the default as a configuration to run."""
        return whole_configuration(self.default, self.space)

    @property
    def default_is_known(self) -> bool:
        """Return whether the default is somebody's own; of imported runs nobody may have said."""
        return self.workload != IMPORTED or bool(self.workload_settings.get("default_known"))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return all batch sizes of the study, ascending: the ladder's and the default's."""
        return tuple(sorted({*self.space.rungs, self.default.batch_size}))

    @property
    def question(self) -> dict[str, Any]:
        """Return what defines the question, as JSON values; the rest may change when a study goes on."""
        return self.model_dump(mode="json", include=set(QUESTION_FIELDS))

    @property
    def question_hash(self) -> str:
        """Return the digest of the question; settings of training and an average count where they are asked for."""
        question = self.question
        for part in (question["space"], question["default"]):
            if part["ema_decay"] is None:
                del part["ema_decay"]
        if self.training == TrainingSpec():
            del question["training"]
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]


def changes(old: Any, new: Any, path: str = "") -> dict[str, tuple[object, object]]:
    """Return the dotted fields in which two JSON values differ, each with its (old, new) values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[object, object]] = {}
        for key in sorted({*old, *new}):
            found |= changes(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if old == new else {path: (old, new)}


def whole_configuration(default: DefaultSpec, space: SearchSpace) -> Configuration:
    """Return a default as a whole configuration: what it leaves out takes the space's fixed value.

    Raises `ValueError` naming what the space searches and the default does not give.
    """

    def fixed(name: str, given: Any, domain: Domain | None) -> Any:
        if given is not None or domain is None:
            return given
        low, high = bounds(domain)
        if low != high:
            raise ValueError(f"{name} is searched, so the default must give it")
        return low

    optimizer = default.optimizer or _only(space.optimizers, "optimizer")
    parameters: dict[str, ParameterValue] = {}
    for name in type(optimizer).model_fields:
        if name not in OPTIMIZER_SETTINGS:
            value = getattr(optimizer, name)
            parameters[name] = value if isinstance(value, bool) else fixed(f"optimizer.{name}", None, value)
    schedule = default.schedule or _only(space.schedule.names, "schedule")
    parameters["schedule"] = schedule
    if schedule != "constant":
        horizon = fixed("horizon_samples", default.horizon_samples, space.schedule.horizon_samples)
        if horizon is None:
            raise ValueError(f"a {schedule} schedule needs horizon_samples")
        parameters["horizon_samples"] = round(horizon)
    for name in OPTIONAL:
        value = fixed(name, getattr(default, name), getattr(space, name))
        if value is not None:
            parameters[name] = float(value)
    regular: dict[str, Any] = {
        name: float(fixed(name, getattr(default, name), getattr(space, name))) for name in REGULAR
    }
    micro_batch_size, accumulation_steps = split_batch(default.batch_size, space.max_micro_batch_size)
    return Configuration(
        batch_size=default.batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        learning_rate=default.learning_rate,
        optimizer=optimizer.name,
        parameters=parameters,
        **regular,
    )


def _only(choices: Sequence[Any], name: str) -> Any:
    if len(choices) > 1:
        raise ValueError(f"{name} is searched, so the default must give it")
    return choices[0]
