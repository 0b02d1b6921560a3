"""Parts of a spec."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from bssearch import registry
from bssearch.errors import UsageError, problem_in_words
from bssearch.records import LARGEST_METRIC, OWN_GROUPS, Configuration, Goal, ParameterValue
from bssearch.spec.space import (
    DECAY_SHARE,
    OPTIONAL,
    TRAINING_PARAMETERS,
    UNKNOWN_KEY,
    Domain,
    Optimizer,
    ScheduleName,
    SearchSpace,
    StrictModel,
    bounds,
    split_batch,
    within_limits,
)
from bssearch.spec.space.domains import Positive, Range
from bssearch.spec.space.optimizers import OwnRange, OwnValues, as_in_domain


class TrainingSpec(StrictModel):
    """The computation of training steps.

    ``precision: auto`` is bf16 if the CUDA device has bf16, else fp32. ``fused: null`` fuses optimizers on CUDA only.
    ``data: device`` keeps the data on the device, as does ``auto`` if the data fit. Otherwise, ``loader_workers``
    processes stream the data. Batch normalisation uses ``ghost_batch_size`` samples (null: micro-batch), or, if
    ``sync_batch_norm`` is true, the micro-batches of all devices. With ``batch_unit: tokens``, batch sizes and samples
    count tokens, including padding.
    """

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    channels_last: bool = False
    fused: bool | None = None
    activation_checkpointing: bool = False
    deterministic: bool = False
    ghost_batch_size: int | None = Field(default=None, ge=2)
    sync_batch_norm: bool = False
    data: Literal["auto", "device", "host"] = "auto"
    loader_workers: int = Field(default=2, ge=0, le=256)
    measure_noise: bool = True
    batch_unit: Literal["samples", "tokens"] = "samples"

    @property
    def counts_tokens(self) -> bool:
        return self.batch_unit == "tokens"

    @model_validator(mode="after")
    def _one_kind_of_batch_norm(self) -> Self:
        if self.ghost_batch_size is not None and self.sync_batch_norm:
            raise ValueError(f"ghost_batch_size = {self.ghost_batch_size} must be null with sync_batch_norm = true")
        if self.ghost_batch_size is not None and self.counts_tokens:
            raise ValueError(f"ghost_batch_size = {self.ghost_batch_size} must be null with batch_unit = tokens")
        return self


T = TypeVar("T")

MOST_SLOTS = 65536


def _known(kind: registry.Kind) -> Callable[[str], str]:
    def validate(name: str) -> str:
        if not registry.is_known(kind, name):
            raise ValueError(f"must be one of {registry.choices(kind)}")
        return name

    return validate


def _schema(kind: registry.Kind) -> dict[str, Any]:
    return {"anyOf": [{"enum": list(registry.BUILT_IN[kind])}, {"type": "string"}]}


ExecutorName = Annotated[str, AfterValidator(_known("executors")), WithJsonSchema(_schema("executors"))]
SamplerName = Annotated[str, AfterValidator(_known("samplers")), WithJsonSchema(_schema("samplers"))]
PrunerName = Annotated[str, AfterValidator(_known("pruners")), WithJsonSchema(_schema("pruners"))]
ObjectiveName = Annotated[str, AfterValidator(_known("objectives")), WithJsonSchema(_schema("objectives"))]
BoardName = Annotated[str, AfterValidator(_known("boards")), WithJsonSchema(_schema("boards"))]


def _slots(given: Any) -> Any:
    if given != "auto" and (type(given) is not int or not 1 <= given <= MOST_SLOTS):
        raise ValueError(
            f"must be a whole number from 1 to {MOST_SLOTS}, or auto (a slot for each GPU, or up to four on a CPU)"
        )
    return given


MOST_DEVICES = 1024

DeviceCount = Annotated[int, Field(strict=True, ge=1, le=MOST_DEVICES)]

Slots = Annotated[
    int | Literal["auto"],
    PlainValidator(_slots),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_SLOTS}, {"const": "auto"}]}),
]


class TargetSpec(StrictModel):
    """The metric value to reach on the validation data."""

    metric: str = Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
    value: float = Field(ge=-LARGEST_METRIC, le=LARGEST_METRIC)
    goal: Goal = Goal.MAXIMIZE


MOST_ARGUMENTS = 1000

Argument = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00]*$")]


class ScaleSpec(StrictModel):
    """A model with ``parameters`` parameters that trains on ``samples`` samples to the metric ``target``.

    ``workload_settings`` override the spec's settings. ``arguments`` follow the spec's arguments or command.
    """

    parameters: int = Field(ge=1, le=10**18)
    samples: int = Field(ge=1, le=10**18)
    target: float = Field(ge=-LARGEST_METRIC, le=LARGEST_METRIC)
    workload_settings: dict[str, JsonValue] = Field(default_factory=dict)
    arguments: tuple[Argument, ...] = Field(default=(), max_length=MOST_ARGUMENTS)


class DefaultSpec(StrictModel):
    """The configuration in use today: the first trial, and the baseline of speed-ups.

    Missing fields take the space's fixed values. Searched fields are required. ``learning_rate`` applies at
    ``batch_size`` and may be outside the space.
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
    schedule: ScheduleName | None = None
    horizon_samples: int | None = None
    decay_share: float | None = None
    model: OwnValues = None
    loss: OwnValues = None
    augmentation: OwnValues = None

    _limits = field_validator(*TRAINING_PARAMETERS, *OPTIONAL, "horizon_samples", "decay_share")(within_limits)


def _with_option(data: Any, name: str, default: Any) -> Any:
    # Earlier versions stored the option beside the part's name.
    if not isinstance(data, Mapping) or name not in data or not isinstance(data.get("options", {}), Mapping):
        return data
    rest = {key: value for key, value in data.items() if key != name}
    return rest if data[name] == default else {**rest, "options": {name: data[name], **rest.get("options", {})}}


def made_with(kind: Callable[..., T], options: Mapping[str, Any], place: str, *given: Any) -> T:
    """Call ``kind(*given, **options)``. Raises `UsageError` if the options do not match the annotations."""
    try:
        found = _options_of(kind, len(given)).model_validate(options)
    except ValidationError as error:
        problem = error.errors()[0]
        option = ".".join(map(str, problem["loc"])) or problem["ctx"]["key"]
        shown = "" if problem["type"] in {UNKNOWN_KEY, "missing"} else f" = {problem['input']!r}"
        message = problem_in_words(problem)
        raise UsageError(f"{place}.{option}{shown}: {message[:1].lower()}{message[1:]}") from None
    return kind(*given, **{name: getattr(found, name) for name in options})


@cache
def _options_of(kind: Callable[..., Any], given: int) -> type[StrictModel]:
    fields: dict[str, Any] = {
        one.name: (one.annotation, Field() if one.default is one.empty else one.default)
        for one in list(parameters_of(kind).values())[given:]
    }
    return create_model("Options", __base__=StrictModel, **fields)


def parameters_of(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a class, with evaluated annotations (`Any` if unknown)."""
    scope = getattr(inspect.unwrap(kind.__init__), "__globals__", {})
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return {
        name: one.replace(annotation=_evaluated(one.annotation, scope))
        for name, one in inspect.signature(kind).parameters.items()
        if one.kind in named
    }


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    try:
        found = eval(annotation, scope) if isinstance(annotation, str) else annotation
    except NameError:  # imported for type checkers only
        return Any
    return Any if found is inspect.Parameter.empty else found


class SamplerSpec(StrictModel):
    """The sampler of configurations; see `bssearch guide searching`.

    ``optuna:CLASS`` and ``optunahub:PACKAGE`` sample all parameters but the batch size.
    """

    name: SamplerName = "auto"
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _startup_trials(cls, data: Any) -> Any:
        return _with_option(data, "startup_trials", 6)


class PrunerSpec(StrictModel):
    """The pruner of trials; see `bssearch guide searching`.

    Unless ``name`` is ``none``, a trial ends at ``slack`` × the fastest time to the target. Enqueued trials, and
    evidence trials that compare batch sizes, may run longer. By default, ``slack`` follows the seed-to-seed spread.
    If all checkpoints take more than ``checkpoint_gib`` GiB, the least promising paused trial ends.
    """

    name: PrunerName = "balanced"
    options: dict[str, JsonValue] = Field(default_factory=dict)
    slack: float | None = Field(default=None, ge=1)
    checkpoint_gib: float = Field(default=10.0, ge=0, le=1e6)

    @model_validator(mode="before")
    @classmethod
    def _lag(cls, data: Any) -> Any:
        return _with_option(data, "lag", 3.0)


class ConfirmSpec(StrictModel):
    """The runs of finalists with fresh seeds.

    The finalists are configurations of the ``top`` batch sizes (up to two each), the best size's neighbours, the
    default's size and the largest size without accumulation. A finalist gets ``runs`` runs, or fewer if clearly worse.
    If ``max_runs`` is set, indistinguishable finalists get further runs, up to this number each. Further runs end when
    the answer is final, more runs would hardly help, or confirmation has trained for ``train_seconds``.
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
            raise ValueError(f"runs = 0 must be >= 1 with max_runs = {self.max_runs}")
        if self.train_seconds is not None and self.max_runs is None:
            raise ValueError(
                f"train_seconds = {self.train_seconds:g} needs max_runs, because train_seconds limits the runs after "
                f"the first {self.runs}; add max_runs"
            )
        return self


class BudgetSpec(StrictModel):
    """The limits of the search, without confirmation.

    After search trials of all drivers have trained and evaluated for ``wall_seconds``, only enqueued trials and retries
    of uncapped trials start. Overlapping trials count once, and step-time measurements do not count.

    After ``least_trials`` trials, the search ends early if the expected improvement of the best time stays below the
    share ``least_improvement``. Of the built-in samplers, only ``auto`` estimates improvements.

    If the space has a ``batch_schedule``, up to ``schedule_trials`` trials with growing batches follow confirmation.
    """

    trials: int = Field(ge=1, le=1_000_000)
    trial_train_seconds: float = Field(gt=0, le=1e9)
    wall_seconds: float | None = Field(default=None, gt=0, le=1e9)
    least_improvement: float = Field(default=0.02, ge=0, lt=1)
    least_trials: int = Field(default=0, ge=0, le=1_000_000)
    schedule_trials: int = Field(default=12, ge=0, le=10_000)


class ExecutorSpec(StrictModel):
    """Where trials run: ``slots`` trials at once, with ``threads`` CPU threads per trial, on ``device``.

    ``slots: auto`` is one slot per ``devices`` idle CUDA devices. On a CPU, ``auto`` is up to four slots, by cores and
    memory, or one slot for a user's program. ``local`` runs a worker process per slot. ``inline`` runs one trial at a
    time in this process. ``ray`` uses the cluster at ``address`` (``auto`` or ``HOST:PORT``), else local Ray. A trial
    without progress for ``hang_seconds`` counts as hung. A trial trains on ``devices`` devices. Of several numbers of
    devices, the search uses the smallest. Later, runs of the best batch sizes use the larger numbers.
    ``memory_limit_gib`` simulates a smaller device, and on a CPU limits each worker's data segment.
    """

    name: ExecutorName = "local"
    slots: Slots = 1
    threads: int = Field(default=1, ge=1)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    hang_seconds: Positive = 300.0
    devices: Annotated[tuple[DeviceCount, ...], Field(min_length=1)] = (1,)
    memory_limit_gib: float | None = Field(default=None, gt=0, le=1e6)
    address: str | None = Field(default=None, min_length=1, max_length=300)

    @field_validator("devices", mode="before")
    @classmethod
    def _single_count(cls, given: Any) -> Any:
        return [given] if isinstance(given, int) else given

    @field_validator("devices")
    @classmethod
    def _ascending(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({*devices}))

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.address is not None and self.name != "ray":
            raise ValueError(f"address = {self.address!r} needs the executor ray, not {self.name}; remove address")
        if self.name != "local" and self.devices != (1,):
            raise ValueError(f"devices = {self.devices[-1]} needs the executor local, not {self.name}; remove devices")
        return self

    @property
    def world_size(self) -> int:
        return self.devices[0]

    @property
    def least_slots(self) -> int:
        return 1 if self.slots == "auto" else self.slots

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * 2**30)


def whole_configuration(default: DefaultSpec, space: SearchSpace) -> Configuration:
    """Complete a default with the space's fixed values. Raises `ValueError` for a missing or unknown value."""

    def fixed(name: str, given: Any, domain: Domain | None) -> Any:
        if given is not None or domain is None:
            return given
        low, high = bounds(domain)
        if low != high:
            raise ValueError(f"{name} is searched but missing from the default; give the default a value")
        bare = name.rpartition(".")[2]
        return space.carried({bare: low}, default.batch_size)[bare]

    optimizer = default.optimizer or _only(space.optimizers, "optimizer")
    parameters: dict[str, ParameterValue] = {}
    for name, value in optimizer.options.items():
        given = value if default.optimizer is not None and not isinstance(value, Range | tuple) else None
        parameters[name] = value if isinstance(value, bool) else fixed(f"optimizer.{name}", given, value)
    schedule = default.schedule or _only(space.schedule.names, "schedule")
    parameters["schedule"] = schedule
    if schedule != "constant":
        horizon = fixed("horizon_samples", default.horizon_samples, space.schedule.horizon_samples)
        if horizon is None:
            raise ValueError(f"a {schedule} schedule needs horizon_samples; add horizon_samples to the default")
        parameters["horizon_samples"] = round(horizon)
    if schedule == "warmup_stable_decay":
        parameters["decay_share"] = float(
            fixed("decay_share", default.decay_share, space.schedule.decay_share or DECAY_SHARE)
        )
    parameters |= {
        name: float(value)
        for name in OPTIONAL
        if (value := fixed(name, getattr(default, name), getattr(space, name))) is not None
    }
    parameters |= _own_values(default, space)
    regular: dict[str, Any] = {
        name: float(fixed(name, getattr(default, name), getattr(space, name))) for name in TRAINING_PARAMETERS
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


def _own_values(default: DefaultSpec, space: SearchSpace) -> dict[str, ParameterValue]:
    given = {
        f"{group}.{name}": value for group in OWN_GROUPS for name, value in (getattr(default, group) or {}).items()
    }
    domains = space.own_domains
    if unknown := [name for name in given if name not in domains]:
        raise ValueError(f"default.{unknown[0]} is given, but there is no space.{unknown[0]}; add space.{unknown[0]}")
    values: dict[str, ParameterValue] = {}
    for name, domain in domains.items():
        if name in given:
            values[name] = as_in_domain(name, given[name], domain)
        elif isinstance(domain, OwnRange):
            raise ValueError(f"{name} is searched but missing from the default; give the default a value")
        else:
            values[name] = _only(domain, name) if isinstance(domain, tuple) else domain
    return values


def _only(choices: Sequence[Any], name: str) -> Any:
    if len(choices) > 1:
        raise ValueError(f"{name} is searched but missing from the default; give the default a value")
    return choices[0]
