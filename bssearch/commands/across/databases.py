"""Read several databases, find and filter studies."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Self

from bssearch.errors import BSSearchError, NotFoundError, UsageError
from bssearch.records import StudyRecord
from bssearch.search.stored_finding import short_answer
from bssearch.settings import database_url
from bssearch.storage.connection.urls import parse_url, shown, sqlite_file
from bssearch.storage.repository import Store, open_store
from bssearch.workloads.base import SHIPPED


@contextmanager
def open_databases(urls: Sequence[str] | None = None) -> Iterator[list[Store]]:
    """Open databases read-only, each URL once; if one fails, close all. By default `settings.database_url`."""
    with ExitStack() as stack:
        stores = []
        for url in _each_once(urls or [database_url()]):
            stores.append(stack.enter_context(_opened(url, is_only=len(urls or []) < 2)))
        yield stores


@contextmanager
def study_in(urls: Sequence[str] | None, given: str | None) -> Iterator[tuple[Store, str]]:
    """Yield a study's store and name; see `found_study`."""
    with open_databases(urls) as stores:
        store, name = found_study(stores, given)
        with store:
            yield store, name


def found_study(stores: Sequence[Store], given: str | None) -> tuple[Store, str]:
    """Store and name of the given or only study.

    With one store a name is not looked up. Raises `NotFoundError`, or `UsageError` if ambiguous.
    """
    if given is None:
        return _only_study(stores)
    if len(stores) == 1:
        return stores[0], given
    holders = [store for store in stores if store.studies.find(given) is not None]
    if not holders:
        names = sorted({one.name for store in stores for one in store.studies.summaries()})
        near = difflib.get_close_matches(given, names, n=3)
        guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise NotFoundError(
            f"no study {given!r} in any of {_listed(stores)}",
            hint=f"{guess}`bssearch study list` with the same --db lists them",
        )
    if len(holders) > 1:
        raise UsageError(
            f"study {given!r} is in several databases: {_listed(holders)}", hint="choose a database with --db"
        )
    return holders[0], given


def _only_study(stores: Sequence[Store]) -> tuple[Store, str]:
    listed = [(store, one) for store in stores for one in store.studies.summaries()]
    named = [(store, one.name) for store, one in listed if one.archived_at is None]
    where, holds = ("the database", "holds") if len(stores) == 1 else ("the databases", "hold")
    if not named:
        if listed:
            raise NotFoundError(f"every study of {where} is archived", hint="bssearch study list --all lists them")
        raise NotFoundError(f"{where} {holds} no study yet", hint="bssearch run SPEC makes one")
    if len(named) > 1:
        raise UsageError(f"name the study: {', '.join(name for _, name in named)}")
    return named[0]


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


MOST_NAMED = 8  # the most values of a condition that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFilter:
    """Conditions on a study; None matches everything. ``device`` is a part of the device's name."""

    workload: str | None = None
    device: str | None = None
    target: float | None = None
    metric: str | None = None
    objective: str | None = None
    precision: str | None = None

    @classmethod
    def of(
        cls,
        *,
        workload: str | None = None,
        device: str | None = None,
        target: str | float | None = None,
        objective: str | None = None,
        precision: str | None = None,
    ) -> Self:
        """Make a filter; `target_of` parses ``target``."""
        metric, value = (None, None) if target is None else target_of(target)
        return cls(
            workload=workload, device=device, target=value, metric=metric, objective=objective, precision=precision
        )

    @property
    def conditions(self) -> Mapping[str, Callable[[StudyRecord], bool]]:
        """Given conditions by name."""
        asked: dict[str, tuple[object, Callable[[StudyRecord], bool]]] = {
            "workload": (self.workload, lambda study: self.workload in workload_names(study)),
            "device": (self.device, lambda study: str(self.device).lower() in device_of(study).lower()),
            "target": (self.target, self._has_target),
            "objective": (self.objective, lambda study: study.objective == self.objective),
            "precision": (self.precision, lambda study: precision_of(study) == self.precision),
        }
        return {name: holds for name, (value, holds) in asked.items() if value is not None}

    @property
    def in_words(self) -> str:
        """Conditions as options."""
        values = {name: getattr(self, name) for name in self.conditions}
        if self.target is not None:
            values["target"] = f"{self.metric}={self.target:g}" if self.metric else f"{self.target:g}"
        return " ".join(f"--{name} {value}" for name, value in values.items())

    def matches(self, study: StudyRecord) -> bool:
        """True if a study meets all conditions."""
        return not self.unmet(study)

    def unmet(self, study: StudyRecord) -> set[str]:
        """Names of unmet conditions."""
        return {name for name, holds in self.conditions.items() if not holds(study)}

    def _has_target(self, study: StudyRecord) -> bool:
        target = study.target
        same = f"{target.value:g}" == f"{self.target:g}" or math.isclose(target.value, self.target or 0.0)
        return same and self.metric in (None, target.metric)


def target_of(text: str | float) -> tuple[str | None, float]:
    """Parse ``VALUE`` or ``METRIC=VALUE``; raise `UsageError` for a non-finite number."""
    metric, _, number = str(text).rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"target {text} must be a finite number, or METRIC=NUMBER as in --target accuracy=0.97")
    return metric.strip() or None, value


def workload_names(study: StudyRecord) -> set[str]:
    """Names by which a study's workload may be given.

    ``tasks/task.py:Task`` is also ``tasks/task.py``, ``task.py:Task``, ``task.py``, ``task`` and ``Task``.
    """
    named = str(study.spec.get("workload", ""))
    location, _, attribute = named.rpartition(":")
    location, attribute = (location, attribute) if location else (attribute, "")
    path = PurePath(location)
    last = path.stem if path.suffix == ".py" else location.rpartition(".")[2]
    names = {named, location, path.name, last, attribute, f"{path.name}:{attribute}".rstrip(":")}
    names |= {name for name, target in SHIPPED.items() if named in (name, target)} | {SHIPPED.get(named, named)}
    words = study.spec.get("command")
    for word in words if isinstance(words, list) else ():
        if str(word).endswith((".py", ".sh")):
            names |= {str(word), PurePath(str(word)).name}
    return names - {""}


def device_of(study: StudyRecord) -> str:
    """The device's name, empty before the first run."""
    return "" if study.environment is None else study.environment.device_name


def precision_of(study: StudyRecord) -> str:
    """Actual precision, empty before the first run."""
    return "" if study.environment is None else study.environment.precision


def nothing_matches(asked: StudyFilter, studies: Sequence[StudyRecord]) -> NotFoundError:
    """Error if no study matches; lists existing values."""
    if not studies:
        return NotFoundError("there is no study yet", hint="bssearch run SPEC makes one; --db names another database")
    there_are = "; ".join(_there_are(asked, studies))
    return NotFoundError(f"no study matches {asked.in_words}", hint=f"there are {there_are}")


def _there_are(asked: StudyFilter, studies: Sequence[StudyRecord]) -> Iterator[str]:
    for name in asked.conditions:
        near = [study for study in studies if asked.unmet(study) == {name}]
        values = (_VALUES[name](study) for study in near or studies)
        yield f"{name}s {_nearest_first(values, str(getattr(asked, name)))}"


def _nearest_first(values: Iterable[str], asked: str) -> str:
    found = sorted({value or "none yet" for value in values})
    found.sort(key=lambda value: -difflib.SequenceMatcher(None, value.lower(), asked.lower()).ratio())
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


_VALUES: Mapping[str, Callable[[StudyRecord], str]] = {
    "workload": lambda study: str(study.spec.get("workload", "")),
    "device": device_of,
    "target": lambda study: study.target.in_words,
    "objective": lambda study: study.objective,
    "precision": precision_of,
}


def study_rows(store: Store, studies: Iterable[StudyRecord], *, archived: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row per study, oldest first: the contract of ``study list --format json``.

    Closes the store.
    """
    with store:
        records = {one.name: one for one in studies}
        for one in store.studies.summaries():
            study = records.get(one.name)  # None if it was left out, or created just now
            if study is None or (one.archived_at is not None and not archived):
                continue
            found = short_answer(store, one.name)
            yield {
                "name": one.name,
                "workload": one.workload,
                "target": one.target,
                "objective": one.objective,
                "trials": one.trials,
                "reached": one.reached,
                "running": one.running,
                "best_batch_size": found and found.optimal.batch_size,
                "best_seconds": found and found.seconds,
                "within_5_percent": found and found.within_5_percent,
                "provisional": found and found.provisional,
                "answer": found and found.in_words,
                "medians": found and found.medians,
                "created_by": one.created_by,
                "created_at": one.created_at.isoformat(timespec="seconds"),
                "archived_at": one.archived_at and one.archived_at.isoformat(timespec="seconds"),
                "database": store.masked_url,
                "device": device_of(study) or None,
                "precision": precision_of(study) or None,
            }
