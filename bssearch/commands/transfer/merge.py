"""``merge``: the studies of other databases in this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bssearch.errors import BSSearchError
from bssearch.storage.connection.urls import masked, parse_url
from bssearch.storage.repository import Store, open_store
from bssearch.storage.transfer.joining import Count, Joined
from bssearch.storage.transfer.layout import Kind
from bssearch.storage.transfer.sources import opened_source
from bssearch.storage.transfer.transfers import Incoming

MEASUREMENTS = (Kind.PROBE, Kind.VISIT, Kind.BRANCH)
COLUMNS = ("study", "trials_new", "trials_changed", "trials_known", "observations_new", "measurements_new", "source")
"""What people see of a merge, a study a row."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of the studies of some databases, and what there is to say about it, each a sentence."""

    studies: Sequence[Joined]
    notes: Sequence[str]


def merge(
    sources: Sequence[str],
    *,
    into: str | None = None,
    studies: Collection[str] | None = None,
    dry_run: bool = False,
    notify: Callable[[str], None] | None = None,
) -> Merged:
    """Join the studies of other databases with those of one, and return what became of each.

    ``sources`` and ``into`` are database URLs (default of ``into``: ``BSSEARCH_DB_URL``, else a file here).
    ``studies`` names those that are taken, of every source that has them; by default all that are not archived. All
    sources are read before anything is stored; then of each source all studies are stored, or none. A source whose
    schema is older is read from an upgraded copy where it is a SQLite file. With ``dry_run`` nothing is stored, and
    refused is what the merge would refuse. Raises `UsageError` for what contradicts, naming study, row, field and both
    values, `SchemaError` for a source that a newer bssearch has written, `NotFoundError` where a name is in no source.
    """
    with ExitStack() as stack:
        incoming: list[Incoming] = []
        notes: list[str] = []
        for url in sources:
            one, said = _read(url, studies)
            stack.callback(one.close)
            incoming.append(one)
            notes += said
        _check_found(studies, incoming, sources)
        if dry_run:
            open_store(into, write=False).close()  # else it would be made
        store = stack.enter_context(open_store(into, notify=notify))
        if dry_run:
            return Merged(store.try_joining(incoming), notes)
        done: list[Joined] = []
        for url, one in zip(sources, incoming, strict=True):
            done += _joined(store, url, one, sources)
    return Merged(done, notes)


def _read(url: str, studies: Collection[str] | None) -> tuple[Incoming, list[str]]:
    where = masked(parse_url(url))
    with opened_source(url) as source:
        there = {one.name: one for one in source.studies()}
        names = None if studies is None else [name for name in there if name in studies]
        incoming, running = source.stage_studies(names, where)
    archived = sorted(name for name, one in there.items() if one.archived_at is not None) if studies is None else []
    notes = [f"{where}: archived, and left out unless --study names it: {name}" for name in archived]
    notes += [
        f"{where}: study {name}: {len(numbers)} of its trials run, and are left out until they have ended"
        for name, numbers in running.items()
        if numbers
    ]
    return incoming, notes


def _check_found(studies: Collection[str] | None, incoming: Sequence[Incoming], sources: Sequence[str]) -> None:
    """Raise `NotFoundError` where a name is in no source."""
    from bssearch.errors import NotFoundError

    found = {staged.name for one in incoming for staged in one.studies}
    for name in studies or ():
        if name not in found:
            raise NotFoundError(f"no study {name!r} in {', '.join(masked(parse_url(url)) for url in sources)}")


def _joined(store: Store, url: str, incoming: Incoming, sources: Sequence[str]) -> list[Joined]:
    try:
        return store.join_studies(incoming)
    except BSSearchError as error:
        before = list(sources)[: list(sources).index(url)]
        if before:
            error.hint = f"{error.hint + '; ' if error.hint else ''}what came before it is stored: " + ", ".join(
                masked(parse_url(one)) for one in before
            )
        raise


def told(joined: Joined) -> dict[str, Any]:
    """Return what became of a study as JSON values."""
    trials, observations = joined.counts[Kind.TRIAL], joined.counts[Kind.OBSERVATION]
    return {
        "study": joined.study,
        "source": joined.source,
        "is_new": joined.is_new,
        "is_changed": joined.is_changed,
        **_counted("trials", [trials]),
        **_counted("observations", [observations]),
        **_counted("measurements", [joined.counts[kind] for kind in MEASUREMENTS]),
    }


def _counted(name: str, counts: Sequence[Count]) -> Mapping[str, int]:
    return {f"{name}_{part}": sum(getattr(one, part) for one in counts) for part in ("new", "changed", "known")}


def sentence(joined: Joined) -> str:
    """Return what became of a study in a sentence."""
    if joined.is_new:
        return f"study {joined.study} is new: {joined.counts[Kind.TRIAL].new} trials"
    if not joined.is_changed:
        return f"study {joined.study} is here already, and nothing is new"
    trials = joined.counts[Kind.TRIAL]
    return f"study {joined.study} was here: {trials.new} trials are new, {trials.changed} have changed"
