"""What is stored: studies, trials, probes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from bssearch.records.measured import REFUSED, Environment, StepTime, StepTimeError, TrialOutcome
from bssearch.records.question import Configuration, ParameterValue, Phase, Target, TrialState
from bssearch.records.requests import TrialRequest

# A trial to run: what the engine decides, the store starts and an executor runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """A trial to run: a new one, one that a person enqueued (``queued``), or one that was paused (``resumed``).

    ``queued`` and ``resumed`` are the number it has already. ``sampled`` are its coordinates in the space, None where
    it lies outside. It trains for at most ``train_seconds_limit`` seconds and ends in ``limit_state`` there; with
    ``uncapped`` no other trial's time ends it earlier; without ``stop_at_target`` it goes on past the target.
    ``retry_of`` is the trial that it tries again. ``expected_improvement`` is the share of the incumbent's figure that
    the sampler expects a further trial to gain, None where it cannot say. ``after`` is the newest trial that was known
    when it was planned: where there is a newer one it is not started; None where that does not matter.
    """

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    phase: Phase
    seed: int
    train_seconds_limit: float
    limit_state: TrialState = TrialState.EXHAUSTED
    eval_every_steps: int = 1
    threads: int = 1
    uncapped: bool = False
    stop_at_target: bool = True
    retry_of: int | None = None
    queued: int | None = None
    resumed: int | None = None
    expected_improvement: float | None = None
    after: int | None = None

    @property
    def known_number(self) -> int | None:
        """Return the number of the trial where it is stored already, None for a new one."""
        return self.resumed if self.resumed is not None else self.queued

    @property
    def is_new_search(self) -> bool:
        """Return whether the trial is a new one of the search, not a stored one that is queued, resumed or retried."""
        is_stored = self.known_number is not None or self.retry_of is not None
        return self.phase in {Phase.SEARCH, Phase.GROWTH} and not is_stored

    def request(self, number: int, target: Target, *, checkpoint: str | None) -> TrialRequest:
        """Return what a worker is asked to do; ``checkpoint`` is the file to save the trial to when it is paused."""
        return TrialRequest(
            number=number,
            configuration=self.configuration,
            seed=self.seed,
            target=target,
            train_seconds_limit=self.train_seconds_limit,
            stop_at_target=self.stop_at_target,
            limit_state=self.limit_state,
            eval_every_steps=self.eval_every_steps,
            evaluate_test=self.phase is not Phase.SEARCH,
            threads=self.threads,
            checkpoint=checkpoint,
            resumes=self.resumed is not None,
        )


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

    With an ``error`` its seconds are those of several visits, see `bssearch.step_times`; None: of one measurement.
    """

    eval_every_steps: int | None
    error: StepTimeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One stored trial. ``outcome`` is None until it has finished.

    ``sampled`` is what the sampler chose, in the space's own coordinates (None for a configuration that lies outside
    the space); with ``uncapped`` no other trial's time ends it earlier; ``steps_x_step_time_s`` is steps-to-target
    times the step time measured in isolation, by all visits until it was read. ``started_by`` is the user whose driver
    started it, ``spec_digest`` that of the spec by which it was started (`spec_digest`); None where nobody has said.
    """

    number: int
    state: TrialState
    phase: Phase
    uncapped: bool
    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    seed: int
    train_seconds_limit: float
    eval_every_steps: int
    threads: int
    retry_of: int | None
    lease_owner: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    ended_at: datetime | None
    steps_x_step_time_s: float | None
    outcome: TrialOutcome | None
    expected_improvement: float | None = None
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
            **{name: getattr(plan, name) for name in PLANNED},
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


PLANNED = tuple(sorted({one.name for one in fields(TrialPlan)} & {one.name for one in fields(TrialRecord)}))
"""The fields that a stored trial takes over from its plan."""
