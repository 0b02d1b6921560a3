"""Records of the queue."""

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

Values = Mapping[str, Value]  # values by dotted key of the spec

LOWEST_PRIORITY = 1e-6
HIGHEST_PRIORITY = 1e6
MOST_TAGS = 20
LONGEST_OWNER = 100

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")

EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)  # moments from EARLIEST to here can be written with any UTC offset

TEMPLATE_NAME = (
    "a template's name is of at most 100 letters, digits, '_', '.' and '-', such as digits, and ends as no file does "
    f"({', '.join(SUFFIXES)}); a submission's file ends in .yaml or .yml"
)
_TEMPLATE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class SubmissionState(StrEnum):
    """WAITING to be served; PAUSED or CANCELLED by a user; DONE or FAILED by a worker."""

    WAITING = "waiting"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True if done, failed or cancelled."""
        return self not in {SubmissionState.WAITING, SubmissionState.PAUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSubmission:
    """A study to run from a worker's template with values.

    Workers need all ``tags``, and serve it from ``not_before`` on. Stored rows are not checked.
    """

    name: str
    template: str
    values: Values
    owner: str
    priority: float = 1.0
    tags: tuple[str, ...] = ()
    not_before: datetime | None = None

    def check(self) -> None:
        """Raise `UsageError` for a field out of bounds."""
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
    """A stored submission; ``login`` is PostgreSQL's user, ``served_seconds`` are slot seconds."""

    login: str | None
    submitted_at: datetime
    state: SubmissionState
    reason: str
    served_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker as others see it.

    ``templates`` are its offers. A worker that ended in order has ``left_at``; ``is_here``: seen lately and not left.
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
    """True unless like a path or file of `queue submit`."""
    return _TEMPLATE.fullmatch(name) is not None and not name.endswith(SUFFIXES)


def check_template_name(name: str) -> None:
    """Raise `UsageError` for an invalid template name."""
    if not is_template_name(name):
        raise UsageError(f"{shortened(name)} is no name of a template", hint=TEMPLATE_NAME)


def check_tags(tags: Sequence[str]) -> None:
    """Raise `UsageError` for an invalid tag."""
    if len(tags) > MOST_TAGS:
        raise UsageError(f"{len(tags)} tags are more than {MOST_TAGS}")
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise UsageError(
                f"{tag!r} is no tag", hint="a tag is of letters, digits, '_', '.', ':' and '-', such as gpu:h200"
            )
