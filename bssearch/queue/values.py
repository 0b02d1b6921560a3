"""The types of the values that a template takes: numbers within bounds, yes or no, and choices; never a free text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bssearch.errors import UsageError
from bssearch.queue.submission import Value, Values
from bssearch.spec.yaml_values import shortened

MOST_NUMBERS = 64
"""Numbers of a list at most: a choice; a space has a dozen batch sizes."""

MOST_CHOICES = 100
"""Choices of a value at most: a choice."""

Scalar = bool | int | float | str


class _Type(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NumberType(_Type):
    """A number, or a list of numbers, each from ``low`` to ``high``; whole ones where the type says so."""

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
        """What a value must be."""
        what = {
            "integer": "a whole number",
            "number": "a number",
            "integers": f"a list of 1 to {MOST_NUMBERS} whole numbers",
            "numbers": f"a list of 1 to {MOST_NUMBERS} numbers",
        }[self.type]
        return f"{what} from {self.low:g} to {self.high:g}"

    @property
    def example(self) -> Value:
        """A value of the type."""
        low = math.ceil(self.low) if self.type.startswith("integer") else self.low
        return [low] if self.type.endswith("s") else low

    def takes(self, value: object) -> bool:
        """Return whether a value is of the type."""
        if self.type.endswith("s"):
            return isinstance(value, list) and 1 <= len(value) <= MOST_NUMBERS and all(map(self._is_number, value))
        return self._is_number(value)

    def _is_number(self, value: object) -> bool:
        kinds = int if self.type.startswith("integer") else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


class BooleanType(_Type):
    """Yes or no."""

    type: Literal["boolean"]

    @property
    def wanted(self) -> str:
        """What a value must be."""
        return "true or false"

    @property
    def example(self) -> Value:
        """A value of the type."""
        return True

    def takes(self, value: object) -> bool:
        """Return whether a value is of the type."""
        return isinstance(value, bool)


class ChoiceType(_Type):
    """One of the ``choices``."""

    choices: tuple[Scalar, ...] = Field(min_length=1, max_length=MOST_CHOICES, strict=False)

    @property
    def wanted(self) -> str:
        """What a value must be."""
        return f"one of {', '.join(map(str, self.choices))}"

    @property
    def example(self) -> Value:
        """A value of the type."""
        return self.choices[0]

    def takes(self, value: object) -> bool:
        """Return whether a value is of the type."""
        return any(isinstance(one, bool) == isinstance(value, bool) and one == value for one in self.choices)


ValueType = NumberType | BooleanType | ChoiceType


def value_type(data: object) -> ValueType:
    """Return the type that a template's file, or a worker's row, writes; raise `ValueError` where it writes none."""
    if not isinstance(data, Mapping):
        raise ValueError("a value's type is a mapping such as {type: integer, low: 1, high: 400}")
    kind: type[ValueType]
    if "choices" in data:
        kind = ChoiceType
    elif data.get("type") == "boolean":
        kind = BooleanType
    elif data.get("type") in ("integer", "number", "integers", "numbers"):
        kind = NumberType
    else:
        raise ValueError(
            f"type = {shortened(data.get('type'))} must be integer, number, integers, numbers or boolean; "
            "or the value has choices"
        )
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise ValueError("; ".join(_problem(one) for one in error.errors())) from None


def _problem(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"{name} is not known here"
    return f"{name}: {message}" if name else message


def checked_values(template: str, types: Mapping[str, ValueType], values: Values) -> dict[str, Value]:
    """Return the values that somebody gives a template; raise `UsageError` naming each that it does not take."""
    if not isinstance(values, Mapping):  # in a row that something else has written
        raise UsageError(f"values = {shortened(values)} must be a mapping of keys to values")
    problems = []
    for key, value in values.items():
        if key not in types:
            takes = ", ".join(sorted(types)) or "no values"
            problems.append(f"{shortened(key)[1:-1]}: the template {template!r} does not take it; it takes {takes}")
        elif not types[key].takes(value):
            problems.append(f"{key} = {shortened(value)} must be {types[key].wanted} (template {template!r})")
    if problems:
        raise UsageError("\n".join(problems))
    return dict(values)
