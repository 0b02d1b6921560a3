"""What is stored: studies, trials, probes."""

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
    """Who runs a trial, and for how many seconds others believe it without a heartbeat.

    ``user`` is the person who started the driver, ``spec`` the digest of the spec by which that runs (`spec_digest`);
    None where nobody says.
    """

    owner: str
    seconds: float
    user: str | None = None
    spec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord(StepTime):
    """A stored step time and the evaluation cadence fixed from it; None where the batch size does not fit.

    With an ``error`` its seconds are those of several visits, `bssearch.records.step_times`; None: of one measurement.
    """

    eval_every_steps: int | None
    error: StepTimeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord(Planned):
    """One stored trial. ``outcome`` is None until it has finished.

    ``steps_x_step_time_s`` is steps-to-target times the isolated step time, by all visits until it was read.
    ``started_by`` is the user whose driver started the trial, ``spec_digest`` that of its spec (`spec_digest`); None
    if unknown.
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
        """Return the record of a plan's trial as it begins: running under a lease, queued without one."""
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
        """Return whether the trial was made elsewhere: it began and ended in the moment of its import."""
        return self.ended_at is not None and self.created_at == self.ended_at

    @property
    def is_refused(self) -> bool:
        """Return whether the trial never trained because the spec does not allow its configuration."""
        return self.state is TrialState.FAILED and self.outcome is not None and self.outcome.reason.startswith(REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewStudy:
    """A study to store; ``spec`` is the whole spec as JSON values, ``spec_hash`` the digest of its question."""

    name: str
    spec: Mapping[str, object]
    spec_hash: str
    objective: str
    target: Target
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord(NewStudy):
    """One stored study; ``environment`` is the device it is bound to.

    An archived study is left out of lists and takes no more trials.
    """

    created_at: datetime
    archived_at: datetime | None = None
    environment: Environment | None

    @classmethod
    def created(cls, study: NewStudy, created_at: datetime, environment: Environment | None = None) -> StudyRecord:
        """Return the record of a study as it begins."""
        values = {one.name: getattr(study, one.name) for one in fields(NewStudy)}
        return cls(created_at=created_at, environment=environment, **values)

    @property
    def mark(self) -> str:
        """Return 16 hex digits that are this study's, however its database is addressed and whatever it is called."""
        told = f"{self.created_at.isoformat()} {self.created_by} {self.spec_hash}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def spec_digest(spec: Mapping[str, object]) -> str:
    """Return 16 hex digits that two specs, as JSON values, share exactly when they are the same in every field."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
