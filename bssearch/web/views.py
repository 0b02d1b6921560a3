"""What a page is asked and what it shows; each page is a function from the one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bssearch.errors import UsageError
from bssearch.web.databases import NUMBER, Databases

LONGEST_SHOWN = 60
"""Characters of a value of a query that an error repeats at most: a choice."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks: the databases, the parts of its path, its query, and the version that the reader has."""

    databases: Databases
    path: Mapping[str, str]
    query: Mapping[str, str]
    several: Mapping[str, list[str]] = field(default_factory=dict)
    known_version: str | None = None

    @property
    def study(self) -> str:
        """The name of the study that the page is about."""
        return self.path["name"]

    @property
    def database(self) -> str | None:
        """The number of the database of the study, as given."""
        return self.query.get(NUMBER) or None

    def text(self, name: str) -> str | None:
        """Return a value of the query; None where it is empty or not there."""
        return self.query.get(name, "").strip() or None

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int | None:
        """Return a whole number of the query; raise `UsageError` for another text."""
        given = self.text(name)
        if given is None:
            return default
        number = int(given) if given.isascii() and given.isdecimal() and len(given) < 20 else None
        if number is None or not least <= number <= most:
            raise UsageError(f"{name} = {shortened(given)!r} must be a whole number from {least} to {most}")
        return number

    def one_of(self, name: str, known: Mapping[str, Any]) -> Any:
        """Return what a value of the query stands for, None without one; raise `UsageError` for one not known."""
        given = self.text(name)
        if given is None:
            return None
        if given not in known:
            raise UsageError(f"{name} = {shortened(given)!r} must be one of {', '.join(known)}")
        return known[given]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A template and what it shows.

    ``version`` changes when what is shown does: a reader who has it is sent nothing. ``live_seconds`` is how often the
    page asks whether it has; 0 for never.
    """

    template: str
    values: Mapping[str, Any]
    version: str | None = None
    live_seconds: float = 0


@dataclass(frozen=True, slots=True)
class Document:
    """What is sent for programs in the place of a page: JSON values."""

    content: Any


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Says that the reader has the newest version already."""

    version: str


Answered = View | Document | Unchanged
Page = Callable[[Asked], Answered]


def shortened(text: str) -> str:
    """Return a text that was given, for an error: its beginning."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
