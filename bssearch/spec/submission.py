"""What the queue holds: submissions, and the workers that serve them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from bssearch.errors import UsageError
from bssearch.spec.reader import SUFFIXES
from bssearch.spec.yaml_values import shortened

Value = float | int | bool | str | list[int] | list[float]
"""A value that a submission gives: a number, yes or no, one of the choices of a template, or a list of numbers."""

Values = Mapping[str, Value]
"""Values by the dotted key of the spec's field."""

LOWEST_PRIORITY = 1e-6
HIGHEST_PRIORITY = 1e6
MOST_TAGS = 20
LONGEST_OWNER = 100
"""Choices: far beyond what anybody needs."""

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")

EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)
"""Between which a moment can be written with any offset from UTC."""

TEMPLATE_NAME = (
    "a template's name is of at most 100 letters, digits, '_', '.' and '-', such as digits, and ends as no file does "
    f"({', '.join(SUFFIXES)}); a submission's file ends in .yaml or .yml"
)
_TEMPLATE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class SubmissionState(StrEnum):
    """WAITING: it is served, now or later. Who submitted it has it PAUSED or CANCELLED; a worker DONE or FAILED."""

    WAITING = "waiting"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nobody serves it any more, now or later."""
        return self not in {SubmissionState.WAITING, SubmissionState.PAUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSubmission:
    """A study that somebody wants to be run: under a name, from a worker's template with these values.

    No worker serves it before the moment ``not_before``, nor one that lacks one of its ``tags``. A row may hold
    anything: `check` is for what is to be stored.
    """

    name: str
    template: str
    values: Values
    owner: str
    priority: float = 1.0
    tags: tuple[str, ...] = ()
    not_before: datetime | None = None

    def check(self) -> None:
        """Raise `UsageError` where something of it is out of bounds."""
        if not LOWEST_PRIORITY <= self.priority <= HIGHEST_PRIORITY:
            raise UsageError(f"priority = {self.priority:g} must be from {LOWEST_PRIORITY:g} to {HIGHEST_PRIORITY:g}")
        if not self.owner.strip() or len(self.owner) > LONGEST_OWNER or not self.owner.isprintable():
            raise UsageError(f"owner = {self.owner!r} must be a name of at most {LONGEST_OWNER} characters")
        if self.not_before is not None and self.not_before.tzinfo is None:
            raise UsageError(
                f"not before {self.not_before.isoformat()}: the moment must say its offset from UTC",
                hint=f"such as {self.not_before.isoformat(timespec='minutes')}+00:00",
            )
        if self.not_before is not None and not EARLIEST <= self.not_before <= LATEST:
            raise UsageError(
                f"not before {self.not_before.isoformat()}: it must lie from {EARLIEST.date()} to {LATEST.date()}"
            )
        check_template_name(self.template)
        check_tags(self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(NewSubmission):
    """A submission as it is stored; ``login`` is who PostgreSQL saw submit it.

    ``served_seconds`` are the slot seconds for which workers have served it; ``reason`` says why it is in its state.
    """

    login: str | None
    submitted_at: datetime
    state: SubmissionState
    reason: str
    served_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker as others see it. ``name`` is its process's (`bssearch.search.leases`).

    ``templates`` are the values of each template that it offers, as `bssearch.spec.templates` writes their types;
    ``serving`` is the study that it serves now, since ``serving_since``. One that has ended in good order ``left_at`` a
    moment; ``is_here`` says whether it was seen lately and has not left.
    """

    name: str
    user: str
    host: str
    tags: tuple[str, ...]
    slots: str
    device_name: str | None
    templates: Mapping[str, Mapping[str, object]]
    seen_at: datetime
    left_at: datetime | None
    serving: str | None
    serving_since: datetime | None
    is_here: bool


def is_template_name(name: str) -> bool:
    """Return whether a template may have a name: no path is one, nor what `queue submit` would read as a file."""
    return _TEMPLATE.fullmatch(name) is not None and not name.endswith(SUFFIXES)


def check_template_name(name: str) -> None:
    """Raise `UsageError` where a template may not have a name."""
    if not is_template_name(name):
        raise UsageError(f"{shortened(name)} is no name of a template", hint=TEMPLATE_NAME)


def check_tags(tags: Sequence[str]) -> None:
    """Raise `UsageError` for a tag that is none."""
    if len(tags) > MOST_TAGS:
        raise UsageError(f"{len(tags)} tags are more than {MOST_TAGS}")
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise UsageError(
                f"{tag!r} is no tag", hint="a tag is of letters, digits, '_', '.', ':' and '-', such as gpu:h200"
            )
