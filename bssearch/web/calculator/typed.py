"""What a query string says, read field by field: values, the texts as typed, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bssearch.pages.words import visible
from bssearch.web.calculator.fields import FIELDS, GROUPS, Field

WHOLE, NUMBER = TypeAdapter(int), TypeAdapter(float)
"""How the command line reads numbers, too."""

LONGEST_VALUE = 64
"""Characters of a value that is read: a choice, far above what any number or name here has."""

LONGEST_ECHO = 200
"""Characters of a longer one that the page shows again: a choice."""

MOST_NAMED = 5
"""Unknown fields that are named: a choice."""

NEVER_TAKEN = frozenset({"model", "model_setting", "setting", "input", "input_shape", "db", "study", "step_times"})
"""Options of the command line that import code, or read files and databases."""

OWN = frozenset({"part"})
"""Keys of the page's own, which are no fields."""

YES, NO = frozenset({"on", "yes", "true", "1"}), frozenset({"", "no", "off", "false", "0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """What was typed: ``texts`` as they stand in the page, ``values`` of those that say something, and ``errors``.

    All are by the name of the field. ``notes`` are about keys that are no fields.
    """

    texts: Mapping[str, str]
    values: Mapping[str, Any]
    errors: Mapping[str, str]
    notes: tuple[str, ...]


def read(query: Mapping[str, str]) -> Typed:
    """Return what a query says. Where it names no field of a group, that group has its defaults; nothing is raised."""
    texts = _texts(query)
    values, errors = {}, {}
    for name, text in texts.items():
        try:
            value = _value(FIELDS[name], text)
        except ValueError as error:
            errors[name] = str(error)
        else:
            if value is not None:
                values[name] = value
    return Typed(
        texts={name: visible(text[:LONGEST_ECHO]) for name, text in texts.items()},
        values=values,
        errors=errors,
        notes=tuple(_notes(name for name in query if name not in FIELDS and name not in OWN)),
    )


def _texts(query: Mapping[str, str]) -> dict[str, str]:
    named = {GROUPS[name] for name in query if name in FIELDS}
    return {
        name: str(query.get(name, "")) if GROUPS[name] in named else field.default for name, field in FIELDS.items()
    }


def _value(field: Field, text: str) -> Any:
    """Return a value, None for nothing; raise `ValueError` with what is wrong in words that follow the label."""
    if len(text) > LONGEST_VALUE:
        raise ValueError(f"has {len(text):,} characters; at most {LONGEST_VALUE} are read")
    text = text.strip()
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    if field.kind in ("flag", "yes_no"):
        return _yes_or_no(field, text)
    if not text:
        return None
    if field.kind == "whole":
        return _parsed(WHOLE, text, "must be a whole number, as 32")
    if field.kind == "number":
        return _parsed(NUMBER, text, "must be a number, as 0.02 or 1e-4")
    return text


def _yes_or_no(field: Field, text: str) -> bool | None:
    if text.lower() in YES:
        return True
    if text.lower() in NO:
        return False if text and field.kind == "yes_no" else None
    raise ValueError(f"{text!r} must be yes or no")


def _parsed(kind: TypeAdapter[int] | TypeAdapter[float], text: str, expected: str) -> float:
    try:
        return kind.validate_python(text)
    except ValidationError:
        raise ValueError(f"{text!r} {expected}") from None


def _notes(names: Iterable[str]) -> Iterable[str]:
    unknown = []
    for name in names:
        if name.replace("-", "_") in NEVER_TAKEN:
            yield (
                f"“{name}” is not taken from a page, which imports no code and reads no file: use the command "
                "“bssearch plan” for it."
            )
        else:
            unknown.append(repr(name if len(name) <= LONGEST_VALUE else f"{name[:LONGEST_VALUE]}…"))
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        yield f"Left out, as the page has no such field: {', '.join(unknown[:MOST_NAMED])}{more}."
