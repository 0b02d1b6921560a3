"""The calculator's page, from a query string: the form as typed, what is refused, and the results.

Its script asks for the results alone as one types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from bssearch.pages.words import visible
from bssearch.web.calculator.asking import LONGEST_VALUE, YES, Part, Refusal
from bssearch.web.calculator.fields import FIELDS, FIELDSETS, GROUPS, PRESETS, Field, Fieldset
from bssearch.web.calculator.results import NEVER_TAKEN, results
from bssearch.web.views import Answered, Asked, View

RESULTS = "results"
"""The part of the page that the script replaces."""

LONGEST_ECHO = 200
"""Characters of a longer text that the page shows again."""

MOST_NAMED = 5
"""Unknown fields that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculated:
    """All that the page shows; ``texts`` are those of the fields, ``wrong`` what is wrong with them.

    ``presets`` are query strings that have a named model, with all else as it is. ``summary`` is the results in a line,
    for those who do not see them change.
    """

    texts: Mapping[str, str]
    wrong: Mapping[str, str]
    errors: Sequence[Refusal]
    notes: Sequence[str]
    parts: Sequence[Part]
    presets: Mapping[str, str]
    summary: str
    fieldsets: Sequence[Fieldset] = FIELDSETS

    def is_open(self, fieldset: Fieldset) -> bool:
        """Return whether one of the rare fields says something."""
        return any(self.texts[field.name] or field.name in self.wrong for field in fieldset.rare_fields)

    def is_checked(self, field: Field) -> bool:
        """Return whether a flag is set."""
        return self.texts[field.name].lower() in YES


def calculator_page(asked: Asked) -> Answered:
    """Show the calculator with what a query asks of it."""
    template = "calculator_results.html" if asked.text("part") == RESULTS else "calculator.html"
    return View(template=template, values={"calculator": calculated(asked.query)})


def calculated(query: Mapping[str, str]) -> Calculated:
    """Return the page of a query: fields that are wrong or missing leave the parts that need them out.

    If a query names no field of a group, that group has its defaults. Of a key that is given several times the
    mapping's own choice counts. Nothing is raised for what a query may hold.
    """
    named = {GROUPS[name] for name in query if name in FIELDS}
    typed = {
        name: str(query.get(name, "")) if GROUPS[name] in named else field.default for name, field in FIELDS.items()
    }
    parts = results(typed)
    refusals = {(one.field or one.message): one for part in reversed(parts) for one in reversed(part.refusals)}
    errors = list(refusals.values())[::-1]
    shown = {name: visible(text[:LONGEST_ECHO]) for name, text in typed.items()}
    others = {name: text for name, text in shown.items() if GROUPS[name] != "model" and text}
    return Calculated(
        texts=shown,
        wrong={one.field: one.message for one in errors if one.field is not None},
        errors=errors,
        notes=list(_notes(name for name in query if name not in FIELDS and name != "part")),
        parts=parts,
        presets={name: urlencode({**fields, **others}) for name, fields in PRESETS.items()},
        summary=_summary(parts, errors),
    )


def _summary(parts: Sequence[Part], errors: Sequence[Refusal]) -> str:
    said = [f"{tile.name}: {tile.cell.text}" for part in parts[:2] for tile in part.shown.tiles[:2]]
    wrong = [f"{len(errors)} {'entry is' if len(errors) == 1 else 'entries are'} wrong"] if errors else []
    return f"{'; '.join([*wrong, *said]) or 'Nothing could be calculated'}."


def _notes(names: Iterator[str]) -> Iterator[str]:
    """Yield what must be known of the keys of a query that are no fields."""
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
