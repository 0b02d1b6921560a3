"""Hyperparameters of the user's own: what a spec may say of them under ``model`` and ``loss``."""

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
"""Own parameters that a spec may have, ``model`` and ``loss`` together: a choice."""

MOST_CHOICES = 256
"""Choices that a list of an own parameter may have: a choice."""

LONGEST_NAME = 50
LONGEST_TEXT = 100
"""Characters of a name, and of a choice that is a text: choices."""

LARGEST_WHOLE = 2**53
"""The largest absolute value of a whole number: up to it each is a double, too."""

LARGEST_NUMBER = 1e100
"""The largest absolute value of a number: a choice; products of such stay finite in double precision."""

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
"""Names that bssearch gives itself, to the workload or in a spec."""

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
    """Return a value that an own parameter may have; raise `ValueError` naming the bound otherwise.

    A text starts with a letter, a digit, ``_``, ``.`` or ``/``: no table takes it for a formula.
    """
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
    """A range of an own parameter, on a log scale where ``log`` is true (default: where low > 0).

    ``integer``: it gives whole numbers (default: where both ends are written without a point, as in {low: 1, high: 4}).
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
        """Return whether the range gives whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int) if self.integer is None else self.integer


def _choices(values: tuple[OwnValue, ...]) -> tuple[OwnValue, ...]:
    """Return a list of choices; raise `ValueError` where they are of several kinds, or one stands twice."""
    if len({kind_of_value(value) for value in values}) > 1:
        raise ValueError("its choices must all be numbers, all true or false, or all texts")
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{value!r} stands twice among its choices")
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
    """Return a group of own parameters, None where it is empty; raise an error naming a key that is no name for one."""
    for name in given or {}:
        if problem := _problem(name):
            raise PydanticCustomError(UNKNOWN_KEY, "{advice}", {"key": name, "advice": problem})
    return given or None


def _problem(name: str) -> str | None:
    """Return what is wrong with the name of an own parameter, None where it is fine."""
    if len(name) > LONGEST_NAME:
        return f"a name must have at most {LONGEST_NAME} characters"
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        return "a name must be a Python identifier of ASCII letters, digits and _: the method gets it as an argument"
    return "bssearch gives this name itself; choose another" if name in RESERVED else None


OwnDomains = Annotated[dict[str, OwnDomain] | None, AfterValidator(checked_names)]
OwnValues = Annotated[dict[str, Scalar] | None, AfterValidator(checked_names)]


def check_groups(model: Mapping[str, Any] | None, loss: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` where a name stands in both groups, or there are more than `MOST_OWN`."""
    model, loss = model or {}, loss or {}
    if both := sorted(model.keys() & loss.keys()):
        raise ValueError(f"{both[0]} stands under model and under loss; it must be a name of one of them")
    if (count := len(model) + len(loss)) > MOST_OWN:
        raise ValueError(f"model and loss have {count} parameters together; they must be at most {MOST_OWN}")


def kind_of_value(value: ParameterValue) -> Kind:
    """Return of which kind a value is."""
    if isinstance(value, bool):
        return "true or false"
    return "a text" if isinstance(value, str) else "a number"


def as_in_domain(name: str, value: Any, domain: Any) -> ParameterValue:
    """Return a value as a domain gives it: a whole number where it gives these, a choice as it is written there.

    It need not lie in the domain. Raises `ValueError` where it is of another kind.
    """
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
    """Return the value of a coordinate: a whole number, within its range, where the domain gives these."""
    if not isinstance(domain, OwnRange) or isinstance(value, str | None):
        return value
    return min(max(round(value), round(domain.low)), round(domain.high)) if domain.is_integer else float(value)
