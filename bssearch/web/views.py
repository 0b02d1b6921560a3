"""What a page is asked, of which databases, and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from bssearch.commands.across.databases import found_study, open_databases
from bssearch.errors import NotFoundError, UsageError
from bssearch.storage.repository import Store

NUMBER = "db"
"""The query's name for the number of a database, from 1 on, where a study of one name is in several."""


class Databases:
    """The databases that are served, read-only; ``urls`` as `open_databases` takes them."""

    def __init__(self, urls: Sequence[str] | None = None) -> None:
        with open_databases(urls) as stores:  # raises what is wrong with them before anything is served
            self.names = [store.masked_url for store in stores]
        self._urls = list(urls) if urls else None

    def opened(self) -> AbstractContextManager[list[Store]]:
        """Give the stores of all databases; raise what `open_databases` raises."""
        return open_databases(self._urls)

    @contextmanager
    def study(self, name: str, number: str | None = None) -> Iterator[Store]:
        """Give the store that holds a study; ``number`` says of which database, where there are several.

        Raises `NotFoundError` where no store has it, `UsageError` where several have.
        """
        with self.opened() as stores:
            store = found_study(stores if number is None else [self._numbered(stores, number)], name)[0]
            with store:  # which names a row that cannot be used
                store.study(name)
                yield store

    def number_of(self, database: str) -> int | None:
        """Return the number of a database by its name, None where it is the only one."""
        return self.names.index(database) + 1 if len(self.names) > 1 and database in self.names else None

    def _numbered(self, stores: Sequence[Store], number: str) -> Store:
        store = numbered(stores, number)
        if store is None:
            raise NotFoundError(f"{NUMBER}={number[:20]}: there are the databases 1 to {len(stores)}")
        return store


def numbered(stores: Sequence[Store], number: str) -> Store | None:
    """Return the store of a number from 1 on, as a query has it; None where there is none."""
    is_number = number.isascii() and number.isdecimal() and 1 <= int(number[:9]) <= len(stores)
    return stores[int(number[:9]) - 1] if is_number else None


LONGEST_SHOWN = 60
"""Characters of a value of a query that an error repeats at most: a choice."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks: the databases, the parts of its path, its query, and all values of each of its names."""

    databases: Databases
    path: Mapping[str, str]
    query: Mapping[str, str]
    several: Mapping[str, list[str]] = field(default_factory=dict)

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
    """A template and what it shows; every ``live_seconds`` the page asks whether that has changed, at 0 never."""

    template: str
    values: Mapping[str, Any]
    live_seconds: float = 0


@dataclass(frozen=True, slots=True)
class Document:
    """What is sent for programs in the place of a page: JSON values."""

    content: Any


Answered = View | Document
Version = Callable[[Asked], str]


@dataclass(frozen=True, slots=True)
class Page:
    """How a page is made, and what changes whenever it does: who has that ``version`` is sent nothing, None for always.

    Both raise `BSSearchError` where there is nothing to show.
    """

    show: Callable[[Asked], Answered]
    version: Version | None = None


def shortened(text: str) -> str:
    """Return a text that was given, for an error: its beginning."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
