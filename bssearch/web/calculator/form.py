"""The calculator's page, from a query string: the form as typed, what is refused, and the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from bssearch.web.calculator.fields import FIELDS, FIELDSETS, GROUPS, Field
from bssearch.web.calculator.memory import fitting_micro_batch, memory_part
from bssearch.web.calculator.parts import Part, Refusal
from bssearch.web.calculator.presets import PRESETS
from bssearch.web.calculator.rates import rates_part
from bssearch.web.calculator.speed import devices_part, trade_off_part
from bssearch.web.calculator.split import split_part
from bssearch.web.calculator.typed import Typed, read


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownField:
    """A field with its ``text`` as typed, and its error, empty where there is none.

    ``is_checked`` is of a flag. ``stray`` says of a choice that what was typed is none of its choices.
    """

    field: Field
    text: str
    error: str
    is_checked: bool
    stray: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFieldset:
    """A fieldset with its fields; ``is_open`` where one of the rare ones says something."""

    name: str
    legend: str
    text: str
    fields: Sequence[ShownField]
    rare: Sequence[ShownField]
    is_open: bool


@dataclass(frozen=True, slots=True)
class PresetLink:
    """A named model, and the query string that has it with all else as it is."""

    name: str
    query: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculated:
    """All that the page shows. ``summary`` is the results in a line, for those who do not see them change."""

    fieldsets: Sequence[ShownFieldset]
    presets: Sequence[PresetLink]
    errors: Sequence[Refusal]
    notes: Sequence[str]
    parts: Sequence[Part]
    summary: str


def calculated(query: Mapping[str, str]) -> Calculated:
    """Return the page of a query: fields that are wrong or missing leave the parts that need them out.

    Of a key that is given several times the mapping's own choice counts. Nothing is raised for what a query may hold.
    """
    typed = read(query)
    memory, plan = memory_part(typed)
    fitting = fitting_micro_batch(plan)
    parts = [
        memory,
        split_part(typed, fitting),
        rates_part(typed),
        trade_off_part(typed, fitting),
        devices_part(typed, fitting),
    ]
    errors = list(_errors(typed, parts))
    return Calculated(
        fieldsets=list(_fieldsets(typed, errors)),
        presets=[PresetLink(name, _with_preset(typed, fields)) for name, fields in PRESETS.items()],
        errors=errors,
        notes=typed.notes,
        parts=parts,
        summary=_summary(parts, errors),
    )


def _errors(typed: Typed, parts: Sequence[Part]) -> Iterator[Refusal]:
    """Yield what is wrong, of each field first what could not be read, each thing once."""
    for name, message in typed.errors.items():
        yield Refusal(field=name, label=FIELDS[name].label, message=message)
    told = set()
    for part in parts:
        if part.refusal is not None and part.refusal.message not in told:
            told.add(part.refusal.message)
            yield part.refusal


def _fieldsets(typed: Typed, errors: Sequence[Refusal]) -> Iterator[ShownFieldset]:
    messages = {error.field: error.message for error in reversed(errors) if error.field is not None}
    for one in FIELDSETS:
        rare = [_shown(field, typed, messages) for field in one.rare]
        yield ShownFieldset(
            name=one.name,
            legend=one.legend,
            text=one.text,
            fields=[_shown(field, typed, messages) for field in one.fields],
            rare=rare,
            is_open=any(field.text or field.error for field in rare),
        )


def _shown(field: Field, typed: Typed, messages: Mapping[str, str]) -> ShownField:
    text = typed.texts[field.name]
    return ShownField(
        field=field,
        text=text,
        error=messages.get(field.name, ""),
        is_checked=typed.values.get(field.name) is True,
        stray=bool(text) and text not in {value for value, _ in field.choices},
    )


def _with_preset(typed: Typed, fields: Mapping[str, str]) -> str:
    others = {name: text for name, text in typed.texts.items() if GROUPS[name] != "model" and text}
    return urlencode({**fields, **others})


def _summary(parts: Sequence[Part], errors: Sequence[Refusal]) -> str:
    said = [f"{tile.name}: {tile.cell.text}" for part in parts[:2] for tile in part.tiles[:2]]
    wrong = [f"{len(errors)} {'entry is' if len(errors) == 1 else 'entries are'} wrong"] if errors else []
    return f"{'; '.join([*wrong, *said]) or 'Nothing could be calculated'}."
