"""Check a workload, propose a target, and bound a study's cost before a run."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import psutil
from pydantic import Field

from bssearch.analysis.law.batch_model import MemoryFit, fit_memory
from bssearch.analysis.shape import Model, Notice
from bssearch.commands.branch_probe import configuration_at
from bssearch.commands.display import seconds_left
from bssearch.commands.launch import HERE, TARGET_RUNS, Launch
from bssearch.commands.opening import (
    GivenSpec,
    check_parts,
    check_question,
    check_target,
    described,
    loaded,
    refuse_where_in_no_file,
)
from bssearch.commands.pitfalls import CheckEvidence, dropped_share, suspicions
from bssearch.commands.probes import run_default, run_request, step_time_of_default
from bssearch.errors import BSSearchError, DatabaseError, LaunchError, require, with_hint
from bssearch.executors.base import Executor
from bssearch.planning.memory.request import GIB, HEADROOM, MIB
from bssearch.planning.requests import notes_on_spec
from bssearch.planning.start import OBJECTIVES
from bssearch.records import (
    Configuration,
    Goal,
    MemoryRequest,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    Target,
    TrialOutcome,
    TrialPlan,
    TrialRequest,
    TrialState,
    WorkloadDescription,
    first_crossing,
)
from bssearch.records.text import percent
from bssearch.search.after_search import REPEATED
from bssearch.search.calibration import default_at
from bssearch.search.confirmation import CONFIGURATIONS_PER_BATCH
from bssearch.search.history import History, trial_seed
from bssearch.search.pruners.base import first_slack, make_pruner
from bssearch.spec import WORKLOAD_PARAMETERS, StudySpec, bounds, checked
from bssearch.storage.repository import check_writable, open_store
from bssearch.training.course import EVALUATION_SHARE
from bssearch.workloads.base import TAKES

STEPS = 3  # optimizer steps per run; dropout and label smoothing change the loss at the first step

LONGEST_S = 10.0  # limit for all runs together, in seconds; the rest of a check takes about as long


def ignored_parameters(spec: StudySpec, executor: Executor, probe: ProbeRecord) -> Iterator[tuple[str, str]]:
    """Yield a (code, sentence) for each searched workload parameter that does not change the loss.

    Yields only ``parameters_not_tried`` if the runs would take over `LONGEST_S` seconds. ``probe`` has the default's
    step and evaluation seconds.
    """
    configuration = spec.default_configuration.in_micro_batches(probe.micro_batch_size)
    others = _other_values(spec, configuration)
    if not others:
        return
    # A run has two warm-up steps, `STEPS` counted steps, a last step, and three evaluations.
    one_run = (2 + STEPS + 1) * (probe.step_seconds or 0.0) + 3 * (probe.evaluation_seconds or 0.0)
    expected = (1 + len(others)) * one_run
    if expected > LONGEST_S:
        yield (
            "parameters_not_tried",
            f"bssearch did not test whether the workload uses {' and '.join(others)}, because {1 + len(others)} runs "
            f"of {STEPS} steps would take {expected:.3g} s (limit {LONGEST_S:g} s)",
        )
        return
    before = _losses(spec, executor, 2, configuration)
    for number, (name, value) in enumerate(others.items(), start=3):
        if before is not None and _losses(spec, executor, number, _with(configuration, name, value)) == before:
            group, _, argument = name.rpartition(".")
            takes = TAKES.get(group, "build_model" if name == "dropout" else "loss")
            own = _shown(configuration.parameters.get(name, getattr(configuration, name, None)))
            yield (
                "parameter_ignored",
                f"{name} seems to have no effect, because the losses of {STEPS} steps are equal with {name} = {own} "
                f"and {_shown(value)}; use the argument {argument} of {takes}(), or give space.{name} one value",
            )


def _other_values(spec: StudySpec, configuration: Configuration) -> dict[str, ParameterValue]:
    found: dict[str, ParameterValue] = {}
    for name in WORKLOAD_PARAMETERS:
        (low, high), own = bounds(getattr(spec.space, name)), getattr(configuration, name)
        if low != high:
            found[name] = float(low if own - low > high - own else high)
    searched = (one for one in spec.space.dimensions() if one.name in spec.space.own_domains)
    return found | {one.name: one.other_than(configuration.parameters[one.name]) for one in searched}


def _with(configuration: Configuration, name: str, value: ParameterValue) -> Configuration:
    own = configuration.parameters
    changed: dict[str, Any] = {"parameters": {**own, name: value}} if name in own else {name: value}
    return replace(configuration, **changed)


def _shown(value: ParameterValue) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _losses(
    spec: StudySpec, executor: Executor, number: int, configuration: Configuration
) -> list[tuple[int, float, float | None]] | None:
    _, curve = run_request(
        executor,
        TrialRequest(
            number=number,
            plan=TrialPlan(
                configuration=configuration,
                sampled=None,
                phase=Phase.PROBE,
                seed=trial_seed(spec.seed, Phase.PROBE, 0),
                train_seconds_limit=spec.budget.trial_train_seconds,
                limit_state=TrialState.CAPPED,
                eval_every_steps=STEPS,
                stop_at_target=False,
                threads=spec.executor.threads,
            ),
            target=spec.record_target,
        ),
        until_step=STEPS,
    )
    seen = [(one.step, one.metric, one.loss) for one in curve if one.step <= STEPS]
    return seen if any(loss is not None for *_, loss in seen) else None


TRIAL_SECONDS = 5.0  # train seconds of the short trial, unless the study's limit is shorter


class BatchCheck(Model):
    """The seconds of a step and an evaluation at one batch size."""

    batch_size: int
    micro_batch_size: int
    step_seconds: float | None
    evaluation_seconds: float | None
    dropped_share: float


class ShortTrial(Model):
    """The default configuration's trial of at most ``limit_s`` train seconds."""

    batch_size: int
    limit_s: float
    train_seconds: float
    steps: int
    evaluations: int
    best_metric: float | None
    time_to_target_s: float | None
    state: TrialState
    reason: str


class WalkStep(Model):
    """A question of ``check --walk``, with measured figures by name and a decision."""

    question: str
    figures: dict[str, float | None]
    decision: str


class Check(Model):
    """The result of a check, of the largest scale if the spec has ``scales``.

    ``notes`` correct common claims that the spec seems to follow, or name problems of the environment.
    ``longest_study_s`` and ``likely_study_s`` are the wall seconds of all ``studies``.
    """

    study: str
    studies: int
    target: str
    device: str
    batch_unit: Literal["samples", "tokens"]  # of batch sizes, ``train_samples`` and ``dropped_share``
    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    parameters: int | None
    untrained: dict[str, float | None]
    batches: list[BatchCheck]
    trial: ShortTrial
    longest_trial_s: float
    longest_study_s: float
    likely_study_s: float | None
    findings: list[Notice]
    notes: list[Notice] = Field(default_factory=list)
    walk: list[WalkStep] | None = None


def check(spec: GivenSpec, launch: Launch = HERE, *, walk: bool = False) -> Check:
    """Try a study's workload briefly, without storing results.

    ``walk`` answers six questions, from the memory budget to the objective, with measured figures.

    Raises the errors of `bssearch.run_study`.

    Example: ``print(bssearch.check("study.yaml").findings)``
    """
    spec, launch = loaded(spec, launch)
    *smaller, spec = spec.at_scales
    if launch.db is not None:
        check_writable(launch.db)
        # The first run creates a missing database.
        with suppress(DatabaseError), open_store(launch.db, write=False) as store:
            stored = store.studies.find(spec.name)
            if stored is not None and launch.workload is None:
                check_question(spec, stored)
    with described(spec, launch) as (executor, found):
        check_target(spec, found)
        return _checked(spec, executor, found, studies=len(smaller) + 1, walk=walk)


def _checked(spec: StudySpec, executor: Executor, found: WorkloadDescription, *, studies: int, walk: bool) -> Check:
    # Times the smallest, default and largest batch size, trains the default briefly, then tries other parameters.
    default = spec.default.batch_size
    probes = {
        size: step_time_of_default(spec, executor, size)
        for size in sorted({spec.batch_sizes[0], default, spec.batch_sizes[-1]})
    }
    limit = min(TRIAL_SECONDS, spec.budget.trial_train_seconds)
    outcome, curve = run_default(spec, executor, 0, probe=probes[default], limit=limit, stop_at_target=True)
    evidence = CheckEvidence(spec=spec, found=found, probes=probes, outcome=outcome, curve=curve, limit=limit)
    longest = max(longest_trial_seconds(spec.budget.trial_train_seconds, probe) for probe in probes.values())
    suspicious = [*suspicions(evidence), *ignored_parameters(spec, executor, probes[default])]
    return Check(
        study=spec.name,
        studies=studies,
        target=spec.record_target.in_words,
        device=found.environment.device_name,
        batch_unit=spec.training.batch_unit,
        train_samples=found.train_samples,
        validation_samples=found.validation_samples,
        test_samples=found.test_samples,
        parameters=found.model.parameters,
        untrained=dict(found.model.initial_metrics),
        batches=[
            BatchCheck(
                batch_size=probe.batch_size,
                micro_batch_size=probe.micro_batch_size,
                step_seconds=probe.step_seconds,
                evaluation_seconds=probe.evaluation_seconds,
                dropped_share=dropped_share(found, probe.batch_size),
            )
            for probe in probes.values()
        ],
        trial=ShortTrial(
            batch_size=default,
            limit_s=limit,
            train_seconds=outcome.train_seconds,
            steps=outcome.steps,
            evaluations=len(curve),
            best_metric=outcome.best_metric,
            time_to_target_s=outcome.time_to_target_s,
            state=outcome.state,
            reason=outcome.reason,
        ),
        longest_trial_s=longest,
        longest_study_s=studies * sum(longest_seconds(spec, longest)),
        likely_study_s=None
        if outcome.time_to_target_s is None
        else studies * pruned_seconds(spec, outcome.time_to_target_s, longest),
        findings=[Notice(code=code, message=message) for code, message in suspicious],
        notes=[
            *(Notice(code=note.code, message=note.message) for note in notes_on_spec(spec)),
            *([] if found.notice is None else [Notice(code="environment", message=found.notice)]),
        ],
        walk=list(_walk_steps(evidence, executor)) if walk else None,
    )


DROP = 0.02  # if the metric at the largest batch is worse by this share, use a smaller batch or regularisation


def _walk_steps(evidence: CheckEvidence, executor: Executor) -> Iterator[WalkStep]:
    # Measures the memory of micro-batches, and trains at the largest batch size
    spec, samples = evidence.spec, evidence.found.train_samples
    budget = evidence.found.environment.device_memory_bytes or psutil.virtual_memory().total
    usable = (1 - HEADROOM) * budget
    yield WalkStep(
        question="How much memory is there?",
        figures={"memory_gib": budget / GIB, "usable_gib": usable / GIB},
        decision=f"plan with {percent(1 - HEADROOM)} of this memory; a batch that fits is feasible, not always optimal",
    )
    fit, reason = _memory(evidence, executor)
    yield WalkStep(
        question="How much memory does a sample take?",
        figures={} if fit is None else {"fixed_gib": fit.fixed_bytes / GIB, "sample_mib": fit.bytes_per_sample / MIB},
        decision=f"not measured: {reason}" if fit is None else "plan with fixed_gib, plus sample_mib for each sample",
    )
    most = None if fit is None else samples
    if fit is not None and fit.bytes_per_sample > 0:
        fitting = max(0, math.floor((usable - fit.fixed_bytes) / fit.bytes_per_sample))
        most = min(fitting, samples or fitting)
    yield _largest_step(spec.batch_sizes[-1], most)
    yield from _training_steps(evidence, executor)
    meaning = next((meaning for name, meaning in OBJECTIVES.values() if name == spec.objective), "")
    yield WalkStep(
        question="Which priority comes first?",
        figures={},
        decision=f"objective {spec.objective}{meaning and f': {meaning}'}",
    )


def _memory(evidence: CheckEvidence, executor: Executor) -> tuple[MemoryFit | None, str]:
    spec, samples = evidence.spec, evidence.found.train_samples or math.inf
    fitting = {probe.micro_batch_size for probe in evidence.probes.values() if probe.micro_batch_size <= samples}
    try:
        uses = [
            executor.measure_memory(
                MemoryRequest(configuration=default_at(spec, size, size).configuration, threads=spec.executor.threads)
            )
            for size in sorted({*fitting, max(1, max(fitting) // 2)})
        ]
    except BSSearchError as error:
        return None, with_hint(error)
    return fit_memory(uses), "fewer than three micro-batch sizes have a known peak memory"


def _largest_step(largest: int, most: int | None) -> WalkStep:
    if most is None:
        decision = "unknown; find the limit with `bssearch probe memory`"
    elif most < 1:
        decision = "not even one sample fits safely; use a smaller model, or a device with more memory"
    elif most >= largest:
        decision = f"batch {largest}, the largest batch size of the space, fits in one micro-batch"
    else:
        decision = f"batches above {most} do not fit safely in one micro-batch; set space.max_micro_batch_size: {most}"
    return WalkStep(
        question="What is the largest safe micro-batch?", figures={"safe_micro_batch": most}, decision=decision
    )


def _training_steps(evidence: CheckEvidence, executor: Executor) -> Iterator[WalkStep]:
    spec, trial, limit = evidence.spec, evidence.outcome, evidence.limit
    target, default, largest = spec.record_target, spec.default.batch_size, max(evidence.probes)
    other = trial if largest == default else _at_largest(evidence, executor, largest)
    mine, its = trial.best_metric, other.best_metric
    drop = None if mine is None or its is None or not mine else (target.gain(mine) - target.gain(its)) / abs(mine)
    if mine is None or its is None:
        decision = f"not measured: a run had no evaluation within {limit:g} train seconds"
    elif largest == default:
        decision = f"not compared: the default, batch {default}, is the largest batch size"
    elif drop is None:
        decision = f"not compared: the best {target.metric} at batch {default} is 0"
    elif drop > DROP:
        decision = (
            f"within {limit:g} train seconds, the best {target.metric} is {percent(drop, 1)} worse at batch {largest} "
            f"than at batch {default}; use a smaller batch, or retune and regularise"
        )
    else:
        decision = (
            f"within {limit:g} train seconds, the best {target.metric} is at most {percent(DROP)} worse at batch "
            f"{largest} than at batch {default}"
        )
    yield WalkStep(
        question="Does the largest batch converge?",
        figures={f"{target.metric}_at_{default}": mine, f"{target.metric}_at_{largest}": its, "drop": drop},
        decision=decision,
    )
    times = {size: run.time_to_target_s for size, run in ((default, trial), (largest, other))}
    reached = {size: seconds for size, seconds in times.items() if seconds is not None}
    tried = " and ".join(map(str, times))
    if not reached:
        soonest = f"no tried batch size ({tried}) reaches the target within {limit:g} train seconds"
    elif largest == default:
        soonest = f"this check trained only batch {default}"
    else:
        first = min(reached, key=reached.__getitem__)
        soonest = f"of {tried}, batch {first} reaches the target first, without tuning"
    yield WalkStep(
        question="Which batch size reaches the target soonest?",
        figures={
            **{f"step_s_at_{size}": probe.step_seconds for size, probe in evidence.probes.items()},
            **{f"time_to_target_s_at_{size}": seconds for size, seconds in times.items()},
        },
        decision=f"{soonest}; `bssearch run` tries the other batch sizes, each with its own learning rate",
    )


def _at_largest(evidence: CheckEvidence, executor: Executor, largest: int) -> TrialOutcome:
    spec, probe = evidence.spec, evidence.probes[largest]
    rule = spec.space.rate_rule(spec.default_configuration.optimizer)
    outcome, _ = run_default(
        spec,
        executor,
        1,
        probe=probe,
        limit=evidence.limit,
        stop_at_target=True,
        configuration=configuration_at(spec, largest, probe.micro_batch_size, rule),
    )
    return outcome


# The next three constants are shares of the way from the untrained metric to the median of the runs' best metrics.
MARGIN = 0.02  # least margin
LEAST = 0.5  # least distance of a proposed target from the untrained metric, even if one seed trains badly
WAY = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)  # alternative targets; denser at the end, where a percent costs more time

# If the default takes longer than this share of the limit, slower configurations may miss the target.
LATE = 0.5


class DefaultRun(Model):
    """One run of the default configuration to the time limit of a trial."""

    seed_index: int
    best_metric: float
    best_at_s: float
    train_seconds: float


class TargetRow(Model):
    """A possible target, the number of runs that reach the target, and the runs' median time to target.

    The time is null if at least half of the runs miss the target.
    """

    target: float
    reached: int
    time_to_target_s: float | None
    share_of_limit: float | None


class Advice(Model):
    """A proposed target and its alternatives, in units of the metric."""

    metric: str
    goal: Goal
    untrained: float
    median_best: float
    margin: float
    proposed: float
    limit_s: float
    runs: list[DefaultRun]
    targets: list[TargetRow]
    notes: list[str]


def advise_target(
    spec: GivenSpec,
    launch: Launch = HERE,
    *,
    runs: int = TARGET_RUNS,
    margin: float | None = None,
    on_run: Callable[[DefaultRun], None] = lambda run: None,
) -> Advice:
    """Run the default configuration ``runs`` times to the time limit of a trial, and propose a target.

    The proposal is the median best metric, eased by ``margin`` (in the metric's unit) and rounded to the easier side.
    ``on_run`` receives each run. The database stores no run.

    Raises `UsageError` for wrong ``runs`` or ``margin``, and `LaunchError` if the default does not train. Other errors
    are as in `bssearch.run_study`.

    Example: ``print(bssearch.advise_target("study.yaml", runs=3).proposed)``
    """
    require(runs >= 1, f"runs = {runs} must be >= 1")
    require(margin is None or 0 <= margin < math.inf, f"margin = {margin} must be a finite number >= 0")
    spec, launch = loaded(spec, launch)
    spec = spec.at_scales[-1]
    target, limit = spec.record_target, spec.budget.trial_train_seconds
    curves, made = [], []
    with described(spec, launch) as (executor, found):
        probe = step_time_of_default(spec, executor, spec.default.batch_size)
        for index in range(runs):
            outcome, curve = run_default(spec, executor, index, probe=probe, limit=limit, stop_at_target=False)
            require(
                outcome.state is not TrialState.DIVERGED,
                f"the default configuration does not train: {outcome.reason}",
                hint="change the default, for example default.learning_rate, or correct the workload",
                error=LaunchError,
            )
            require(
                curve,
                f"the default configuration has no evaluation in {limit:g} train seconds: {outcome.reason}",
                hint="raise budget.trial_train_seconds, or evaluate earlier",
                error=LaunchError,
            )
            best = max(curve, key=lambda one: target.gain(one.metric))
            run = DefaultRun(
                seed_index=index,
                best_metric=best.metric,
                best_at_s=best.train_seconds,
                train_seconds=outcome.train_seconds,
            )
            made.append(run)
            curves.append(curve)
            on_run(run)
    advice = summarise(target, limit, made, curves, margin)
    return advice if found.notice is None else advice.model_copy(update={"notes": [*advice.notes, found.notice]})


def summarise(
    target: Target,
    limit: float,
    runs: Sequence[DefaultRun],
    curves: Sequence[Sequence[Observation]],
    margin: float | None,
) -> Advice:
    # The best metric of the untrained models, because no untrained model may reach the proposal.
    untrained = max((curve[0].metric for curve in curves), key=target.gain)
    bests = [run.best_metric for run in runs]
    median_best = statistics.median(bests)
    way = target.gain(median_best) - target.gain(untrained)
    require(
        way > 0,
        f"the median best {target.metric}, {median_best:.4g}, does not improve on the {untrained:.4g} of an untrained "
        "model",
        hint="change default.learning_rate, or raise budget.trial_train_seconds",
        error=LaunchError,
    )
    if margin is None:
        margin = max(MARGIN * way, float(_difference(target.gain(median_best), min(map(target.gain, bests)))))
        margin = min(margin, (1 - LEAST - MARGIN) * way)  # rounding takes at most MARGIN
    proposed = towards_easier(target, median_best, margin, way)
    require(
        target.gain(proposed) > target.gain(untrained),
        f"margin = {margin:g} leads to target {proposed:g}, but an untrained model already has {target.metric} = "
        f"{untrained:.4g}; use a margin below {(1 - MARGIN) * way:.4g}",
    )
    sign = 1.0 if target.goal is Goal.MAXIMIZE else -1.0
    values = {target.gain(untrained + sign * share * way): untrained + sign * share * way for share in WAY}
    values[target.gain(proposed)] = proposed
    rows = [_row(target, values[gain], limit, curves) for gain in sorted(values)]
    return Advice(
        metric=target.metric,
        goal=target.goal,
        untrained=untrained,
        median_best=median_best,
        margin=margin,
        proposed=proposed,
        limit_s=limit,
        runs=list(runs),
        targets=rows,
        notes=_notes(target, proposed, limit, rows, runs),
    )


def towards_easier(target: Target, best: float, margin: float, way: float) -> float:
    unit = Fraction(10) ** math.floor(math.log10(min(margin or way / 1000, MARGIN * way)))
    return target.gain(float(_difference(target.gain(best), margin) // unit * unit))


def _difference(one: float, other: float) -> Fraction:
    return Fraction(str(one)) - Fraction(str(other))


def _row(target: Target, value: float, limit: float, curves: Sequence[Sequence[Observation]]) -> TargetRow:
    crossings = [first_crossing(curve, replace(target, value=value)) for curve in curves]
    seconds = [one.train_seconds if one else math.inf for one in crossings]
    median = statistics.median(seconds)
    known = math.isfinite(median)
    return TargetRow(
        target=value,
        reached=sum(map(math.isfinite, seconds)),
        time_to_target_s=median if known else None,
        share_of_limit=median / limit if known else None,
    )


def _notes(
    target: Target, proposed: float, limit: float, rows: Sequence[TargetRow], runs: Sequence[DefaultRun]
) -> list[str]:
    row = next(row for row in rows if row.target == proposed)
    share = row.share_of_limit or 0.0
    notes = [
        (
            row.reached < len(runs),
            f"{len(runs) - row.reached} of {len(runs)} runs of the default miss the proposal; raise the margin for an "
            "easier target",
        ),
        (
            share > LATE,
            f"the default reaches the proposal after {percent(share)} of budget.trial_train_seconds = {limit:g}; raise "
            "the limit or take an easier target for slower batch sizes",
        ),
        (
            statistics.median(run.best_at_s for run in runs) > 0.9 * limit,
            f"{target.metric} still improved near the limit of {limit:g} train seconds; raise the limit for a harder "
            "target",
        ),
        (
            target.gain(target.value) > target.gain(proposed),
            f"the spec's target of {target.value:g} is harder than the proposal of {proposed:g}; use the proposal "
            f"unless you need {target.value:g}",
        ),
    ]
    return [note for holds, note in notes if holds]


# Search trials that run to the full limit under any pruner, approximately; see `bssearch.search.samplers.allocation`.
UNCAPPED_TRIALS = 4


def most_finalists(spec: StudySpec) -> int:
    return CONFIGURATIONS_PER_BATCH * spec.confirm.top + 5


def longest_trial_seconds(limit: float, probe: ProbeRecord) -> float:
    """Return a full trial's wall seconds: ``limit`` train seconds, plus evaluation seconds if measured."""
    if probe.step_seconds is None or probe.evaluation_seconds is None or probe.eval_every_steps is None:
        return limit
    looks = 1 + math.ceil(limit / (probe.eval_every_steps * probe.step_seconds))  # one evaluation before the first step
    return limit + looks * probe.evaluation_seconds


def longest_seconds(spec: StudySpec, trial: float | None = None) -> tuple[float, float]:
    """Return the maximum wall seconds of the search, and of all later runs.

    ``trial`` is the wall seconds of a full trial; if None, evaluations take the share `EVALUATION_SHARE`.
    """
    trial = trial or spec.budget.trial_train_seconds / (1 - EVALUATION_SHARE)
    search = spec.budget.trials * trial / spec.executor.least_slots
    if spec.budget.wall_seconds is not None:
        search = min(search, spec.budget.wall_seconds + trial)
    return search, (most_finalists(spec) * confirmation_runs(spec) + schedule_runs(spec)) * trial


def confirmation_runs(spec: StudySpec) -> int:
    return spec.confirm.max_runs or spec.confirm.runs


def schedule_runs(spec: StudySpec) -> int:
    if spec.space.batch_schedule is None:
        return 0
    return spec.budget.schedule_trials + REPEATED * spec.confirm.runs


def pruned_seconds(spec: StudySpec, default_seconds: float, trial: float) -> float:
    """Return the expected wall seconds of the study if no trial beats the default.

    If the pruner caps trials, all but `UNCAPPED_TRIALS` search trials end at `first_slack` × the default's time to
    target. ``trial`` is the wall seconds of a full trial.
    """
    full = spec.budget.trial_train_seconds
    capped = min(full, first_slack(spec) * default_seconds) if make_pruner(spec.pruner).caps else full
    search = spec.budget.trials * capped / spec.executor.least_slots
    repeats = most_finalists(spec) * spec.confirm.runs + schedule_runs(spec)
    confirmation = repeats * min(full, default_seconds)
    return (search + confirmation + UNCAPPED_TRIALS * (full - capped)) * trial / full


class DryRun(Model):
    """A study's trials and limits, and the expected and longest wall seconds of all ``studies``."""

    study: str
    studies: int
    workload: str
    objective: str
    target: str
    batch_sizes: list[int]
    searched: list[str]
    trials: int
    trial_train_seconds: float
    slots: int | Literal["auto"]
    finalists: int
    confirmation_runs: int
    evaluation_share: float
    expected_s: float
    longest_search_s: float
    longest_confirmation_s: float


def dry_run(spec: StudySpec) -> DryRun:
    """Bound a study's cost without a device, store or workload."""
    scaled = checked(spec).at_scales
    spec = scaled[-1]
    check_parts(spec)
    refuse_where_in_no_file(spec)
    search, confirmation = longest_seconds(spec)
    return DryRun(
        study=spec.name,
        studies=len(scaled),
        workload=spec.workload,
        objective=spec.objective,
        target=spec.record_target.in_words,
        batch_sizes=list(spec.batch_sizes),
        searched=[dimension.name for dimension in spec.space.dimensions()],
        trials=spec.budget.trials,
        trial_train_seconds=spec.budget.trial_train_seconds,
        slots=spec.executor.slots,
        finalists=most_finalists(spec),
        confirmation_runs=confirmation_runs(spec),
        evaluation_share=EVALUATION_SHARE,
        expected_s=len(scaled) * seconds_left(History(spec)),
        longest_search_s=len(scaled) * search,
        longest_confirmation_s=len(scaled) * confirmation,
    )
