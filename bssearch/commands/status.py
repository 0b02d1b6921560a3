"""How far a study is: its trials by phase and state, its budget and its fastest trial."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bssearch.analysis.objectives import Basis, fastest, seconds_to_target, trial_basis
from bssearch.records import Phase, TrialRecord, TrialState, train_seconds_of
from bssearch.search.stored_finding import stored_end
from bssearch.spec import StudySpec
from bssearch.spec.reader import spec_of
from bssearch.storage.repository import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest trial, by measured seconds, or steps × step time if contended."""

    trial: int
    batch_size: int
    time_to_target_s: float | None
    basis: Basis = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's spent budget, running trials, and trials by phase and state.

    Imported runs count as search trials.
    """

    study: str
    is_imported: bool
    budget_trials: int
    spent_trials: int
    running: tuple[int, ...]
    train_seconds: float  # of all ended trials
    fastest: Fastest | None
    trials: dict[str, dict[str, int]]
    search_ended: str | None = None  # the reason

    def document(self) -> dict[str, Any]:
        """Contract of ``status --format json``."""
        return {
            "study": self.study,
            "budget_trials": self.budget_trials,
            "spent_trials": self.spent_trials,
            "running": list(self.running),
            "search_ended": self.search_ended,
            "train_seconds": self.train_seconds,
            "fastest": self.fastest and asdict(self.fastest),
            "trials": self.trials,
        }


def status(store: Store, study: str, trials: Sequence[TrialRecord] | None = None) -> Status:
    """A study's progress; ``trials``, if given, are all of its trials."""
    spec = spec_of(store.studies.get(study))
    trials = store.trials.of(study) if trials is None else trials
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
        train_seconds=train_seconds_of(trials),
        fastest=None
        if best is None
        else Fastest(
            trial=best.number,
            batch_size=best.configuration.batch_size,
            time_to_target_s=seconds_to_target(best),
            basis=trial_basis(best),
        ),
        search_ended=None if spec.is_imported else _search_ended(store, spec, searched),
        trials={phase: dict(by_state) for phase, by_state in counts.items()},
    )


def _search_ended(store: Store, spec: StudySpec, searched: Sequence[TrialRecord]) -> str | None:
    if any(not trial.state.is_finished for trial in searched):
        return None
    end = stored_end(store, spec.name)
    spent = sum(not trial.state.is_missing for trial in searched)
    return end.reason if end is not None and (end.spent, end.budget) == (spent, spec.budget) else None
