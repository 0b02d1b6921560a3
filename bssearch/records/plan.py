"""A trial to run: what the engine decides, the store starts and an executor runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bssearch.records.question import Configuration, ParameterValue, Phase, Target, TrialState
from bssearch.records.requests import TrialRequest


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
