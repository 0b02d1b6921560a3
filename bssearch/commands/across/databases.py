"""Open databases for reading, and find a command's study."""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bssearch.errors import BSSearchError, NotFoundError, require
from bssearch.settings import database_url
from bssearch.storage.connection.engine import parse_url, shown, sqlite_file
from bssearch.storage.repository import Store, open_store


@contextmanager
def open_databases(urls: Sequence[str] | None = None) -> Iterator[list[Store]]:
    """Open each database once for reading, by default the database of `settings.database_url`."""
    files = {url: sqlite_file(parse_url(url)) for url in urls or [database_url()]}
    every = {url if path is None else path.resolve(): url for url, path in files.items()}
    with ExitStack() as stack:
        yield [stack.enter_context(_opened(url, is_only=len(every) == 1)) for url in every.values()]


@contextmanager
def study_in(urls: Sequence[str] | None, given: str | None) -> Iterator[tuple[Store, str]]:
    with open_databases(urls) as stores:
        store, name = found_study(stores, given)
        with store:
            yield store, name


def found_study(stores: Sequence[Store], given: str | None) -> tuple[Store, str]:
    """Return the store and name of the given study, or of the only study.

    Checks the name if there are several stores: exactly one store must have the study.
    """
    if given is None:
        return _only_study(stores)
    if len(stores) == 1:
        return stores[0], given
    holders = [store for store in stores if store.studies.find(given) is not None]
    if not holders:
        near = difflib.get_close_matches(given, [one.name for store in stores for one in store.studies.summaries()])
        guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise NotFoundError(
            f"there is no study {given!r} in {_listed(stores)}",
            hint=f"{guess}list the studies with `bssearch study list` and the same --db",
        )
    require(
        len(holders) == 1,
        f"study {given!r} is in several databases: {_listed(holders)}",
        hint="choose a database with --db",
    )
    return holders[0], given


def _only_study(stores: Sequence[Store]) -> tuple[Store, str]:
    listed = [(store, one) for store in stores for one in store.studies.summaries()]
    named = [(store, one.name) for store, one in listed if one.archived_at is None]
    where, holds = ("the database", "holds") if len(stores) == 1 else ("the databases", "hold")
    require(
        named or not listed,
        f"every study of {where} is archived",
        hint="name a study; `bssearch study list --all` lists archived studies",
        error=NotFoundError,
    )
    require(named, f"{where} {holds} no study yet", hint="make a study with `bssearch run SPEC`", error=NotFoundError)
    require(len(named) == 1, f"{where} {holds} several studies; name a study: {', '.join(name for _, name in named)}")
    return named[0]


def _listed(stores: Sequence[Store]) -> str:
    return ", ".join(store.masked_url for store in stores)


def _opened(url: str, *, is_only: bool) -> Store:
    try:
        return open_store(url, write=False)
    except BSSearchError as error:
        name = shown(parse_url(url))
        if is_only or name in error.message:
            raise
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error
