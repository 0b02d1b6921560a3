"""Questions before a first study, and the study's spec from the answers."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import model_validator

from bssearch.errors import LaunchError, require
from bssearch.planning.memory import plan_memory
from bssearch.planning.memory.networks import ARCHITECTURES
from bssearch.planning.memory.parameters import FORMATS, parameter_bytes
from bssearch.planning.memory.request import GIB, HEADROOM, MIB, MemoryPlanRequest, Shape, what_fits
from bssearch.planning.requests import (
    Count,
    Finite,
    Name,
    Note,
    Parameters,
    Plan,
    Positive,
    Request,
    notes_on,
    planned,
)
from bssearch.records import rule_of_optimizer
from bssearch.records.text import percent
from bssearch.registry import Option
from bssearch.spec import FINE_TUNING_FACTOR, SCRATCH_RATES, StudySpec, load_spec

SAFE_SHARE = 1 - HEADROOM  # a plan fills this share of a device's memory, which is feasible, not optimal

# Memory is the bottleneck if the fixed part takes more than this share, or if fewer samples fit
TIGHT_SHARE = 0.5
SMALL_MICRO_BATCH = 16

# a shipped workload as a runnable stand-in, and the number of training samples
STAND_IN = "digits"
STAND_IN_SAMPLES = 1077

# trials per batch size, and a trial's limit / today's training seconds
TRIALS_PER_SIZE = 5
LIMIT_OVER_SECONDS = 3

# each priority's objective and meaning
OBJECTIVES = {
    "speed": ("time_to_target", "least seconds to the target at any batch size"),
    "accuracy": ("metric_in_budget", "the best metric within trial_train_seconds"),
    "cost": ("cost_to_target", "least device-hours to the target"),
    "memory": ("time_to_target", "least seconds to the target among batches that fit"),
}

UNKNOWN = "not known"

# the options that a person answers, in order
QUESTIONS = (
    "memory_gib",
    "parameters",
    "precision",
    "optimizer",
    "priority",
    "start",
    "devices",
    "workload",
    "metric",
    "target",
    "goal",
    "seconds",
)


class StartRequest(Request):
    """The answers to `QUESTIONS`, and optional details."""

    memory_gib: Annotated[Positive, Option("Memory of a device, in GiB.")] = 24.0
    parameters: Annotated[Parameters, Option("Number of model parameters, such as 25000000 or 25M.", metavar="N")] = (
        25_000_000
    )
    precision: Annotated[str, Option("Precision.", choices=("fp32", "bf16", "fp16"))] = "bf16"
    optimizer: Annotated[str, Option("Optimizer.", choices=tuple(SCRATCH_RATES))] = "adamw"
    priority: Annotated[str, Option("First priority.", choices=tuple(OBJECTIVES))] = "speed"
    start: Annotated[
        str, Option("Start from scratch or from a pretrained model.", choices=("scratch", "fine_tuning"))
    ] = "scratch"
    devices: Annotated[Count, Option("Number of devices of the final training.")] = 1
    workload: Annotated[Name, Option("Workload: FILE.py:NAME, FILE.py, or a shipped workload as a stand-in.")] = (
        STAND_IN
    )
    metric: Annotated[Name, Option("Name of the target's metric.")] = "accuracy"
    target: Annotated[Finite, Option("Target value of the metric.")] = 0.97
    goal: Annotated[str, Option("Direction in which the metric improves.", choices=("maximize", "minimize"))] = (
        "maximize"
    )
    seconds: Annotated[Positive, Option("Seconds that a training run takes to the target with today's settings.")] = 2.0
    name: Annotated[Name, Option("The study's name.")] = "my-study"
    sample_mib: Annotated[
        Positive | None, Option("Memory per sample in MiB, as from `bssearch plan memory`.", shown_default=UNKNOWN)
    ] = None
    model: Annotated[
        Name | None,
        Option("Name of a network, or a model to trace, as in `bssearch plan memory`."),
    ] = None
    input_shape: Annotated[
        Shape | None, Option("Shape of a sample, such as 3x224x224, with --model.", flag="--input", metavar="SHAPE")
    ] = None
    train_samples: Annotated[Count | None, Option("Training samples.", shown_default=UNKNOWN)] = None
    batch: Annotated[Count | None, Option("Batch size in use today.", shown_default="the usual size")] = None
    learning_rate: Annotated[Positive | None, Option("Learning rate in use today.", shown_default="the usual rate")] = (
        None
    )
    price_per_device_hour: Annotated[Positive | None, Option("Price per device-hour; needs priority cost.")] = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        require(
            self.price_per_device_hour is None or self.priority == "cost",
            f"price_per_device_hour = {self.price_per_device_hour} needs priority = 'cost', but priority = "
            f"{self.priority!r}; change priority or omit the price",
        )
        require(
            (self.batch or 0) <= (self.samples or math.inf),
            f"batch = {self.batch} must be <= train_samples = {self.samples} of {self.workload}",
        )
        given = sorted(self.model_fields_set & {"parameters", "sample_mib"})
        values = " and ".join(f"{name} = {getattr(self, name)}" for name in given)
        require(
            self.model is None or not given,
            f"model = {self.model} contradicts {values}; omit model or {' and '.join(given)}",
        )
        require(
            self.model is not None or self.input_shape is None,
            f"input_shape = {self.input_shape} needs a model; give a model, or omit input_shape",
        )
        return self

    @property
    def samples(self) -> int | None:
        return STAND_IN_SAMPLES if self.train_samples is None and self.workload == STAND_IN else self.train_samples

    @property
    def is_fine_tuning(self) -> bool:
        return self.start == "fine_tuning"

    @property
    def is_script(self) -> bool:
        return self.workload.endswith(".py")

    @property
    def memory(self) -> MemoryPlanRequest:
        return MemoryPlanRequest(parameters=self.parameters, precision=self.precision, optimizer=self.state)

    @property
    def state(self) -> str:
        """The optimizer's name in memory plans, in which ``sgd`` has no momentum."""
        return "momentum" if self.optimizer == "sgd" else self.optimizer

    def with_memory_of_model(self) -> Self:
        if self.model is None:
            return self
        source: dict[str, Any] = {"network" if self.model in ARCHITECTURES else "model": self.model}
        plan = plan_memory(**source, input_shape=self.input_shape, precision=self.precision, optimizer=self.state)
        sample_mib = (plan.activation_bytes_per_sample or 0) / MIB
        return self.model_copy(update={"parameters": plan.parameters, "sample_mib": sample_mib})

    @property
    def sample_bytes(self) -> float:
        return (self.sample_mib or 0.0) * MIB

    @property
    def room_bytes(self) -> float:
        """Bytes for samples if the plan fills `SAFE_SHARE` of the memory."""
        return SAFE_SHARE * math.floor(self.memory_gib * GIB) - parameter_bytes(self.memory).fixed

    @property
    def safe_micro_batch(self) -> int | None:
        return min(math.floor(self.room_bytes / self.sample_bytes), 2**30) if self.sample_mib else None

    @property
    def saves_memory(self) -> bool:
        few = self.safe_micro_batch is not None and self.safe_micro_batch < SMALL_MICRO_BATCH
        is_tight = parameter_bytes(self.memory).fixed > TIGHT_SHARE * self.memory_gib * GIB
        return few or is_tight or self.priority == "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan(Plan):
    """The plan of a first study, with ``reasons`` for fields of the spec."""

    answers: dict[str, Any]
    spec: StudySpec
    yaml: str
    reasons: dict[str, str]
    fixed_bytes: int
    safe_micro_batch: int | None
    notes: list[Note]

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values, with ``spec`` as in the YAML text."""
        return {**asdict(self), "spec": yaml.safe_load(self.yaml)}


@planned(StartRequest)
def plan_start(asked: StartRequest) -> StartPlan:
    """Plan the spec of a first study.

    Raises:
        UsageError: An argument is invalid, or two arguments contradict each other.
        LaunchError: The model and a sample do not fit into `SAFE_SHARE` of the memory.

    Example: ``print(bssearch.plan_start(memory_gib=24, parameters="110M"))``
    """
    from jinja2 import Environment

    asked = asked.with_memory_of_model()
    fixed = parameter_bytes(asked.memory).fixed
    _check_fits(asked, fixed)
    low, high, batch = _ladder(asked)
    rate = asked.learning_rate or SCRATCH_RATES[asked.optimizer] / (FINE_TUNING_FACTOR if asked.is_fine_tuning else 1)
    below, above = (30, 3) if asked.is_fine_tuning else (10, 10)
    micros = [_power_below(asked.safe_micro_batch)] if asked.safe_micro_batch else []
    micro = min([*micros, 64] if asked.devices > 1 else micros, default=high)
    sizes = high.bit_length() - low.bit_length() + 1  # low and high are powers of two
    max_micro = micro if micro < max(high, batch) else None
    room = (
        "The memory probe finds the largest micro-batch; `bssearch plan memory` estimates this size."
        if asked.safe_micro_batch is None
        else f"A micro-batch of {asked.safe_micro_batch} fits in {percent(SAFE_SHARE)} of the memory."
    )
    reasons = {name: reason for name, reason in _reasons(asked, batch, max_micro).items() if reason}
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)  # YAML needs no escaping
    environment.filters |= {"text": json.dumps, "number": _number}
    text = environment.from_string(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).render(
        asked=asked,
        why={name: f" # {reason}" for name, reason in reasons.items()},
        fixed_gib=f"{fixed / GIB:.3g}",
        room=room,
        objective=OBJECTIVES[asked.priority][0],
        low=low,
        high=high,
        batch=batch,
        rate=rate,
        lowest_rate=float(f"{rate / below:.3g}"),
        highest_rate=float(f"{rate * above:.3g}"),
        rule=rule_of_optimizer(asked.optimizer).value,
        max_micro=max_micro,
        trials=TRIALS_PER_SIZE * (sizes + (batch.bit_count() != 1)),
        limit=LIMIT_OVER_SECONDS,
    )
    return StartPlan(
        answers=asked.model_dump(),
        spec=load_spec(yaml.safe_load(text)),
        yaml=text,
        reasons=reasons,
        fixed_bytes=fixed,
        safe_micro_batch=asked.safe_micro_batch,
        notes=notes_on(
            {
                "gradients_not_of_batch": True,
                "eighty_percent_feasible": True,
                "accumulation_not_stale": True,
                "largest_not_best": True,
            }
        ),
    )


def _check_fits(asked: StartRequest, fixed: int) -> None:
    if asked.room_bytes >= asked.sample_bytes:
        return
    needed = math.ceil((fixed + asked.sample_bytes) / SAFE_SHARE)
    room = asked.room_bytes + fixed - asked.sample_bytes
    sample = f" and a sample takes {asked.sample_bytes / GIB:.3g} GiB" if asked.sample_mib else ""
    cures = "; ".join(what_fits(asked.memory, needed, room, FORMATS))
    raise LaunchError(
        f"memory_gib = {asked.memory_gib:g} is too small: {asked.parameters:,} parameters in {asked.precision} with "
        f"{asked.optimizer} take {fixed / GIB:.3g} GiB{sample}, but {percent(SAFE_SHARE)} of the memory is "
        f"{SAFE_SHARE * asked.memory_gib:.3g} GiB",
        hint=f"train with settings that fit, as options of `bssearch plan memory`: {cures}"
        if cures
        else "use a smaller model",
    )


def _ladder(asked: StartRequest) -> tuple[int, int, int]:
    if asked.is_fine_tuning:
        low, high, batch = 8, 64, 16
    elif asked.devices > 1:
        low = _power_below(min(32 * asked.devices, 2**20))
        high, batch = max(2048, 4 * low), 2 * low
    elif asked.saves_memory:
        low, high, batch = 8, 256, 32
    else:
        low, high, batch = 16, 1024, 128
    most = high if asked.samples is None else _power_below(max(1, asked.samples // 2))
    if asked.samples is not None:
        low, high = min(low, max(1, most // 8)), min(high, most)
    return low, high, asked.batch or min(batch, high)


def _reasons(asked: StartRequest, batch: int, max_micro: int | None) -> Mapping[str, str]:
    tuning, accurate, is_script = asked.is_fine_tuning, asked.priority == "accuracy", asked.is_script
    precision = "bf16 if the device has bf16, else fp32, because fp16 needs loss scaling"
    ladder = "powers of two from a small size on, because the largest size that fits is rarely the fastest"
    of_devices = (
        f"the batch of all {asked.devices} devices together; give step times of {asked.devices} devices to "
        "`bssearch best --step-times` and `bssearch plan scale`"
    )
    micro = "splitting larger batches into micro-batches is exact, except for batch normalisation"
    return {
        "preset": "few small steps keep the pretrained model's knowledge" if tuning else "",
        "workload": "YOURS: replace this runnable stand-in by your training; `bssearch init` writes a template"
        if asked.workload == STAND_IN
        else "",
        "target": "YOURS: a value of the metric that your training reaches today; find a value with `bssearch check "
        "SPEC --suggest-target`",
        "objective": OBJECTIVES[asked.priority][1],
        "precision": ""
        if is_script
        else "your answer; auto takes bf16 if available"
        if asked.precision == "fp32"
        else precision,
        "activation_checkpointing": "saves memory by recomputing activations, for about a quarter more time; the "
        "workload must have checkpointed_modules(model)"
        if asked.saves_memory and not is_script
        else "",
        "batch_size": "16 to 32, usual in fine-tuning, and one more size on each side"
        if tuning
        else of_devices
        if asked.devices > 1
        else ladder,
        "learning_rate": f"around today's rate at batch {batch}; the search starts from the rule and tunes the rate",
        "warmup_epochs": "little warmup, because the weights are already good"
        if tuning
        else "searched, because large batches with large rates need warmup (common advice: at 8 × the default batch "
        "size and above)",
        "weight_decay": "searched, because the best value depends on batch size and learning rate",
        "dropout": "searched, because a larger batch may need more dropout; the workload must use dropout"
        if accurate
        else "",
        "label_smoothing": "searched, because a larger batch may need more smoothing" if accurate else "",
        "optimizer": "at batch 32k, tuned SGD and Adam match LARS and LAMB (Nado et al. 2021, arXiv 2102.06356)"
        if asked.optimizer in ("lars", "lamb")
        else "",
        "max_micro_batch_size": ""
        if max_micro is None
        else f"32 to 64 samples per device are usual; {micro}"
        if asked.devices > 1
        else micro,
        "default": "YOURS: your configuration today, which runs first",
        "default.learning_rate": ""
        if asked.learning_rate
        else "a tenth of the usual rate for training from scratch"
        if tuning
        else "the usual rate for training from scratch",
        "trials": f"{TRIALS_PER_SIZE} trials for each batch size; the search may end earlier",
        "trial_train_seconds": f"{LIMIT_OVER_SECONDS} × the seconds of a training run today; YOURS if your limit "
        "differs",
        "confirm": "fresh seeds for the finalists, because the best of many trials is partly luck",
        "executor": "one device; cuda if available",
    }


def _power_below(size: int) -> int:
    return int(2 ** (size.bit_length() - 1))


def _number(value: float) -> str:
    # YAML 1.1 reads 1e-05 as text
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")
