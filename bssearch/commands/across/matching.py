"""Filters for studies."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Self

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import StudyRecord
from bssearch.storage.repository import Store
from bssearch.workloads.base import SHIPPED

MOST_NAMED = 8  # the most values of a condition that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFilter:
    """Conditions on a study; None matches everything, ``device`` a part of its name."""

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
        """Make a filter; `target_of` parses ``target``. Raises `UsageError`."""
        metric, value = (None, None) if target is None else target_of(target)
        return cls(
            workload=workload, device=device, target=value, metric=metric, objective=objective, precision=precision
        )

    @property
    def conditions(self) -> Mapping[str, Callable[[StudyRecord], bool]]:
        """Return the given conditions by name."""
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
        """Return the conditions as options."""
        values = {name: getattr(self, name) for name in self.conditions}
        if self.target is not None:
            values["target"] = f"{self.metric}={self.target:g}" if self.metric else f"{self.target:g}"
        return " ".join(f"--{name} {value}" for name, value in values.items())

    def matches(self, study: StudyRecord) -> bool:
        """True if a study meets all conditions."""
        return not self.unmet(study)

    def unmet(self, study: StudyRecord) -> set[str]:
        """Return the unmet conditions."""
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
    """Return the names by which a study's workload may be given.

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
    """Return the device's name, empty before the first run."""
    return "" if study.environment is None else study.environment.device_name


def precision_of(study: StudyRecord) -> str:
    """Return the actual precision, empty before the first run."""
    return "" if study.environment is None else study.environment.precision


def nothing_matches(asked: StudyFilter, studies: Sequence[StudyRecord]) -> NotFoundError:
    """Return the error for no match, with existing values."""
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


def study_rows(store: Store, asked: StudyFilter, *, archived: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row per matching study, oldest first: the contract of ``studies --format json``.

    Closes the store.
    """
    with store:
        records = {one.name: one for one in store.study_records()}
        for one in store.studies():
            study = records.get(one.name)  # None if the study was created just now
            if study is None or not asked.matches(study) or (one.archived_at is not None and not archived):
                continue
            yield {
                "name": one.name,
                "workload": one.workload,
                "target": one.target,
                "objective": one.objective,
                "trials": one.trials,
                "reached": one.reached,
                "running": one.running,
                "created_by": one.created_by,
                "created_at": one.created_at.isoformat(timespec="seconds"),
                "archived_at": one.archived_at and one.archived_at.isoformat(timespec="seconds"),
                "database": store.masked_url,
                "device": device_of(study) or None,
                "precision": precision_of(study) or None,
            }
