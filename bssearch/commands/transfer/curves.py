"""``export``: a study's learning curves as a table."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path

from bssearch.analysis.shape import parameters_of
from bssearch.commands.report import observations_of
from bssearch.commands.transfer.exported import Exported
from bssearch.errors import UsageError
from bssearch.recorded import RecordedTable, RecordedTrial, write_table
from bssearch.records import Observation, Phase, TrialRecord, TrialState
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store


def export_curves(store: Store, name: str, file: str | None = None) -> Exported:
    """Write the learning curves of a study's search trials as a table, ``NAME.csv.gz`` where no file is given.

    A description that ends in .json is written beside it. Raises as `recorded_table` does.
    """
    table = recorded_table(store, name)
    early = stopped_early(store, name)
    written = [str(path) for path in write_table(table, Path(file or f"{name}.csv.gz"))]
    note = (
        f"note: the study's own pruner stopped {early} of {len(table.trials)} trials, whose curves end there: to "
        "compare pruners without that, run a study with --set pruner.name=none"
    )
    return Exported(written, [note] if early else [])


def recorded_table(store: Store, name: str) -> RecordedTable:
    """Return the finished search trials of a study with their curves; those without a curve are left out.

    What stopped a trial early is not in its curve: replayed, it ends there. Raises `NotFoundError`, and `UsageError`
    where no trial has a curve.
    """
    study = store.study(name)
    spec = spec_of(study)
    finished = {trial.number: trial for trial in search_trials(store, name)}
    observations = observations_of(store, name, list(finished.values()))
    recorded = [
        _recorded(finished[number], [observation for _, observation in group])
        for number, group in groupby(observations, key=itemgetter(0))
    ]
    if not recorded and spec.is_imported:
        raise UsageError(f"study {name!r} has no learning curves: its runs were imported, without evaluations")
    if not recorded:
        raise UsageError(
            f"study {name!r} has no learning curves: none of its {len(finished)} finished trials stored an evaluation"
        )
    return RecordedTable(name, study.target, spec.budget.trial_train_seconds, tuple(recorded))


def search_trials(store: Store, name: str) -> list[TrialRecord]:
    """Return the finished search trials of a study: repeats of a configuration are no trials of a search."""
    return [trial for trial in store.trials(name) if trial.phase is Phase.SEARCH and trial.state.is_finished]


def stopped_early(store: Store, name: str) -> int:
    """Return the number of search trials that the study's own pruner stopped; replayed, they end there."""
    stopped = {TrialState.CAPPED, TrialState.PAUSED, TrialState.PRUNED}
    return sum(trial.state in stopped for trial in search_trials(store, name))


def _recorded(trial: TrialRecord, curve: list[Observation]) -> RecordedTrial:
    sizes = {"batch_size": trial.configuration.batch_size, "micro_batch_size": trial.configuration.micro_batch_size}
    return RecordedTrial(
        number=trial.number,
        parameters={**sizes, **parameters_of(trial.configuration)},
        seed=trial.seed,
        steps=tuple(one.step for one in curve),
        train_seconds=tuple(one.train_seconds for one in curve),
        metrics=tuple(one.metric for one in curve),
    )
