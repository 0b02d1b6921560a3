"""Confirmation: the finalists again with fresh seeds, interleaved, one at a time. Only these runs give the verdict.

The best of many single-seed trials is partly luck, so the search's own figures are not quoted as the answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.records import Configuration, Phase, TrialRecord, TrialState
from bssearch.search.history import History, seconds
from bssearch.search.seeds import trial_seed

CONFIGURATIONS_PER_BATCH = 2
FAILURES_ALLOWED = 1


@dataclass(frozen=True, slots=True)
class ConfirmationRun:
    """One run still to be made: a finalist with one of the fresh seeds, ``retry_of`` a run that came to nothing."""

    configuration: Configuration
    seed: int
    retry_of: int | None = None


def finalists(history: History) -> list[Configuration]:
    """Return the configurations to confirm, each once, in the micro-batches that its batch size runs in.

    The two best of each of the ``confirm.top`` best batch sizes, the default and the best known of its batch size, and
    the best known of the largest batch size that runs without accumulation (the one that came nearest where none
    reached the target).
    """
    reached = [(seconds(best), size) for size in history.feasible if (best := history.best_at(size))]
    if not reached:
        return []
    chosen = []
    for _, size in sorted(reached)[: history.spec.confirm.top]:
        ranked = sorted((trial for trial in history.at(size) if trial.state is TrialState.REACHED), key=seconds)
        unlike = {run.key: run for run in (history.as_run(trial.configuration) for trial in ranked)}
        chosen += list(unlike.values())[:CONFIGURATIONS_PER_BATCH]
    if history.spec.default.batch_size in history.feasible:
        chosen.append(history.spec.default_configuration)
        if (tuned := history.best_at(history.spec.default.batch_size)) is not None:
            chosen.append(tuned.configuration)
    if history.largest is not None and (nearest := _nearest_at(history, history.largest)):
        chosen.append(nearest.configuration)
    runs = [history.as_run(configuration) for configuration in chosen]
    return list({configuration.key: configuration for configuration in runs}.values())


def remaining(history: History, trials: Sequence[TrialRecord]) -> list[ConfirmationRun]:
    """Return the runs still missing after the confirmation trials so far.

    Seed by seed over all finalists, each round in its own shuffled order. A configuration whose confirmation has begun
    stays one, though a larger budget has found better: the verdict needs all of them to have had their runs. Lost and
    cancelled runs are made again; a failed one once more. Where memory ran out, all runs of a batch size are made again
    in smaller micro-batches.
    """
    done: dict[tuple[str, int], int] = {}
    in_vain: dict[tuple[str, int], int] = {}
    begun: dict[str, Configuration] = {}
    for trial in trials:
        if trial.configuration.batch_size not in history.probes:
            continue
        run = history.as_run(trial.configuration)
        begun[run.key] = run
        key = (run.key, trial.seed)
        if trial.state.is_missing or trial.state is TrialState.OOM:
            in_vain[key] = trial.number
        if trial.configuration != run:
            continue
        if trial.state not in {TrialState.LOST, TrialState.CANCELLED}:
            weight = 1 if trial.state is TrialState.FAILED else FAILURES_ALLOWED + 1
            done[key] = done.get(key, 0) + weight
    chosen = list(({one.key: one for one in finalists(history)} | begun).values())
    runs = []
    for index in range(history.spec.confirm.runs):
        seed = trial_seed(history.spec.seed, Phase.CONFIRM, index)
        for configuration in random.Random(seed).sample(chosen, len(chosen)):
            key = (configuration.key, seed)
            if done.get(key, 0) <= FAILURES_ALLOWED:
                runs.append(ConfirmationRun(configuration, seed, in_vain.get(key)))
    return runs


def _nearest_at(history: History, batch_size: int) -> TrialRecord | None:
    """Return the trial at a batch size that reached the target first, else the one with the best metric."""
    best = history.best_at(batch_size)
    if best is not None:
        return best
    shortfall = history.spec.record_target.shortfall
    measured = [
        (shortfall(trial.outcome.best_metric), trial.number, trial)
        for trial in history.at(batch_size)
        if trial.outcome is not None and trial.outcome.best_metric is not None
    ]
    return min(measured)[2] if measured else None
