"""Read several databases, and find a study."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bssearch.errors import BSSearchError, NotFoundError, UsageError
from bssearch.settings import database_url
from bssearch.storage.connection.urls import parse_url, shown, sqlite_file
from bssearch.storage.repository import Store, open_store


@contextmanager
def open_databases(urls: Sequence[str] | None = None) -> Iterator[list[Store]]:
    """Open databases for reading, each once, all or none; by default `settings.database_url`."""
    with ExitStack() as stack:
        stores = []
        for url in _each_once(urls or [database_url()]):
            stores.append(_opened(url, is_only=len(urls or []) < 2))
            stack.callback(stores[-1].close)
        yield stores


@contextmanager
def study_in(urls: Sequence[str] | None, given: str | None) -> Iterator[tuple[Store, str]]:
    """Give a study's store and name; see `found_study`."""
    with open_databases(urls) as stores:
        store, name = found_study(stores, given)
        with store:
            yield store, name


def found_study(stores: Sequence[Store], given: str | None) -> tuple[Store, str]:
    """Return the store and name of the given or only study.

    With one store a name is not looked up. Raises `NotFoundError`, or `UsageError` if ambiguous.
    """
    if given is None:
        return _only_study(stores)
    if len(stores) == 1:
        return stores[0], given
    holders = [store for store in stores if store.find_study(given) is not None]
    if not holders:
        raise _nowhere(stores, given)
    if len(holders) > 1:
        raise UsageError(
            f"study {given!r} is in several databases: {_listed(holders)}", hint="name the one that is meant with --db"
        )
    return holders[0], given


def _only_study(stores: Sequence[Store]) -> tuple[Store, str]:
    listed = [(store, one) for store in stores for one in store.studies()]
    named = [(store, one.name) for store, one in listed if one.archived_at is None]
    where, holds = ("the database", "holds") if len(stores) == 1 else ("the databases", "hold")
    if not named:
        if listed:
            raise NotFoundError(f"every study of {where} is archived", hint="bssearch study list --all lists them")
        raise NotFoundError(f"{where} {holds} no study yet", hint="bssearch run SPEC makes one")
    if len(named) > 1:
        raise UsageError(f"name the study: {', '.join(name for _, name in named)}")
    return named[0]


def _nowhere(stores: Sequence[Store], name: str) -> NotFoundError:
    names = sorted({one.name for store in stores for one in store.studies()})
    near = difflib.get_close_matches(name, names, n=3)
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return NotFoundError(
        f"no study {name!r} in any of {_listed(stores)}",
        hint=f"{guess}`bssearch study list` with the same --db lists them",
    )


def _listed(stores: Sequence[Store]) -> str:
    return ", ".join(store.masked_url for store in stores)


def _each_once(urls: Sequence[str]) -> list[str]:
    found: dict[object, str] = {}
    for text in urls:
        url = parse_url(text)
        path = sqlite_file(url)
        place = (url.host, url.port, url.database, *sorted(url.query.items())) if path is None else path.resolve()
        found.setdefault(place, text)
    return list(found.values())


def _opened(url: str, *, is_only: bool) -> Store:
    try:
        return open_store(url, write=False)
    except BSSearchError as error:
        name = shown(parse_url(url))
        if is_only or name in error.message:
            raise
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error
