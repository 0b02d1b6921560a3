"""Run, resume, confirm and audit a study."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from pydantic import ValidationError

from bssearch.analysis.missing_runs import missing_runs
from bssearch.analysis.objectives import objective_of
from bssearch.analysis.rules.audit import (
    FULL_LIMIT_PHASES,
    Audit,
    Case,
    audit,
    by_cost,
    cases,
    is_result,
    of_case,
    run_seconds,
    runs_of,
    runs_to_decide,
    spent_train_seconds,
    tuned_optima,
)
from bssearch.commands.best import Answer
from bssearch.commands.launch import HERE, QUICK_SECONDS, Launch
from bssearch.commands.opening import GivenSpec, OpenStudy, loaded, opened
from bssearch.commands.trials import configuration_of, enqueue
from bssearch.errors import UsageError, WorkloadError, problem_in_words, require, with_hint
from bssearch.records import Configuration, Phase, TrialPlan, TrialRecord, TrialState, step_seconds_of
from bssearch.records.text import plural
from bssearch.search import after_search, confirmation as confirm
from bssearch.search.calibration import COMPARING_VISITS, default_at, untimed_on_devices
from bssearch.search.confirmation import CompletedRuns, repeat
from bssearch.search.finding import answer, quick_prior, scratch_answers, stored_quick
from bssearch.search.history import History, trial_seed
from bssearch.search.stored_finding import stored_end
from bssearch.spec import ConfirmSpec, StudySpec, spec_of
from bssearch.storage.repository import Store, open_store
from bssearch.training.course import probe_record


def run_study(
    spec: GivenSpec, launch: Launch = HERE, *, from_quick: bool = False, from_study: str | None = None
) -> Answer:
    """Run or resume a study and return the answer.

    Several processes and machines may run one study. If the spec has ``scales``, the answer concerns the largest
    scale. ``from_quick`` starts the search from a quick answer, and makes a missing quick answer first. A new study
    starts with ``from_study``'s best configuration and the runs that its answer lacks.

    Raises any `BSSearchError`, such as `TargetNotReachedError` if no trial reached the target.

    ::

        answer = bssearch.run_study("digits")  # a shipped study, a file, a dict or a StudySpec
        print(answer.optimal.batch_size)
    """
    spec, launch = loaded(spec, launch)
    require(
        not from_quick or objective_of(spec).trials_race,
        f"objective = {spec.objective!r} has no quick answer, because a quick answer minimises the seconds to a target",
        hint="run the study without --from-quick",
    )
    *smaller, spec = spec.at_scales
    for one in smaller:
        run_study(one, launch, from_quick=from_quick, from_study=from_study)
    with opened(spec, launch, reports=True) as study:
        if from_study is not None:
            begin_with(study, from_study)
        if from_quick and (stored_quick(study.store, spec.name) or stored_end(study.store, spec.name)) is None:
            from bssearch.commands.quick import QuickPlan, stored_quick_answer

            stored_quick_answer(study, QuickPlan(QUICK_SECONDS, time.monotonic()), spec.preset)
        if (prior := quick_prior(study.store, study.spec)) is not None:
            low, high = prior.interval
            found = f"batch {prior.optimal.batch_size} (90 % interval {low} to {high})"
            study.listener.note(f"the search starts from the quick answer: {found}")
        return run_opened(study)


def begin_with(study: OpenStudy, source: str) -> None:
    """Queue ``source``'s best configuration and the runs that its answer lacks, unless ``study`` has trials.

    Leaves out configurations outside the space.
    """
    store, spec = study.store, study.spec
    trials, found = store.trials.of(source), answer(store, source)
    if store.trials.of(spec.name):
        study.listener.note(f"study {spec.name} has trials already, so bssearch ignores --from {source}")
        return
    best = {name: value for name, value in found.optimal.parameters.items() if value is not None}
    own = {name: value for name, value in best.items() if name in spec.searched and name != "optimizer"}
    missing = missing_runs(trials, found.batches, found.optimal.batch_size, found.worse)
    wanted = [{**own, "batch_size": found.optimal.batch_size}, *({**own, **one.values} for one in missing)]
    queued: dict[str, Configuration] = {}
    for values in wanted:
        try:
            configuration = configuration_of(spec, values)
            if configuration.key not in queued:  # skip a repeat of the best configuration
                queued[configuration.key] = enqueue(store, spec.name, values)[1]
        except UsageError as error:
            study.listener.note(f"leaving out a run of study {source}: {error.message}")
    words = "; ".join(f"batch {one.batch_size}, learning rate {one.learning_rate:.3g}" for one in queued.values())
    study.listener.note(
        f"the first trials come from study {source}: {words}"
        if words
        else f"the space has no configuration of study {source}, so the search starts with the default"
    )


def run_opened(study: OpenStudy) -> Answer:
    study.driver().run()
    grow(study)
    add_devices(study)
    return answer(study.store, study.spec.name)


def add_devices(study: OpenStudy) -> None:
    """Time batch sizes on each later device count in ``executor.devices``, and run the sizes of the Pareto front."""
    further = study.spec.executor.devices[1:]
    if not further:
        return
    if untimed_on_devices(study.spec, study.store, study.environment):
        study.listener.note(f"timing steps on {', '.join(map(str, further))} devices")
        try:
            study.driver().time_on_devices()
        except WorkloadError as error:  # the answer for the search's devices remains valid
            study.listener.note(
                f"training on {', '.join(map(str, further))} devices fails, so the study leaves out these device "
                f"counts: {with_hint(error)}"
            )
            return
    before = -1
    while (made := _runs_on_devices(study)) != before:  # the last pass made runs
        rows = answer(study.store, study.spec.name).by_devices
        study.driver().run_planned(
            partial(after_search.next_run_on_devices, rows=rows, runs_before=made), Phase.DEVICES
        )
        before = made


def _runs_on_devices(study: OpenStudy) -> int:
    return sum(one.phase is Phase.DEVICES for one in study.store.trials.of(study.spec.name))


def grow(study: OpenStudy) -> None:
    """Search batch schedules if the spec or a trial has a schedule, and repeat the best schedules."""
    asked = any(trial.phase is Phase.GROWTH for trial in study.store.trials.of(study.spec.name))
    if study.spec.space.batch_schedule is None and not asked:
        return
    study.driver().run_planned(after_search.next_trial, Phase.GROWTH)
    study.driver().run_planned(after_search.next_repeat, Phase.AUDIT)
    if not any(trial.phase is Phase.GROWTH for trial in study.store.trials.of(study.spec.name)):
        budget = study.spec.budget
        remedy = (
            ", because no batch size is tuned, or no schedule changes the batch size within a trial's limit; raise "
            f"budget.trial_train_seconds = {budget.trial_train_seconds:g}, or run a new study with larger batch sizes"
            if budget.schedule_trials
            else "; set budget.schedule_trials > 0"
        )
        study.listener.note(f"space.batch_schedule led to no trial{remedy}")


def with_confirmation(
    spec: StudySpec, *, runs: int | None = None, max_runs: int | None = None, train_seconds: float | None = None
) -> StudySpec:
    """Change confirmation settings; None keeps a stored setting, but stored ``runs`` = 0 becomes the default.

    Raises `UsageError` for wrong values.
    """
    stored = spec.confirm
    if runs is None:
        runs = stored.runs or ConfirmSpec().runs
    require(
        runs >= stored.runs,
        f"--runs {runs} must be >= confirm.runs = {stored.runs} of the stored study {spec.name!r}",
    )
    if max_runs is None and stored.max_runs is not None:
        max_runs = max(runs, stored.max_runs)
    asked = {"runs": runs, "max_runs": max_runs, "train_seconds": train_seconds}
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        settings = ConfirmSpec.model_validate(stored.model_dump() | given)
    except ValidationError as error:
        problem = error.errors()[0]
        field = "".join(f".{name} = {problem['input']}" for name in problem["loc"])
        raise UsageError(f"confirm{field}: {problem_in_words(problem)}") from None
    return spec.model_copy(update={"confirm": settings})


def confirm_study(
    spec: GivenSpec, launch: Launch = HERE, *, spares: bool = True, to_budget_runs: int | None = None
) -> Answer:
    """Make the missing confirmation runs, and return the answer.

    ``spares`` = False repeats even finalists that are clearly slower or mostly miss the target. If given,
    ``to_budget_runs`` runs per finalist to the full time limit replace the confirmation runs. Raises the errors of
    `run_study`.

    Example: ``answer = bssearch.confirm_study("study.yaml", to_budget_runs=3)``
    """
    spec, launch = loaded(spec, launch)
    with opened(spec, launch, keeps_name=True, reports=True) as study:
        driver = study.driver()
        if to_budget_runs is None:
            driver.run_planned(partial(confirm.next_run, spares=spares), Phase.CONFIRM)
            if (ending := confirm.ending(study.history())) is not None:
                study.listener.note(ending)
        else:
            sizes = sorted({one.batch_size for one in after_search.finalists(study.history())})
            study.listener.note(
                f"making {plural(to_budget_runs, 'run')} at each batch size ({', '.join(map(str, sizes))}), each run "
                f"up to {spec.budget.trial_train_seconds:g} train seconds"
            )
            driver.run_planned(partial(after_search.next_run, runs=to_budget_runs), Phase.TO_BUDGET)
        return answer(study.store, spec.name)


FULL_TRIALS = 20  # default budget of an audit in full trials, about the budget of a small search

# Micro-batches per batch for timing accumulation: the first number that divides the batch.
MICRO_BATCHES = (4, 3, 2)

STEP_SECONDS = 2.0  # the most seconds of timing at a batch size


def audit_stored(
    store: Store,
    study: str,
    *,
    runs: int | None = None,
    train_seconds: float | None = None,
    train_samples: int | None = None,
) -> Audit:
    spec = spec_of(store.studies.get(study))
    return audit(
        spec,
        store.trials.of(study),
        answer(store, study),
        store.probes.step_times(study),
        store.probes.memory_boundary(study),
        runs=runs,
        train_seconds=train_seconds,
        train_samples=train_samples,
        scratch=scratch_answers(store, spec),
    )


def audit_study(
    spec: GivenSpec,
    launch: Launch = HERE,
    *,
    runs: int | None = None,
    train_seconds: float | None = None,
    run: bool = True,
) -> Audit:
    """Make the missing runs for the rules of thumb, cheapest first, and judge the rules.

    A second call resumes the audit.

    Args:
        runs: runs per configuration (default: ``confirm.runs``; up to ``confirm.max_runs`` while undecided).
        train_seconds: budget, after which no run starts (default: `FULL_TRIALS` full trials).
        run: if False, or if the study is imported, judge only stored runs.

    Raises `UsageError` for wrong ``runs`` or ``train_seconds``. Other errors are as in `run_study`.

    Example: ``print(bssearch.audit_study("study.yaml").rules)``
    """
    require(runs is None or runs >= 1, f"runs = {runs} must be >= 1")
    require(
        train_seconds is None or 0 <= train_seconds < math.inf,
        f"train_seconds = {train_seconds} must be a finite number >= 0",
    )
    spec, launch = loaded(spec, launch)
    if not run or spec.is_imported:
        with open_store(launch.db, write=False) as store:
            return audit_stored(store, spec.name, runs=runs)
    budget = FULL_TRIALS * spec.budget.trial_train_seconds if train_seconds is None else train_seconds
    with opened(spec, launch, keeps_name=True, reports=True) as study:
        answer(study.store, spec.name)
        known = cache(lambda: _cases_of(study.store, spec))
        first = runs or spec.confirm.runs
        most = first if runs else spec.confirm.max_runs or first
        count = f"{first} to {most} runs" if most > first else plural(first, "run")
        study.listener.note(
            f"the audit makes {count} of each configuration; no run starts after {budget:g} train seconds"
        )
        study.driver().run_planned(next_audit_run(known, first, budget, most), Phase.AUDIT)
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
    return cases(
        spec,
        trials,
        answer(store, spec.name),
        tuned_optima(spec, trials, step_times, store.probes.memory_boundary(spec.name)),
    )


def next_audit_run(
    found: Callable[[], Sequence[Case]], runs: int, train_seconds: float, most: int
) -> Callable[[History], TrialPlan | None]:
    """Return a planner of an audit's missing runs: ``runs`` per case, and up to ``most`` for an undecided case.

    No run starts after ``train_seconds``.
    """

    def job(history: History) -> TrialPlan | None:
        if spent_train_seconds(history.all_trials) >= train_seconds:
            return None
        # Make the cases only now, because confirmation may have changed the optimum.
        by_rule = by_cost(history.spec, found())
        return next(missing_audit_runs(history, by_rule, runs), None) or _further_run(history, by_rule, runs, most)

    return job


def _further_run(history: History, found: Sequence[Case], runs: int, most: int) -> TrialPlan | None:
    # An undecided case gets twice the runs before the next look, because after enough looks an interval passes any
    # bound by chance. The case with the least expected seconds to a verdict is first.
    spec, trials = history.spec, [*history.all_trials]
    step_seconds = step_seconds_of(history.probes.values(), spec.timed_model)
    undecided: list[tuple[float, int, Case]] = []
    for case in found:
        made = 0 if case.configuration is None else len(runs_of(spec, trials, case.configuration))
        level = min(most, runs * 2 ** math.ceil(math.log2(max(made, runs) / runs)))
        if (plan := next(missing_audit_runs(history, [case], level), None)) is not None:
            return plan
        if not case.can_be_decided or not runs <= made < most:
            continue
        judged = of_case(spec, trials, case, step_seconds, runs)
        if judged.verdict == "undecided":
            seconds = (runs_to_decide(judged.regret, made) - made) * run_seconds(spec, case)
            undecided.append((seconds, min(most, 2 * level), case))
    plans = (missing_audit_runs(history, [one], level) for _, level, one in sorted(undecided, key=lambda one: one[0]))
    return next((plan for each in plans for plan in each), None)


def missing_audit_runs(history: History, found: Sequence[Case], runs: int) -> Iterator[TrialPlan]:
    """Yield the missing runs case by case.

    Repeats lost and cancelled runs, runs that failed once, and runs that missed the target under a lower time limit.
    """
    made = CompletedRuns(history, [trial for trial in history.all_trials if _counts(history.spec, trial)])
    for case in found:
        if case.configuration is None or case.tuned is None or case.is_tuned or case.batch_size not in history.feasible:
            continue
        for seed in seeds_of(history.spec, case, runs):
            for configuration in (case.tuned.configuration, case.configuration):
                split = history.as_run(configuration)
                if made.is_missing(split, seed):
                    yield repeat(history, split, seed, Phase.AUDIT, retry_of=made.retried(split, seed))


def seeds_of(spec: StudySpec, case: Case, runs: int) -> list[int]:
    """Return ``runs`` seeds of a case, first the seeds of the tuned optimum's runs."""
    had = [] if case.tuned is None else [run.seed for run in case.tuned.runs]
    further = (trial_seed(spec.seed, Phase.CONFIRM, index) for index in range(len(had) + runs))
    return list(dict.fromkeys([*had, *further]))[:runs]


def time_accumulation(study: OpenStudy, found: Answer) -> None:
    """Time two batch sizes that fit in one micro-batch, the optimal and the largest, with and without accumulation."""
    spec = study.spec
    known = study.store.probes.by_batch_size(spec.name, study.environment)
    whole = [size for size, probe in known.items() if probe.is_whole]
    sizes = sorted({found.optimal.batch_size, max(whole, default=0)} & set(whole))
    counts = {size: next((count for count in MICRO_BATCHES if size % count == 0), None) for size in sizes}
    splits = [(size, micro) for size, count in counts.items() if count is not None for micro in (size, size // count)]
    quiet = [one for one in study.store.probes.visits(spec.name) if not one.contended]
    visited = Counter((one.batch_size, one.micro_batch_size) for one in quiet)
    for had in range(COMPARING_VISITS):
        visit: int | None = None
        for size, micro in splits:
            if visited[size, micro] > had:
                continue
            try:
                measured = study.executor.measure_step_time(default_at(spec, size, micro, STEP_SECONDS))
            except WorkloadError as error:  # a script may not support micro-batches
                study.listener.note(f"cannot time gradient accumulation: {with_hint(error)}")
                return
            if not measured.out_of_memory:
                probe = probe_record(measured, spec.budget.trial_train_seconds)
                # Trials at a batch size keep one evaluation cadence, with any micro-batches.
                probe = replace(probe, eval_every_steps=known[size].eval_every_steps)
                visit = study.store.probes.add_step_time(spec.name, study.environment, probe, visit)


def _counts(spec: StudySpec, trial: TrialRecord) -> bool:
    is_open = not trial.state.is_finished or trial.state.is_missing or trial.state is TrialState.OOM
    return trial.phase in {Phase.CONFIRM, *FULL_LIMIT_PHASES} and (is_open or is_result(spec, trial))
