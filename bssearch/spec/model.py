"""A study's spec, and a program's command line with placeholders."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, PrivateAttr, ValidationInfo, field_validator, model_validator

from bssearch.errors import WorkloadError, require
from bssearch.records import (
    MAKE_TRAINER,
    NOISE_SCALE,
    OWN_GROUPS,
    Configuration,
    ModelParameters,
    NewStudy,
    ParameterValue,
    Target,
    model_parameters,
)
from bssearch.spec.parts import (
    MOST_ARGUMENTS,
    Argument,
    BoardName,
    BudgetSpec,
    ConfirmSpec,
    DefaultSpec,
    ExecutorSpec,
    ObjectiveName,
    PrunerSpec,
    SamplerSpec,
    ScaleSpec,
    TargetSpec,
    TrainingSpec,
    whole_configuration,
)
from bssearch.spec.space import (
    OPTIONAL,
    TRAINING_PARAMETERS,
    BatchRules,
    SearchSpace,
    StrictModel,
    split_batch,
)

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")  # only a name in braces is a placeholder

# Placeholders of every study, beside the names of its space.
OWN_PLACES = (
    "batch_size",
    "micro_batch_size",
    "accumulation_steps",
    "learning_rate",
    "seed",
    "evaluate_every",
    "threads",
    "device",
    "devices",
)


def places_of(command: Sequence[str]) -> set[str]:
    return {name for token in command for name in PLACE.findall(token)}


def filled(command: Sequence[str], values: Mapping[str, ParameterValue]) -> list[str]:
    """Replace a command's placeholders by values. Raises `UsageError` for an unknown placeholder."""

    def text(match: re.Match[str]) -> str:
        name = match[1]
        require(
            name in values,
            f"command: unknown placeholder {match[0]}; choose from {', '.join(sorted(values))}",
            hint="add the name to the space, or correct the placeholder",
        )
        value = values[name]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [PLACE.sub(text, token) for token in command]


def check_command(
    command: Sequence[str],
    report: Mapping[str, str],
    metric: str,
    set_parameters: Sequence[str],
    searched: Sequence[str],
) -> None:
    """Raise `ValueError` for an unknown placeholder or an invalid ``report``.

    A command with ``report`` needs placeholders for all searched parameters.
    """
    places = places_of(command)
    own = {name.rpartition(".")[2] for name in set_parameters}
    if unknown := places - own - set(OWN_PLACES):
        raise ValueError(
            f"command: unknown placeholder {{{min(unknown)}}}; choose from {', '.join(sorted({*own, *OWN_PLACES}))}"
        )
    if report and (lacking := _lacking(places, searched)):
        raise ValueError(f"{lacking}; add the placeholder")
    for name, text in report.items():
        try:
            groups = re.compile(text).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"report.{name}: {text} is not a regular expression: {error}; correct the expression"
            ) from None
        if groups != 1:
            raise ValueError(f"report.{name}: {text} must have one group, for the value, instead of {groups}")
        if name == "step" and _EPOCH.search(re.sub(r"\\[a-zA-Z]", "", text.partition("(")[0])):
            raise ValueError(f"report.step: {text} reads epochs; print and read the optimizer steps instead")
    for name in ("step", metric):
        if report and name not in report:
            raise ValueError(f"report has no expression for {name}, only for {', '.join(report)}; add report.{name}")


_RANKS = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?")  # of torchrun


def launched_ranks(command: Sequence[str]) -> str | None:
    """Return torchrun's ``--nproc-per-node``, or None if missing."""
    for token, following in zip(command, [*command[1:], ""], strict=False):
        if found := _RANKS.fullmatch(token):
            return following if found[1] is None else found[1]
    return None


def check_launcher(command: Sequence[str], devices: Sequence[int]) -> None:
    """Raise `ValueError` for more than one device if the command fixes torchrun's number of processes."""
    ranks = launched_ranks(command)
    if devices[-1] > 1 and ranks not in {None, "{devices}"}:
        raise ValueError(
            f"devices = {', '.join(map(str, devices))}: write --nproc-per-node={{devices}} in the command, not {ranks}"
        )


_EPOCH = re.compile(r"\bepochs?\W*$", re.IGNORECASE)  # the word before the number


def check_places(places: Collection[str], searched: Sequence[str]) -> None:
    if lacking := _lacking(places, searched):
        raise WorkloadError(lacking, hint="add the placeholder, or let the program call bssearch.current_trial()")


def _lacking(places: Collection[str], searched: Sequence[str]) -> str | None:
    return next(
        (
            f"command: {name} is searched, but the command does not take {{{name}}}"
            for name in searched
            if name not in places and not (name == "batch_size" and "micro_batch_size" in places)
        ),
        None,
    )


def values_of(
    configuration: Configuration,
    parameters: Mapping[str, ParameterValue],
    *,
    seed: int,
    evaluate_every: int,
    threads: int,
    device: str,
) -> dict[str, ParameterValue]:
    return {
        **parameters,
        "batch_size": configuration.batch_size,
        "micro_batch_size": configuration.micro_batch_size,
        "accumulation_steps": configuration.accumulation_steps,
        "learning_rate": configuration.learning_rate,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "threads": threads,
        "device": device,
        "devices": configuration.world_size,
    }


OF_PROGRAMS = ("arguments", "command", "report")
QUESTION_FIELDS = ("workload", "workload_settings", *OF_PROGRAMS, "target", "objective", "space", "default", "training")
OBJECTIVE = "objective"  # workload of a `bssearch.Study`, whose function trains

COMMAND = "command"  # workload of a study whose command trains

FEWEST_SCALES, MOST_SCALES = 3, 32  # a power law needs two scales, and its error one more

MOST_EXPRESSIONS = 32

IMPORTED = "imported"  # workload of an imported study

GIVEN_IN_PYTHON = "given in Python"  # workload of a spec that names no workload, passed to `bssearch.run_study`


class StudySpec(StrictModel):
    """A study's spec, from `load_spec` or Python code.

    A spec without ``workload`` and ``command`` needs a workload class to run:
    ``bssearch.run_study(spec, bssearch.Launch(workload=MyTask))``.

    ::

        spec = bssearch.StudySpec(
            name="mine",
            target={"metric": "accuracy", "value": 0.9},
            space={"batch_size": [16, 64], "learning_rate": 0.1},
            default={"batch_size": 16, "learning_rate": 0.1},
            budget={"trials": 20, "trial_train_seconds": 60},
        )
    """

    schema_version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    workload: str = Field(default=GIVEN_IN_PYTHON, min_length=1)
    workload_settings: dict[str, JsonValue] = Field(default_factory=dict)
    scales: tuple[ScaleSpec, ...] = Field(default=(), max_length=MOST_SCALES)
    arguments: tuple[Argument, ...] = Field(default=(), max_length=MOST_ARGUMENTS)
    command: tuple[Argument, ...] = Field(default=(), max_length=MOST_ARGUMENTS)
    report: dict[str, Argument] = Field(default_factory=dict, max_length=MOST_EXPRESSIONS)
    target: TargetSpec
    objective: ObjectiveName = "time_to_target"
    price_per_device_hour: float | None = Field(default=None, gt=0, le=1e9)
    space: SearchSpace
    default: DefaultSpec
    training: TrainingSpec = TrainingSpec()
    sampler: SamplerSpec = SamplerSpec()
    pruner: PrunerSpec = PrunerSpec()
    confirm: ConfirmSpec = ConfirmSpec(max_runs=30)
    budget: BudgetSpec
    seed: int = Field(default=0, ge=0, lt=2**31)
    executor: ExecutorSpec = ExecutorSpec()
    log: tuple[BoardName, ...] = ()
    _preset: str | None = PrivateAttr(default=None)

    @field_validator("command", "arguments", mode="before")
    @classmethod
    def _is_a_list_of_texts(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError("must be a list with an item for each argument, because no shell splits a string")
        for one in given if isinstance(given, list | tuple) else ():
            if not isinstance(one, str):
                raise ValueError(f"{one!r} must be a string in quotes, as in '5' or '{{batch_size}}'")
        return given

    @field_validator("log")
    @classmethod
    def _each_board_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} appears more than once; list each board once")
        return names

    @field_validator("executor")
    @classmethod
    def _starts_ranks(cls, executor: ExecutorSpec, info: ValidationInfo) -> ExecutorSpec:
        workload, command = str(info.data.get("workload")), info.data.get("command") or ()
        if executor.devices[-1] > 1 and (workload == OBJECTIVE or workload.endswith(MAKE_TRAINER)):
            raise ValueError(f"devices = {executor.devices[-1]}: a function trains in one process; use a script")
        check_launcher(command, executor.devices)
        return executor

    @field_validator("default")
    @classmethod
    def _default_is_whole(cls, default: DefaultSpec, info: ValidationInfo) -> DefaultSpec:
        space = info.data.get("space")
        if isinstance(space, SearchSpace):
            whole_configuration(default, space)
        return default

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_command(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("command") and "workload" not in data:
            return {**data, "workload": COMMAND}
        return data

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        trials_needed = len({*self.space.rungs, self.default.batch_size})
        if self.budget.trials < trials_needed:
            raise ValueError(
                f"budget.trials = {self.budget.trials} must be >= {trials_needed}, a trial for each batch size"
            )
        self._divide_among_devices()
        if self.arguments and (self.command or not self.is_program):
            raise ValueError(
                f"arguments are for a script, such as train.py, not for {self.workload!r}; remove arguments"
            )
        if self.command and self.workload != COMMAND:
            raise ValueError(f"command replaces the workload; remove workload = {self.workload!r}")
        if self.report and not self.command:
            raise ValueError("report reads the log of a command; add a command or remove report")
        growth = self.space.batch_schedule
        if growth is not None and self.training.counts_tokens:
            raise ValueError(
                "batch_schedule counts samples, but training.batch_unit = tokens; remove batch_schedule or batch_unit"
            )
        self._check_scales()
        if not self.is_program:
            if any(one.arguments for one in self.scales):
                raise ValueError("arguments of scales need a script or a command; set workload_settings of the scales")
            return self
        if growth is not None and (self.command or self.workload == OBJECTIVE):
            raise ValueError(
                f"batch_schedule: {'a command' if self.command else 'a function'} takes one batch size; "
                "remove batch_schedule"
            )
        if growth is not None and NOISE_SCALE in growth.names:
            raise ValueError(
                "batch_schedule.name = noise_scale: bssearch cannot read the gradients of your own program; "
                "name another schedule"
            )
        if self.workload_settings or any(one.workload_settings for one in self.scales):
            raise ValueError("workload_settings need a workload class; pass arguments to your own program")
        if own := self.training.model_dump(exclude_defaults=True, exclude={"batch_unit"}):
            set_here = [f"{name} = {one}" for name, one in own.items()]
            remedy = (
                f"name a class of the file, as in {self.workload}:MyTask"
                if self.workload.endswith(".py")
                else "remove these settings"
            )
            raise ValueError(
                f"training ({', '.join(set_here)}) needs a workload class, because your own program computes the "
                f"steps; {remedy}"
            )
        if self.executor.name == "inline":
            raise ValueError("executor.name = inline cannot run a program; use local")
        for one in self.at_scales if self.command else ():
            check_command(one.command, self.report, self.target.metric, self.set_parameters, self.searched)
        return self

    def _check_scales(self) -> None:
        is_one_study = len(self.scales) == 1 and self._is_at(self.scales[0])
        if self.scales and len(self.scales) < FEWEST_SCALES and not is_one_study:
            entries = "1 entry" if len(self.scales) == 1 else f"{len(self.scales)} entries"
            raise ValueError(f"scales has {entries}; list at least {FEWEST_SCALES} for the law across scales")
        seen = [one.samples for one in self.scales]
        if twice := [one for one in seen if seen.count(one) > 1]:
            raise ValueError(f"scales has samples = {twice[0]} more than once; give each scale its own samples")

    def _is_at(self, one: ScaleSpec) -> bool:
        whole = self.command or self.arguments
        return (
            one.target == self.target.value
            and one.workload_settings.items() <= self.workload_settings.items()
            and one.arguments == whole[len(whole) - len(one.arguments) :]
        )

    def _divide_among_devices(self) -> None:
        sizes, growth = self.batch_sizes, self.space.batch_schedule
        searched, *further = self.executor.devices
        if undivided := [size for size in sizes if size % searched]:
            raise ValueError(f"batch size {undivided[0]} must be a multiple of executor.devices = {searched}")
        if undivided := [count for count in further if all(size % count for size in sizes)]:
            raise ValueError(
                f"executor.devices = {undivided[0]} divides no batch size of {', '.join(map(str, sizes))}; "
                f"add a multiple of {undivided[0]}"
            )
        if growth is not None and searched > 1:
            raise ValueError(
                f"batch_schedule: trials with growing batches use one device, but executor.devices = {searched}; "
                "set executor.devices to 1"
            )

    @property
    def is_program(self) -> bool:
        """True if the user's script, `make_trainer`, command or function runs the training."""
        return bool(self.command) or self.workload == OBJECTIVE or self.workload.endswith((".py", f".py{MAKE_TRAINER}"))

    @property
    def searched(self) -> tuple[str, ...]:
        """The names of the searched parameters, as placeholders of a command."""
        found = [one.name.removeprefix("reference_").rpartition(".")[2] for one in self.space.dimensions()]
        return (*(["batch_size"] if len(self.batch_sizes) > 1 else []), *found)

    @property
    def set_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that the spec sets."""
        fields, space, default = type(self.space).model_fields, self.space, self.default
        given = {name for name in fields if getattr(space, name) != fields[name].get_default(call_default_factory=True)}
        given |= {name for name, value in default if value is not None}
        schedule, own = {"schedule", "horizon_samples", "decay_share"}, self.default_configuration.parameters
        names = {
            *({*TRAINING_PARAMETERS, *OPTIONAL} & given),
            *(schedule if "schedule" in given else ()),
            *(name for name in own if name.partition(".")[0] in OWN_GROUPS),
            *({"optimizer", *own} - {*schedule, *OPTIONAL} if "optimizer" in given else ()),
        }
        return tuple(sorted(names))

    @property
    def preset(self) -> str | None:
        """The name of the spec's preset, if any."""
        return self._preset

    def from_preset(self, name: str | None) -> Self:
        """Return a copy of the spec with the preset's ``name``."""
        noted = self.model_copy()
        noted._preset = name
        return noted

    @property
    def at_scales(self) -> list[Self]:
        """The specs NAME.1, NAME.2, … of several scales, by ascending samples, else only this spec."""
        if len(self.scales) < 2:
            return [self]
        whole = "command" if self.command else "arguments"
        return [
            self.model_copy(
                update={
                    "name": f"{self.name}.{number}",
                    "scales": (one,),
                    "workload_settings": {**self.workload_settings, **one.workload_settings},
                    whole: (*getattr(self, whole), *one.arguments),
                    "target": self.target.model_copy(update={"value": one.target}),
                }
            )
            for number, one in enumerate(sorted(self.scales, key=lambda one: one.samples), start=1)
        ]

    @property
    def record_target(self) -> Target:
        """The target's metric, value and goal."""
        return Target(metric=self.target.metric, value=self.target.value, goal=self.target.goal)

    def new_study(self, created_by: str) -> NewStudy:
        """Return the study to store with this spec."""
        return NewStudy(
            name=self.name,
            spec=self.model_dump(mode="json"),
            spec_hash=self.question_hash,
            objective=self.objective,
            target=self.record_target,
            created_by=created_by,
        )

    @property
    def default_configuration(self) -> Configuration:
        """The default configuration, on the devices of a search trial."""
        world_size = self.executor.world_size
        micro_batch_size, _ = split_batch(self.default.batch_size // world_size, self.space.max_micro_batch_size)
        return whole_configuration(self.default, self.space).on_devices(world_size, micro_batch_size)

    @property
    def timed_model(self) -> ModelParameters:
        """The model parameters for measurements of step time and memory."""
        return model_parameters(self.default_configuration)

    @property
    def varied_in_model(self) -> list[str]:
        """The names of parameters of ``space.model`` that may differ from the default."""
        values = dict(self.timed_model)
        return [
            name for name, domain in (self.space.model or {}).items() if domain not in (values[name], (values[name],))
        ]

    @property
    def is_imported(self) -> bool:
        """True if the study holds imported runs."""
        return self.workload == IMPORTED

    @property
    def default_is_known(self) -> bool:
        """False for imported studies without a known default."""
        return not self.is_imported or bool(self.workload_settings.get("default_known"))

    @property
    def is_tuned_elsewhere(self) -> bool:
        """True for imported runs whose source tuned each batch size, such as MLPerf."""
        return self.is_imported and bool(self.workload_settings.get("tuned"))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes of the space and the default, ascending."""
        return tuple(sorted({*self.space.rungs, self.default.batch_size}))

    @property
    def question(self) -> dict[str, Any]:
        """The fields that must not change when a study resumes, as JSON values."""
        question = self.model_dump(mode="json", include=set(QUESTION_FIELDS))
        del question["space"]["batch_schedule"]  # growth does not affect fixed batch sizes
        return question

    @property
    def question_hash(self) -> str:
        """The hash of `question` and the number of devices. Fields added later count only if set."""
        question = self.question
        added = {"ema_decay", "decay_share", *OWN_GROUPS}
        for part in (question["space"], question["default"], question["space"]["schedule"]):
            for name in added & part.keys():
                if part[name] is None:
                    del part[name]
        if self.space.batch_rules == BatchRules():
            del question["space"]["batch_rules"]
        if self.training == TrainingSpec():
            del question["training"]
        else:
            for name in ("sync_batch_norm", "batch_unit"):
                if getattr(self.training, name) == TrainingSpec.model_fields[name].default:
                    del question["training"][name]
        for name in OF_PROGRAMS:
            if not question[name]:
                del question[name]
        if self.executor.world_size > 1:
            question["devices"] = self.executor.world_size
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]
