"""What the end of a trial shows besides its figure: an error that ends the run, and lines for whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bssearch.analysis.confirmation_runs import says_something
from bssearch.errors import BSSearchError, LaunchError
from bssearch.history import FAILURES, History
from bssearch.records import COULD_NOT_PAUSE, TrialRecord, TrialState
from bssearch.search import confirmation
from bssearch.spec import StudySpec

FAILURES_IN_A_ROW = 5
"""Trials that fail one after the other, with none that ran, before a run gives up. A choice."""


class Refusals:
    """Finds the error with which a run ends after a trial: it counts the failures of one driver's trials."""

    def __init__(self, spec: StudySpec, device_name: str) -> None:
        self._spec = spec
        self._device_name = device_name
        self._failures = 0
        self._any_ran = False

    def of(self, trial: TrialRecord, history: History) -> BSSearchError | None:
        """Return the error after a trial that ended here; None where the run goes on."""
        unmeasured = _error_of(lambda: history.objective.check_measured(trial, self._device_name))
        return met_at_once(trial, history) or unmeasured or self._too_many_failures(trial)

    def _too_many_failures(self, trial: TrialRecord) -> BSSearchError | None:
        """Give up where nothing works: after a few failures without a success, after many even so."""
        if trial.state is TrialState.LOST:
            return None
        self._failures = self._failures + 1 if trial.state is TrialState.FAILED else 0
        self._any_ran |= trial.state is not TrialState.FAILED
        allowed = FAILURES * len(self._spec.batch_sizes) if self._any_ran else FAILURES_IN_A_ROW
        if self._failures < allowed:
            return None
        reason = "" if trial.outcome is None else trial.outcome.reason
        return LaunchError(
            f"{self._failures} trials in a row failed, the last one ({trial.number}) with: {reason}",
            hint=f"bssearch trial show {self._spec.name} {trial.number} shows the traceback",
        )


def met_at_once(trial: TrialRecord, history: History) -> BSSearchError | None:
    """Return the error for a target that takes no training."""
    return _error_of(lambda: history.objective.check_target(trial))


def could_not_pause(trial: TrialRecord) -> bool:
    """Return whether a trial was to be paused and could not be saved."""
    return trial.state is TrialState.PRUNED and trial.outcome is not None and COULD_NOT_PAUSE in trial.outcome.reason


def lines_about(trial: TrialRecord, history: History) -> Iterator[str]:
    """Yield what is worth a line of a trial that ended: the default's miss, and a confirmation that is in vain."""
    yield from filter(None, (_default_missed(trial, history), confirmation.miss_of(history, trial)))


def _default_missed(trial: TrialRecord, history: History) -> str | None:
    """Return that the default configuration ended without the target, None for what did not."""
    spec, outcome = history.spec, trial.outcome
    is_default = trial.configuration.trains_like(spec.default_configuration)
    has_missed = trial.state is not TrialState.REACHED and says_something(trial)
    if not (is_default and has_missed and history.objective.stops_at_target) or outcome is None:
        return None
    target, best = spec.record_target, outcome.best_metric
    came = "" if best is None else f", its best {target.metric} {best:.4g}"
    advice = "" if history.incumbent is not None else ": `bssearch check --suggest-target` says what it can reach"
    return (
        f"the default configuration (batch {trial.configuration.batch_size}) missed {target.metric} {target.goal.sign} "
        f"{target.value:g} in trial {trial.number}{came} after {outcome.train_seconds:.3g} of at most "
        f"{spec.budget.trial_train_seconds:g} train seconds{advice}"
    )


def _error_of(check: Callable[[], None]) -> BSSearchError | None:
    try:
        check()
    except BSSearchError as error:
        return error
    return None
