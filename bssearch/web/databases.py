"""The databases behind the pages: opened for each request, so that one that goes away or comes back is seen at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bssearch.commands.across.databases import found_study, open_databases
from bssearch.errors import NotFoundError
from bssearch.storage.repository import Store

NUMBER = "db"
"""The query's name for the number of a database, from 1 on, where a study of one name is in several."""


class Databases:
    """The databases that are served, read-only; ``urls`` as `open_databases` takes them."""

    def __init__(self, urls: Sequence[str] | None = None) -> None:
        with open_databases(urls) as stores:  # raises what is wrong with them before anything is served
            self.names = [store.masked_url for store in stores]
        self._urls = list(urls) if urls else None

    @contextmanager
    def opened(self) -> Iterator[list[Store]]:
        """Give the stores of all databases; raise what `open_databases` raises."""
        with open_databases(self._urls) as stores:
            yield stores

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
