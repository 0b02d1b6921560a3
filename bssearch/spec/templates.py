"""Submissions to the queue, and a worker's templates: the studies and values that users may submit.

A queue row describes a study by a template's name and typed values, never by a path, folder, command or code.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bssearch.errors import NotFoundError, SpecError, UnknownFieldError, UsageError, problem_in_words, require
from bssearch.settings import shipped_studies
from bssearch.spec import StudySpec, find_spec, load_spec
from bssearch.spec.reader import EVERY_FIELD, SUFFIXES, lined_yaml, shortened, text_of

Value = float | int | bool | str | list[int] | list[float]

Values = Mapping[str, Value]  # values by dotted key of the spec

LOWEST_PRIORITY = 1e-6
HIGHEST_PRIORITY = 1e6
MOST_TAGS = 20
LONGEST_OWNER = 100

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")

EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)  # Python can write moments from EARLIEST to here with any UTC offset

TEMPLATE_NAME = (
    f"name a template with at most 100 letters, digits, '_', '.' and '-', without the ending {', '.join(SUFFIXES)}; "
    "name a submission's file with the ending .yaml or .yml"
)
_TEMPLATE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class SubmissionState(StrEnum):
    """WAITING includes running submissions. Users set PAUSED and CANCELLED, and workers set DONE and FAILED."""

    WAITING = "waiting"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self not in {SubmissionState.WAITING, SubmissionState.PAUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSubmission:
    """A study to run from a worker's template with values.

    Workers with all ``tags`` run the study after ``not_before``. Stored rows may be invalid; see `check`.
    """

    name: str
    template: str
    values: Values
    owner: str
    priority: float = 1.0
    tags: tuple[str, ...] = ()
    not_before: datetime | None = None

    def check(self) -> None:
        """Raise `UsageError` if a field is out of bounds."""
        require(
            LOWEST_PRIORITY <= self.priority <= HIGHEST_PRIORITY,
            f"priority = {self.priority:g} must be from {LOWEST_PRIORITY:g} to {HIGHEST_PRIORITY:g}",
        )
        require(
            self.owner.strip() and len(self.owner) <= LONGEST_OWNER and self.owner.isprintable(),
            f"owner = {self.owner!r} must be a name of at most {LONGEST_OWNER} printable characters",
        )
        if self.not_before is not None and self.not_before.tzinfo is None:
            raise UsageError(
                f"not_before = {self.not_before.isoformat()} must have an offset from UTC",
                hint=f"add an offset, such as {self.not_before.isoformat(timespec='minutes')}+00:00",
            )
        if self.not_before is not None and not EARLIEST <= self.not_before <= LATEST:
            raise UsageError(
                f"not_before = {self.not_before.isoformat()} must be from {EARLIEST.date()} to {LATEST.date()}"
            )
        check_template_name(self.template)
        check_tags(self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(NewSubmission):
    """A stored submission. ``login`` is the PostgreSQL user, and ``served_seconds`` are slots × seconds."""

    login: str | None
    submitted_at: datetime
    state: SubmissionState
    reason: str
    served_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker's public record.

    ``left_at``: time of a normal exit. ``is_here``: whether the worker sent a heartbeat lately and has not left.
    """

    name: str
    user: str
    host: str
    tags: tuple[str, ...]
    slots: str
    device_name: str | None
    templates: Mapping[str, Mapping[str, object]]
    seen_at: datetime
    left_at: datetime | None
    serving: str | None
    serving_since: datetime | None
    is_here: bool


def is_template_name(name: str) -> bool:
    """True for a valid template name, which `queue submit` cannot mistake for a file."""
    return _TEMPLATE.fullmatch(name) is not None and not name.endswith(SUFFIXES)


def check_template_name(name: str) -> None:
    require(is_template_name(name), f"{shortened(name)} is not a name of a template", hint=TEMPLATE_NAME)


def check_tags(tags: Sequence[str]) -> None:
    require(len(tags) <= MOST_TAGS, f"{len(tags)} tags are more than {MOST_TAGS}; give fewer tags")
    for tag in tags:
        require(
            _TAG.fullmatch(tag),
            f"{tag!r} is not a tag",
            hint="use only letters, digits, '_', '.', ':' and '-', such as gpu:h200",
        )


MOST_NUMBERS = 64

MOST_CHOICES = 100

Scalar = bool | int | float | str


class _Type(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NumberType(_Type):
    """A number or list of numbers in [``low``, ``high``]."""

    type: Literal["integer", "number", "integers", "numbers"]
    low: float
    high: float

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} must be at most high = {self.high:g}")
        return self

    @property
    def wanted(self) -> str:
        what = {
            "integer": "a whole number",
            "number": "a number",
            "integers": f"a list of 1 to {MOST_NUMBERS} whole numbers",
            "numbers": f"a list of 1 to {MOST_NUMBERS} numbers",
        }[self.type]
        return f"{what} from {self.low:g} to {self.high:g}"

    @property
    def example(self) -> Value:
        low = math.ceil(self.low) if self.type.startswith("integer") else self.low
        return [low] if self.type.endswith("s") else low

    def takes(self, value: object) -> bool:
        if self.type.endswith("s"):
            return isinstance(value, list) and 1 <= len(value) <= MOST_NUMBERS and all(map(self._is_number, value))
        return self._is_number(value)

    def _is_number(self, value: object) -> bool:
        kinds = int if self.type.startswith("integer") else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


class ChoiceType(_Type):
    """One of the ``choices``."""

    choices: tuple[Scalar, ...] = Field(min_length=1, max_length=MOST_CHOICES, strict=False)

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(str(one).lower() if isinstance(one, bool) else str(one) for one in self.choices)}"

    @property
    def example(self) -> Value:
        return self.choices[0]

    def takes(self, value: object) -> bool:
        return any(isinstance(one, bool) == isinstance(value, bool) and one == value for one in self.choices)


ValueType = NumberType | ChoiceType


def value_type(data: object) -> ValueType:
    """Read a value's type from a template file or worker row. Raises `ValueError` if invalid."""
    if not isinstance(data, Mapping):
        raise ValueError("a value's type must be a mapping such as {type: integer, low: 1, high: 400}")
    if data.get("type") == "boolean":
        data = {"choices": [True, False], **{key: value for key, value in data.items() if key != "type"}}
    if "choices" not in data and data.get("type") not in ("integer", "number", "integers", "numbers"):
        raise ValueError(
            f"type = {shortened(data.get('type'))} must be integer, number, integers, numbers or boolean; "
            "or give choices"
        )
    try:
        return (ChoiceType if "choices" in data else NumberType).model_validate(dict(data))
    except ValidationError as error:
        raise ValueError("; ".join(_problem(one) for one in error.errors())) from None


def _problem(problem: Any) -> str:
    message = problem_in_words(problem)
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {name}"
    return f"{name}: {message}" if name else message


def checked_values(template: str, types: Mapping[str, ValueType], values: Values) -> dict[str, Value]:
    """Check the values for a template. Raises a `UsageError` that names each rejected value."""
    require(isinstance(values, Mapping), f"values = {shortened(values)} must be a mapping of keys to values")
    problems = []
    for key, value in values.items():
        if key not in types:
            takes = ", ".join(sorted(types)) or "no values"
            problems.append(f"{shortened(key)[1:-1]} is not a value of the template {template!r}, which takes {takes}")
        elif not types[key].takes(value):
            problems.append(f"{key} = {shortened(value)} must be {types[key].wanted} (template {template!r})")
    require(not problems, "\n".join(problems))
    return dict(values)


# Fields that no template offers to submitters: code, paths, and use of the worker's machine.
OFFERS_NONE = frozenset(
    {"name", "schema_version", "preset", "workload", "command", "arguments", "report", "executor", "log"}
)

MOST_TEMPLATES = 200

_EXAMPLE = "write templates: {digits: {spec: digits.yaml, values: {budget.trials: {type: integer, low: 1, high: 400}}}}"


@dataclass(frozen=True, slots=True)
class Template:
    """A spec file, or one ``scale`` of the spec, and the types of submitters' ``values`` by dotted key."""

    name: str
    spec: Path
    values: Mapping[str, ValueType]
    scale: int | None = None

    def check_keys(self, overrides: tuple[str, ...]) -> None:
        """Raise `SpecError` for a key that names no field of the spec."""
        for key in self.values:
            problems = [self._unknown(key, given, overrides) for given in self._names_above(key)]
            require(not all(problems), f"values.{problems[0]}", hint=EVERY_FIELD, error=SpecError)

    def _names_above(self, key: str) -> Iterator[tuple[str, ...]]:
        # Names above a key, such as sampler.name, decide whether the key exists.
        yield ()
        parts = key.split(".")
        for depth in range(1, len(parts)):
            name = ".".join([*parts[:depth], "name"])
            if name != key and isinstance(type_ := self.values.get(name), ChoiceType):
                yield from ((f"{name}={json.dumps(choice)}",) for choice in type_.choices)

    def _unknown(self, key: str, given: tuple[str, ...], overrides: tuple[str, ...]) -> str:
        try:
            load_spec(self.spec, [*given, f"{key}={json.dumps(self.values[key].example)}", *overrides])
        except UnknownFieldError as error:
            # Under another name the spec's own fields may be invalid, which is not the key's fault.
            of_key = [line for line in str(error).splitlines() if f" (--set {key}=" in line]
            return of_key[0].rpartition(" (--set ")[0] if of_key else ""
        except SpecError:
            return ""
        return ""

    def study(self, name: str, values: Values, overrides: tuple[str, ...] = ()) -> StudySpec:
        given = {**checked_values(self.name, self.values, values), "name": name}
        spec = load_spec(self.spec, [*(f"{key}={json.dumps(value)}" for key, value in given.items()), *overrides])
        return spec if self.scale is None else spec.at_scales[: self.scale][-1].model_copy(update={"name": name})


class Templates(dict[str, Template]):
    """A worker's templates by name."""

    def __missing__(self, name: str) -> Template:
        raise UsageError(f"this worker has no template {shortened(name)}; choose from {', '.join(self)}")

    def offered(self) -> dict[str, dict[str, object]]:
        return {
            name: {key: type_.model_dump(mode="json") for key, type_ in template.values.items()}
            for name, template in self.items()
        }


def load_templates(path: Path, overrides: tuple[str, ...] = ()) -> Templates:
    """Read a template file. ``overrides`` must be valid for each spec. Raises `UsageError` or `NotFoundError`."""
    data = read_file(path, "file of templates", _EXAMPLE)
    require(
        isinstance(data, Mapping) and set(data) == {"templates"} and isinstance(data["templates"], Mapping),
        f"{path} must hold only `templates`",
        hint=_EXAMPLE,
        error=SpecError,
    )
    require(
        1 <= len(data["templates"]) <= MOST_TEMPLATES,
        f"{path} must hold 1 to {MOST_TEMPLATES} templates",
        hint=_EXAMPLE,
        error=SpecError,
    )
    read = [_templates(path, name, one, overrides) for name, one in data["templates"].items()]
    return Templates({one.name: one for templates in read for one in templates})


def read_file(path: Path, what: str, hint: str) -> Any:
    return lined_yaml(path, text_of(path, what, hint))[0]


def _templates(path: Path, name: object, data: object, overrides: tuple[str, ...]) -> list[Template]:
    # One, or NAME.1, NAME.2, … of the scales
    where = f"{path}: templates.{name}"
    if not isinstance(name, str) or not is_template_name(name):
        raise SpecError(f"{path}: {shortened(name)} is not a name of a template", hint=TEMPLATE_NAME)
    if not isinstance(data, Mapping) or not set(data) <= {"spec", "values"} or not isinstance(data.get("spec"), str):
        raise SpecError(
            f"{where}: a template must have `spec`, the path of a file, and may have `values`, but no other key"
        )
    values = data.get("values") or {}
    require(
        isinstance(values, Mapping),
        f"{where}.values must map keys of the spec to types of values",
        hint=_EXAMPLE,
        error=SpecError,
    )
    types = {}
    for key, one in values.items():
        _check_key(f"{where}.values", key)
        try:
            types[key] = value_type(one)
        except ValueError as error:
            raise SpecError(f"{where}.values.{key}: {error}") from None
    beside = path.parent / data["spec"]
    try:
        spec = find_spec(data["spec"] if data["spec"] in shipped_studies() and not beside.exists() else beside)
        template = Template(name, spec, types)
        scales = len(load_spec(spec, overrides).scales)
        template.check_keys(overrides)
    except (NotFoundError, UsageError) as error:
        raise type(error)(f"{where}: {error}", hint=error.hint) from None
    if scales < 2:
        return [template]
    return [replace(template, name=f"{name}.{number}", scale=number) for number in range(1, scales + 1)]


def _check_key(where: str, key: object) -> None:
    if not isinstance(key, str) or not all(key.split(".")):
        raise SpecError(f"{where}: {shortened(key)} is not a key of a spec; write a key such as budget.trials")
    field = key.split(".")[0]
    require(
        field not in OFFERS_NONE,
        f"{where}.{key}: no template may offer {field}",
        hint=f"set {field} in the template's spec; submitters may not set {', '.join(sorted(OFFERS_NONE))}",
        error=SpecError,
    )
    require(
        field in StudySpec.model_fields,
        f"{where}.{key}: a spec has no field {field}",
        hint=EVERY_FIELD,
        error=SpecError,
    )
