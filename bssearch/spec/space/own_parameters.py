"""The user's own hyperparameters, under ``model`` and ``loss``."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from bssearch.records import ParameterValue
from bssearch.spec.space.domains import LIMITS, OPTIONAL, TRAINING_PARAMETERS, UNKNOWN_KEY, Domain, Range, domain_kind
from bssearch.spec.space.optimizers import AdamW, Sgd

MOST_OWN = 32

MOST_CHOICES = 256

LONGEST_NAME = 50
LONGEST_TEXT = 100  # longest name or text choice, in characters

LARGEST_WHOLE = 2**53  # every whole number up to here is an exact double

LARGEST_NUMBER = 1e100  # products of such numbers stay finite in double precision

# Names that bssearch uses itself.
RESERVED = frozenset(
    {
        *("batch_size", "micro_batch_size", "max_micro_batch_size", "accumulation_steps", "world_size"),
        *("learning_rate", "reference_learning_rate", "optimizer", "schedule", "horizon_samples"),
        *("seed", "steps", "parameters", "self", "model", "loss", "inputs", "targets"),
        *TRAINING_PARAMETERS,
        *OPTIONAL,
        *LIMITS,
        *Sgd.model_fields,
        *AdamW.model_fields,
    }
)

OwnValue = bool | int | float | str
Kind = Literal["a number", "true or false", "a text"]


def _checked_number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    largest = LARGEST_WHOLE if isinstance(value, int) else LARGEST_NUMBER
    if not abs(value) <= largest:
        raise ValueError(f"must be at most {largest} in absolute value")
    return value


def _checked_value(value: Any) -> OwnValue:
    """Texts must not start as a spreadsheet's formula."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _checked_number(value)
    if not isinstance(value, str):
        raise ValueError("must be a number, true or false, or a text")
    if len(value) > LONGEST_TEXT or not TEXT.fullmatch(value):
        raise ValueError(
            f"a text must have 1 to {LONGEST_TEXT} printable characters, the first a letter, a digit, _, . or /"
        )
    return value


TEXT = re.compile(r"[\w./][^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*")
Number = Annotated[int | float, PlainValidator(_checked_number), WithJsonSchema({"type": "number"})]
Scalar = Annotated[OwnValue, PlainValidator(_checked_value), WithJsonSchema({"type": ["boolean", "number", "string"]})]


class OwnRange(Range):
    """A range of an own parameter, searched in log if ``log`` (default: if low > 0).

    ``integer``: whole numbers only (default: if both ends have no decimal point).
    """

    low: Number
    high: Number
    integer: bool | None = None

    @model_validator(mode="after")
    def _whole_ends(self) -> Self:
        for name, end in (("low", self.low), ("high", self.high)):
            if self.integer and end != math.floor(end):
                raise ValueError(f"{name} = {end:g} must be a whole number with integer: true")
            if self.integer and abs(end) > LARGEST_WHOLE:
                raise ValueError(f"{name} = {end:g} must be at most {LARGEST_WHOLE} in absolute value")
        return self

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int) if self.integer is None else self.integer


def _choices(values: tuple[OwnValue, ...]) -> tuple[OwnValue, ...]:
    if len({kind_of_value(value) for value in values}) > 1:
        raise ValueError("its choices must all be numbers, all true or false, or all texts")
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{value!r} appears twice among its choices")
    return values


OwnDomain = Annotated[
    Annotated[Scalar, Tag("fixed")]
    | Annotated[OwnRange, Tag("range")]
    | Annotated[
        tuple[Scalar, ...], Field(min_length=1, max_length=MOST_CHOICES), AfterValidator(_choices), Tag("choices")
    ],
    Discriminator(domain_kind),
]


def checked_names(given: Mapping[str, Any] | None) -> Any:
    """Group of own parameters; raises for an invalid name."""
    for name in given or {}:
        if problem := _problem(name):
            raise PydanticCustomError(UNKNOWN_KEY, "{advice}", {"key": name, "advice": problem})
    return given or None


def _problem(name: str) -> str | None:
    if len(name) > LONGEST_NAME:
        return f"a name must have at most {LONGEST_NAME} characters"
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        return "a name must be a Python identifier of ASCII letters, digits and _: the method gets it as an argument"
    return "bssearch gives this name itself; choose another" if name in RESERVED else None


OwnDomains = Annotated[dict[str, OwnDomain] | None, AfterValidator(checked_names)]
OwnValues = Annotated[dict[str, Scalar] | None, AfterValidator(checked_names)]


def check_groups(model: Mapping[str, Any] | None, loss: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for a name in both groups, or more than `MOST_OWN`."""
    model, loss = model or {}, loss or {}
    if both := sorted(model.keys() & loss.keys()):
        raise ValueError(f"{both[0]} is under both model and loss; it must be under one of them")
    if (count := len(model) + len(loss)) > MOST_OWN:
        raise ValueError(f"model and loss have {count} parameters together; they must be at most {MOST_OWN}")


def kind_of_value(value: ParameterValue) -> Kind:
    """Number, truth value or text."""
    if isinstance(value, bool):
        return "true or false"
    return "a text" if isinstance(value, str) else "a number"


def as_in_domain(name: str, value: Any, domain: Any) -> ParameterValue:
    """Convert a value to its domain's type, even out of range; raise `ValueError` for another kind."""
    some = domain.low if isinstance(domain, Range) else domain[0] if isinstance(domain, tuple) else domain
    if kind_of_value(value) != kind_of_value(some):
        raise ValueError(f"{name} = {value!r} must be {kind_of_value(some)}, as in space.{name}")
    if isinstance(domain, OwnRange):
        if not domain.is_integer:
            return float(value)
        if value != math.floor(value):
            raise ValueError(f"{name} = {value:g} must be a whole number, as in space.{name}")
        return int(value)
    choices = domain if isinstance(domain, tuple) else (domain,)
    return next((choice for choice in choices if choice == value), value)  # type: ignore[no-any-return]


def from_coordinate(value: ParameterValue, domain: Domain | OwnDomain) -> ParameterValue:
    """Coordinate's value, rounded within its range if the domain is integer."""
    if not isinstance(domain, OwnRange) or isinstance(value, str | None):
        return value
    return min(max(round(value), round(domain.low)), round(domain.high)) if domain.is_integer else float(value)
