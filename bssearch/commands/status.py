"""``status``: how far a study is."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from bssearch.analysis.objectives.seconds import seconds_to_target
from bssearch.analysis.optimum import fastest
from bssearch.records import Phase, TrialState
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The trial that reached the target soonest."""

    trial: int
    batch_size: int
    time_to_target_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's budget of search trials and how many are spent, its running trials, and its trials by phase and state.

    ``train_seconds`` are those of all ended trials. Of an imported study all runs count as search trials.
    """

    study: str
    is_imported: bool
    budget_trials: int
    spent_trials: int
    running: tuple[int, ...]
    train_seconds: float
    fastest: Fastest | None
    trials: dict[str, dict[str, int]]

    def document(self) -> dict[str, Any]:
        """Return the contract of ``status --format json``."""
        best = self.fastest
        return {
            "study": self.study,
            "budget_trials": self.budget_trials,
            "spent_trials": self.spent_trials,
            "running": list(self.running),
            "train_seconds": self.train_seconds,
            "fastest": None
            if best is None
            else {"trial": best.trial, "batch_size": best.batch_size, "time_to_target_s": best.time_to_target_s},
            "trials": self.trials,
        }


def status(store: Store, study: str) -> Status:
    """Return how far a stored study is. Raises `NotFoundError`."""
    spec = StudySpec.model_validate(store.study(study).spec)
    trials = store.trials(study)
    searched = [trial for trial in trials if spec.is_imported or trial.phase is Phase.SEARCH]
    best = fastest(searched)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        counts[trial.phase.value][trial.state.value] += 1
    return Status(
        study=study,
        is_imported=spec.is_imported,
        budget_trials=spec.budget.trials,
        spent_trials=sum(not trial.state.is_missing for trial in searched),
        running=tuple(trial.number for trial in trials if trial.state is TrialState.RUNNING),
        train_seconds=sum(trial.outcome.train_seconds for trial in trials if trial.outcome),
        fastest=None
        if best is None
        else Fastest(
            trial=best.number,
            batch_size=best.configuration.batch_size,
            time_to_target_s=seconds_to_target(best),
        ),
        trials={phase: dict(by_state) for phase, by_state in counts.items()},
    )
