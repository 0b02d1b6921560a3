"""Page requests, pages, and read-only databases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from bssearch.commands.across.databases import found_study, open_databases
from bssearch.errors import BSSearchError, NotFoundError, UsageError, require
from bssearch.records.text import shortened
from bssearch.storage.repository import Store

NUMBER = "db"  # query key of a database's number from 1, if several databases have a study of the same name


class Databases:
    """The databases of the server, which each request opens read-only."""

    def __init__(self, urls: Sequence[str] | None = None) -> None:
        with open_databases(urls) as stores:  # an unusable database raises before the server starts
            self.names = [store.masked_url for store in stores]
        self._urls = list(urls) if urls else None

    def opened(self) -> AbstractContextManager[list[Store]]:
        return open_databases(self._urls)

    @contextmanager
    def study(self, name: str, number: str | None = None) -> Iterator[Store]:
        """Yield the store of a study, in database ``number`` if given."""
        with self.opened() as stores:
            store = found_study(stores if number is None else [numbered(stores, number)], name)[0]
            with store:  # errors name the unusable row
                store.studies.get(name)
                yield store

    def number_of(self, database: str) -> int | None:
        return self.names.index(database) + 1 if len(self.names) > 1 and database in self.names else None


def numbered(stores: Sequence[Store], number: str, error: type[BSSearchError] = NotFoundError) -> Store:
    is_number = number.isascii() and number.isdecimal() and 1 <= int(number[:9]) <= len(stores)
    require(is_number, f"{NUMBER}={number[:20]} must be from 1 to {len(stores)}", error=error)
    return stores[int(number[:9]) - 1]


LONGEST_SHOWN = 60  # most characters of a query value in an error


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page. ``several`` has all values of each query key."""

    databases: Databases
    path: Mapping[str, str]
    query: Mapping[str, str]
    several: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def study(self) -> str:
        return self.path["name"]

    @property
    def database(self) -> str | None:
        return self.query.get(NUMBER) or None

    def text(self, name: str) -> str | None:
        return self.query.get(name, "").strip() or None

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int | None:
        """Return an integer of the query, or ``default`` if missing. Raises `UsageError` if invalid."""
        given = self.text(name)
        if given is None:
            return default
        number = int(given) if given.isascii() and given.isdecimal() and len(given) < 20 else None
        if number is None or not least <= number <= most:
            raise UsageError(
                f"{name} = {shortened(given, LONGEST_SHOWN)!r} must be a whole number from {least} to {most}"
            )
        return number

    def one_of(self, name: str, known: Mapping[str, Any]) -> Any:
        """Return the entry of ``known`` for a query value, or None if missing. Raises `UsageError` if unknown."""
        given = self.text(name)
        if given is None:
            return None
        require(given in known, f"{name} = {shortened(given, LONGEST_SHOWN)!r} must be one of {', '.join(known)}")
        return known[given]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A template with values. The page refreshes every ``live_seconds`` seconds, or never if 0."""

    template: str
    values: Mapping[str, Any]
    live_seconds: float = 0


@dataclass(frozen=True, slots=True)
class Document:
    """JSON values instead of a page."""

    content: Any


Answered = View | Document


@dataclass(frozen=True, slots=True)
class Page:
    """The functions of a page, which raise `BSSearchError` if the page has no content.

    A client that already has the current ``version`` gets status 304 without a body.
    """

    show: Callable[[PageRequest], Answered]
    version: Callable[[PageRequest], str] | None = None
