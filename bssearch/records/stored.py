"""Stored rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from bssearch.records.measured import REFUSED, Environment, StepTime, StepTimeError, TrialOutcome
from bssearch.records.question import Target, TrialState
from bssearch.records.requests import Planned, TrialPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A driver's claim on a trial; expires ``seconds`` after the last heartbeat.

    ``user`` started the driver; ``spec`` is its `spec_digest`.
    """

    owner: str
    seconds: float
    user: str | None = None
    spec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord(StepTime):
    """A stored step time with its evaluation cadence, None if the batch size does not fit.

    ``error`` is set if fitted over several visits.
    """

    eval_every_steps: int | None
    error: StepTimeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord(Planned):
    """A stored trial.

    ``steps_x_step_time_s``: steps to target × isolated step time, from all visits when read.
    """

    number: int
    state: TrialState
    lease_owner: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    ended_at: datetime | None
    steps_x_step_time_s: float | None
    outcome: TrialOutcome | None
    started_by: str | None = None
    spec_digest: str | None = None

    @classmethod
    def planned(cls, plan: TrialPlan, *, number: int, lease: Lease | None, created_at: datetime) -> TrialRecord:
        """New record: running with a lease, else queued."""
        return cls(
            number=number,
            state=TrialState.QUEUED if lease is None else TrialState.RUNNING,
            lease_owner=None if lease is None else lease.owner,
            lease_expires_at=None if lease is None else created_at + timedelta(seconds=lease.seconds),
            created_at=created_at,
            ended_at=None,
            steps_x_step_time_s=None,
            outcome=None,
            started_by=None if lease is None else lease.user,
            spec_digest=None if lease is None else lease.spec,
            **plan.kept,
        )

    @property
    def is_imported(self) -> bool:
        """True if start and end are equal."""
        return self.ended_at is not None and self.created_at == self.ended_at

    @property
    def is_refused(self) -> bool:
        """True if the spec forbids the configuration."""
        return self.state is TrialState.FAILED and self.outcome is not None and self.outcome.reason.startswith(REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewStudy:
    """A study to store: its spec as JSON values, and its question's digest."""

    name: str
    spec: Mapping[str, object]
    spec_hash: str
    objective: str
    target: Target
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord(NewStudy):
    """A stored study, bound to its ``environment``'s device; archived ones are hidden and accept no trials."""

    created_at: datetime
    archived_at: datetime | None = None
    environment: Environment | None

    @classmethod
    def created(cls, study: NewStudy, created_at: datetime, environment: Environment | None = None) -> StudyRecord:
        """New study's record."""
        values = {one.name: getattr(study, one.name) for one in fields(NewStudy)}
        return cls(created_at=created_at, environment=environment, **values)

    @property
    def mark(self) -> str:
        """16 hex digits that survive renaming and moving the database."""
        told = f"{self.created_at.isoformat()} {self.created_by} {self.spec_hash}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def spec_digest(spec: Mapping[str, object]) -> str:
    """16 hex digits of a spec's JSON values."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
