"""What a driver stores of its trials: their evaluations, written together, their ends, and the answer."""

from __future__ import annotations

import time

from bssearch.errors import DatabaseError
from bssearch.records import Observation, TrialEnded, TrialObserved, TrialOutcome, TrialRecord, TrialState
from bssearch.search.finding import SearchEnd, save_finding
from bssearch.storage.repository import Store

FLUSH_SECONDS = 1.0
"""How long observations wait to be written together: the most that a crash loses. A choice."""

FINDING_SHARE = 0.02
"""The answer is made anew when a trial ends, unless that would take more than this share of the time. A choice.

The share is that of all drivers of the study together: they read one database.
"""

FINDING_SECONDS = 0.02
"""How long making the answer is taken to last before this driver has made it. A choice."""


class Recorder:
    """Writes what one driver has to say about the trials of a study; what it keeps is only what is not yet written."""

    def __init__(self, store: Store, study: str) -> None:
        self._store, self._study = store, study
        self._unwritten: list[TrialObserved] = []
        self._flushed = self._next_finding = time.monotonic()
        self._finding_seconds = FINDING_SECONDS

    def observe(self, observed: TrialObserved) -> None:
        """Take in an evaluation; it is written with others."""
        self._unwritten.append(observed)

    def flush(self) -> None:
        """Write all evaluations now."""
        if self._unwritten:
            self._store.append_observations(self._study, [(one.number, one.observation) for one in self._unwritten])
            self._unwritten = []
        self._flushed = time.monotonic()

    def flush_if_due(self) -> None:
        """Write all evaluations where they have waited for long enough."""
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def finish(self, ended: TrialEnded, step_seconds: float | None) -> TrialRecord:
        """Store how a trial ended; return it as it is stored: lost, where another driver has taken it over.

        ``step_seconds`` is the isolated step time of its batch size, where that is known.
        """
        number, outcome, product = ended.number, ended.outcome, None
        if outcome.steps_to_target is not None and step_seconds is not None:
            product = outcome.steps_to_target * step_seconds
        if ended.log.strip():
            self._store.save_log(self._study, number, ended.log)
        try:
            return self._store.finish_trial(self._study, number, outcome, steps_x_step_time_s=product)
        except DatabaseError:
            trial = self._store.trial(self._study, number)
            if trial.state is not TrialState.LOST:
                raise
            return trial

    def cancel(self, number: int, last: Observation | None) -> None:
        """Store that the run ended before a trial did, whose newest evaluation was ``last``."""
        self.flush()
        outcome = TrialOutcome(
            state=TrialState.CANCELLED,
            reason="the run ended before the trial did",
            steps=last.step if last else 0,
            samples=last.samples if last else 0,
            train_seconds=last.train_seconds if last else 0.0,
            final_metric=last.metric if last else None,
        )
        self._store.finish_trial(self._study, number, outcome, steps_x_step_time_s=None)

    def keep_finding(self) -> None:
        """Store the answer as it is now, for those who ask; not where any driver of the study just has."""
        started = time.monotonic()
        if started < self._next_finding:
            return
        apart = self._finding_seconds / FINDING_SHARE
        left = apart - self._store.seconds_since_finding(self._study)
        if 0 < left <= apart:  # longer only where a clock was set
            self._next_finding = started + left
            return
        save_finding(self._store, self._study)
        ended = time.monotonic()
        self._finding_seconds = ended - started
        self._next_finding = ended + self._finding_seconds / FINDING_SHARE

    def keep_last_finding(self, end: SearchEnd | None = None) -> None:
        """Store the answer as it is now, whatever that takes, and how the search ended where it did just now."""
        save_finding(self._store, self._study, end)
