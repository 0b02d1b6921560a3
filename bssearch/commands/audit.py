"""Run and judge the configurations of rules of thumb."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from bssearch.analysis.answer import Answer
from bssearch.analysis.rules.audit import (
    FULL_LIMIT_PHASES,
    Audit,
    Case,
    audit,
    cases,
    is_result,
    spent_train_seconds,
    tuned_optima,
)
from bssearch.commands.launch import HERE, Launch
from bssearch.commands.opening import GivenSpec, OpenStudy, loaded, opened
from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Phase, TrialPlan, TrialRecord, TrialState
from bssearch.search.calibration import COMPARING_VISITS, default_at
from bssearch.search.confirmation import CompletedRuns, repeat
from bssearch.search.finding import answer
from bssearch.search.history import History, trial_seed
from bssearch.spec import StudySpec
from bssearch.spec.reader import spec_of
from bssearch.storage.repository import Store, open_store
from bssearch.training.course import probe_record

FULL_TRIALS = 20  # default budget in trials of full length, about that of a small search

# Micro-batches per batch for timing accumulation: the first number that divides the batch.
MICRO_BATCHES = (4, 3, 2)

STEP_SECONDS = 2.0  # the most seconds of steps timed at one batch size


def audit_stored(
    store: Store,
    study: str,
    *,
    runs: int | None = None,
    train_seconds: float | None = None,
    train_samples: int | None = None,
) -> Audit:
    """Judge the rules from stored runs."""
    found = answer(store, study)
    return audit(
        spec_of(store.studies.get(study)),
        store.trials.of(study),
        found,
        store.probes.step_times(study),
        store.probes.memory_boundary(study),
        runs=runs,
        train_seconds=train_seconds,
        train_samples=train_samples,
    )


def audit_study(
    spec: GivenSpec,
    launch: Launch = HERE,
    *,
    runs: int | None = None,
    train_seconds: float | None = None,
    run: bool = True,
) -> Audit:
    """Run the rules' missing configurations and judge them; can be resumed.

    Args:
        runs: per configuration (default: confirmation runs).
        train_seconds: no run starts beyond it (default: `FULL_TRIALS` full trials).
        run: if False, judge stored runs only.

    Raises `UsageError` for runs < 1 or seconds < 0, else as `run_study`.

    Example: ``print(bssearch.audit_study("study.yaml").rules)``
    """
    if runs is not None and runs < 1:
        raise UsageError(f"runs = {runs} must be >= 1")
    if train_seconds is not None and not 0 <= train_seconds < math.inf:
        raise UsageError(f"train_seconds = {train_seconds:g} must be a finite number >= 0")
    spec, launch = loaded(spec, launch)
    if not run or spec.is_imported:
        with open_store(launch.db, write=False) as store:
            return audit_stored(store, spec.name, runs=runs)
    budget = FULL_TRIALS * spec.budget.trial_train_seconds if train_seconds is None else train_seconds
    with opened(spec, launch, keeps_name=True, reports=True) as study:
        answer(study.store, spec.name)
        known = cache(lambda: _cases_of(study.store, spec))
        study.listener.note(f"auditing with {runs or spec.confirm.runs} runs each, {budget:g} train seconds in all")
        study.driver().run_planned(next_audit_run(known, runs or spec.confirm.runs, budget), Phase.AUDIT)
        time_accumulation(study, answer(study.store, spec.name))
        return audit_stored(
            study.store,
            spec.name,
            runs=runs,
            train_seconds=budget,
            train_samples=study.executor.describe().train_samples,
        )


def _cases_of(store: Store, spec: StudySpec) -> list[Case]:
    trials, step_times = store.trials.of(spec.name), store.probes.step_times(spec.name)
    memory = store.probes.memory_boundary(spec.name)
    return cases(spec, trials, answer(store, spec.name), tuned_optima(spec, trials, step_times, memory))


def next_audit_run(
    found: Callable[[], Sequence[Case]], runs: int, train_seconds: float
) -> Callable[[History], TrialPlan | None]:
    """Planner of missing runs within a budget.

    ``found`` is called at the first run: confirmation may have changed the cases.
    """

    def job(history: History) -> TrialPlan | None:
        if spent_train_seconds(history.all_trials) >= train_seconds:
            return None
        return next(missing_audit_runs(history, found(), runs), None)

    return job


def missing_audit_runs(history: History, found: Sequence[Case], runs: int) -> Iterator[TrialPlan]:
    """Yield missing runs by configuration, so that a short budget settles the first.

    Failed, lost and cancelled runs are repeated, and misses of a limit since raised.
    """
    made = CompletedRuns.of(history, [trial for trial in history.all_trials if _counts(history.spec, trial)])
    for case in found:
        is_feasible = case.batch_size in history.feasible
        if case.configuration is None or case.tuned is None or case.is_tuned or not is_feasible:
            continue
        for seed in seeds_of(history.spec, case, runs):
            for configuration in (case.tuned.configuration, case.configuration):
                split = history.as_run(configuration)
                if made.is_missing(split, seed):
                    yield repeat(history, split, seed, Phase.AUDIT, retry_of=made.retried(split, seed))


def seeds_of(spec: StudySpec, case: Case, runs: int) -> list[int]:
    """A case's seeds: the tuned optimum's, then further ones."""
    had = [] if case.tuned is None else [run.seed for run in case.tuned.runs]
    further = (trial_seed(spec.seed, Phase.CONFIRM, index) for index in range(len(had) + runs))
    return list(dict.fromkeys([*had, *further]))[:runs]


def time_accumulation(study: OpenStudy, found: Answer) -> None:
    """Time the optimum's and the largest batch size in micro-batches, in `COMPARING_VISITS`.

    Only sizes that also ran whole. Stops if the user's code refuses micro-batches.
    """
    spec = study.spec
    known = study.store.probes.by_batch_size(spec.name, study.environment)
    whole = [size for size, probe in known.items() if probe.micro_batch_size == size]
    sizes = sorted({found.optimal.batch_size, max(whole, default=0)} & set(whole))
    counts = {size: next((count for count in MICRO_BATCHES if size % count == 0), None) for size in sizes}
    splits = [(size, size // count) for size, count in counts.items() if count is not None]
    visited = Counter((one.batch_size, one.micro_batch_size) for one in study.store.probes.visits(spec.name))
    for had in range(COMPARING_VISITS):
        visit: int | None = None
        for size, micro in splits:
            if visited[size, micro] > had:
                continue
            try:
                measured = study.executor.measure_step_time(default_at(spec, size, micro, STEP_SECONDS))
            except WorkloadError as error:  # a script may not support micro-batches
                study.listener.note(f"the cost of accumulation is not timed: {error}")
                return
            if measured.out_of_memory:
                continue
            probe = probe_record(measured, spec.budget.trial_train_seconds)
            # Trials at a batch size keep one evaluation cadence, whatever their micro-batches.
            probe = replace(probe, eval_every_steps=known[size].eval_every_steps)
            visit = study.store.probes.add_step_time(spec.name, study.environment, probe, visit)


def _counts(spec: StudySpec, trial: TrialRecord) -> bool:
    if trial.phase not in {Phase.CONFIRM, *FULL_LIMIT_PHASES}:
        return False
    is_open = not trial.state.is_finished or trial.state.is_missing or trial.state is TrialState.OOM
    return is_open or is_result(spec, trial)
