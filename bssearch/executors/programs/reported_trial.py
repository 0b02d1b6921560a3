"""A trial built from a program's reports."""

from __future__ import annotations

import time
from collections.abc import Callable

from bssearch.errors import UsageError
from bssearch.executors.programs.reports import LOSS, Report
from bssearch.records import (
    COULD_NOT_PAUSE,
    Observation,
    SecondsBasis,
    TrialOutcome,
    TrialRequest,
    TrialState,
    is_metric,
)
from bssearch.training.course import Course, Ending, not_finite, where

MOST_OBSERVATIONS = 100_000  # evaluations of a trial, all stored

FEWEST_BURSTS = 4  # reports come in bursts if, of more than 2 x 4, one wait exceeds 1/4 of their total time


class ReportedTrial:
    """Collects a program's reports; ``ending`` is None while the trial runs.

    Uses the program's own training seconds, else the wall clock from the first reported step, with earlier steps at the
    pace of later ones.
    """

    def __init__(self, request: TrialRequest, on_observation: Callable[[Observation], None], started: float) -> None:
        self.ending: Ending | None = None
        self.steps = 0
        self._request, self._plan = request, request.plan
        self._on_observation = on_observation
        self._course = Course(request, None)
        self._started = started
        self._ended = started
        self._basis: SecondsBasis | None = None
        self._first: tuple[Report, float] | None = None
        self._waiting: Report | None = None
        self._zero = 0.0
        self._seconds = 0.0
        self._observations = 0
        self._reports = 0
        self._last_came = started
        self._longest_wait = 0.0

    def take(self, report: Report, now: float) -> None:
        """Add a report received at ``now``.

        Raises `UsageError` if steps or seconds decrease, seconds come only sometimes, or there are more than
        `MOST_OBSERVATIONS`.
        """
        if self.ending is not None:
            return
        self._check(report)
        if self._first is not None:
            self._longest_wait = max(self._longest_wait, now - self._last_came)
        self._reports, self._last_came = self._reports + 1, now
        if self._first is None:
            self._first = report, now
            self._basis = SecondsBasis.WALL if report.seconds is None else SecondsBasis.REPORTED
            self._zero = now
            if self._basis is SecondsBasis.WALL and report.step > 0:
                self._waiting = report  # until the pace of its steps is known
                self.steps = report.step
                return
        elif self._waiting is not None:
            first, began = self._first
            self._zero = began - first.step * (now - began) / (report.step - first.step)
            waiting, self._waiting = self._waiting, None
            self._observe(waiting, began - self._zero)
        if self.ending is None:
            self._observe(report, now - self._zero if report.seconds is None else report.seconds)

    def look(self, asked: tuple[TrialState, str] | None, now: float) -> None:
        """End the trial if asked to or late."""
        if self.ending is not None:
            return
        if asked is not None:
            state, reason = asked
            if state is TrialState.PAUSED:
                state, reason = TrialState.PRUNED, f"{reason}; {COULD_NOT_PAUSE}: a command keeps its state to itself"
            self._end(Ending(state, reason, asked=True))
        elif self._basis is SecondsBasis.WALL:
            self._end(self._course.limited(now - self._zero))

    def left(self, code: int) -> None:
        """End the trial of a program that exited well."""
        self._observe_waiting()
        if self.ending is None and code == 0:
            if self._course.progress.last is None:
                raise UsageError("the command ended without a report of the target's metric")
            self._end(Ending(TrialState.EXHAUSTED, f"the command ended at step {self.steps}"))

    def failed(self, state: TrialState, reason: str) -> TrialOutcome:
        """A failed program's outcome, with its observations."""
        self._observe_waiting()
        self.ending, self._ended = Ending(state, reason, asked=True), time.monotonic()
        return self.outcome()

    def outcome(self) -> TrialOutcome:
        """The ended trial's outcome."""
        assert self.ending is not None, "a trial that has ended has an ending"
        progress, wall = self._course.progress, self._ended - self._started
        outcome = TrialOutcome(
            state=self.ending.state,
            reason=self.ending.reason,
            steps=self.steps,
            samples=self.steps * self._plan.configuration.batch_size,
            train_seconds=self._seconds,
            other_seconds=max(0.0, wall - self._seconds),
            wall_seconds=wall,
            seconds_basis=self._basis,
            final_metric=None if progress.last is None else progress.last.metric,
            best_metric=progress.best,
            warnings=self._warnings(),
        )
        return self._course.with_target(outcome)

    def _warnings(self) -> tuple[str, ...]:
        if self._basis is not SecondsBasis.WALL or self._first is None or self._reports <= 2 * FEWEST_BURSTS:
            return ()
        if self._longest_wait <= (self._last_came - self._first[1]) / FEWEST_BURSTS:
            return ()
        return (
            f"the command's reports came in bursts, up to {self._longest_wait:.3g} s apart, and the wall clock is as "
            "coarse: it must flush each line, or report its own seconds",
        )

    def _check(self, report: Report) -> None:
        if report.seconds == 0 and report.step > 0:
            raise UsageError(f"the command reports 0 seconds of training after {report.step} steps")
        if self._first is None:
            return
        if report.step <= self.steps:
            raise UsageError(f"the command reports step {report.step} after step {self.steps}: steps must rise")
        if (report.seconds is None) != (self._basis is SecondsBasis.WALL):
            raise UsageError(f"the command reports seconds at times: at step {report.step} otherwise than before")
        if report.seconds is not None and report.seconds < self._seconds:
            raise UsageError(f"the command reports {report.seconds:g} seconds after {self._seconds:g}: they must rise")

    def _observe(self, report: Report, seconds: float) -> None:
        self.steps, self._seconds = report.step, seconds
        target, configuration = self._request.target, self._plan.configuration
        loss = report.values.get(LOSS)
        metric = report.values.get(target.metric)
        for name, value in ((target.metric, metric), ("the loss", loss)):
            if value is not None and not is_metric(value):
                self._end(Ending(TrialState.DIVERGED, f"{not_finite(name, value)}: {where(configuration, self.steps)}"))
                return
        if metric is not None:
            self._observations += 1
            if self._observations > MOST_OBSERVATIONS:
                raise UsageError(
                    f"the command reports {target.metric} more than {MOST_OBSERVATIONS} times in a trial",
                    hint="report it less often: {evaluate_every} has the steps between two evaluations",
                )
            observation = Observation(
                step=report.step,
                samples=report.step * configuration.batch_size,
                train_seconds=seconds,
                metric=metric,
                loss=loss,
                learning_rate=configuration.learning_rate,
            )
            ending = self._course.observe(observation)
            self._on_observation(observation)
            self._end(ending)
        self._end(self._course.limited(seconds))

    def _observe_waiting(self) -> None:
        """Time a single report from the program's start."""
        if self._waiting is not None and self._first is not None:
            waiting, self._waiting = self._waiting, None
            self._observe(waiting, self._first[1] - self._started)

    def _end(self, ending: Ending | None) -> None:
        if ending is None or self.ending is not None:
            return
        self._observe_waiting()
        if self.ending is None:
            self.ending = self._course.reached_before(ending)
            self._ended = time.monotonic()
