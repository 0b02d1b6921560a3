"""``quick``: a batch size from a minute of measurements, before any search.

The default is trained, then its neighbours on the ladder with learning rates by the space's rule, for as long as there
is time; the gradient noise scale is measured near the target. From the steps of the runs and the noise scale follows
the critical batch size (`bssearch.analysis.law.critical_batch`), and with measured step times the batch size that is
expected to reach the target soonest. The runs are search trials of the study, so that a search goes on from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bssearch.analysis.answer import Notice
from bssearch.analysis.law.affine_step_time import fit_step_time
from bssearch.analysis.law.critical_batch import (
    CriticalBatchPosterior,
    ExpectedOptimum,
    critical_batch,
    expected_optimum,
)
from bssearch.analysis.law.joint import runnable_steps
from bssearch.analysis.law.points import LawPoint, law_point
from bssearch.analysis.law.quick import QuickAnswer, QuickCriticalBatch, QuickOptimum, QuickRun
from bssearch.analysis.retarget import at_target
from bssearch.commands.enqueue import configuration_of
from bssearch.commands.opening import ExecutorFactory, Launch, OpenStudy, opened
from bssearch.commands.probe.noise import probe_noise
from bssearch.errors import LaunchError, UsageError, WorkloadError
from bssearch.history import History
from bssearch.records import Configuration, Phase, Target, TrialPlan, TrialRecord, TrialState
from bssearch.search.confirmation import repeat
from bssearch.search.finding import save_quick
from bssearch.search.listener import Listener
from bssearch.search.seeds import trial_seed
from bssearch.spec import StudySpec

SECONDS = 60.0
"""How long a quick answer may take where nobody says otherwise."""

SHARE_OF_A_RUN = 0.25
"""The share of the time that one run may train: four find out whether the default trains and what others need."""

NOISE_SHARE = 0.15
"""The share of the time in which gradients are measured, once near the target."""

STEP = 4
"""The ratio of the batch sizes of two neighbouring runs: an octave says little beside the noise of a seed."""

CLOSE = 3.0
"""The ratio of the ends of the optimum's interval at which no further run is needed: a choice."""

WAY = 0.9
"""Where the default misses the target, runs are compared at this share of the way that it came."""


def quick(
    spec: StudySpec,
    *,
    seconds: float = SECONDS,
    workload: Any = None,
    db: str | None = None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_busy: bool = False,
    listener: Listener | None = None,
    progress: bool | None = None,
    make_executor: ExecutorFactory | None = None,
) -> QuickAnswer:
    """Return the batch size that a minute of measurements speaks for, and store it with the study.

    ``seconds`` bounds the time in which runs begin and gradients are measured, once steps have been timed. Raises
    `UsageError` for a number that is not finite and above 0, and where the default does not train, else as `run_study`.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds = {seconds:g} must be a finite number > 0")
    launch = Launch(
        db=db,
        folder=folder,
        data_dir=data_dir,
        allow_busy=allow_busy,
        workload=workload,
        listener=listener,
        progress=progress,
        make_executor=make_executor,
    )
    with opened(spec, launch) as study:
        found = quick_answer(study, seconds)
        save_quick(study.store, study.spec.name, found.model_dump(mode="json"))
        return found


def quick_answer(study: OpenStudy, seconds: float) -> QuickAnswer:
    """Make the runs that a quick answer rests on, measure, and return it."""
    began = time.monotonic()
    study.driver().run_planned(next_quick_run(seconds), Phase.SEARCH)
    noise, warnings = _noise_scale(study, NOISE_SHARE * seconds)
    history = study.history()
    default = _default_run(history)
    if default is None or default.outcome is None:
        raise UsageError(f"the default configuration of study {study.spec.name!r} has not run to an end")
    target = comparable_target(study, default)
    runs = _at(study, history.trials, target)
    return _answer(study, history, runs, target, noise, warnings, time.monotonic() - began)


def next_quick_run(seconds: float) -> Callable[[History], TrialPlan | None]:
    """Return the plan of a quick answer's runs, for `Driver.run_planned`: the default, then others at its rule.

    None begins once most of the ``seconds`` have passed since the first did, or where the optimum is known within
    `CLOSE`.
    """
    began = math.inf

    def plan(history: History) -> TrialPlan | None:
        nonlocal began
        spec, began = history.spec, min(began, time.monotonic())
        if _default_run(history) is None:
            return _plan(history, spec.default_configuration, seconds)
        if time.monotonic() - began >= (1 - NOISE_SHARE - SHARE_OF_A_RUN) * seconds:
            return None
        size = next_size(history)
        return None if size is None else _plan(history, configuration_of(spec, {"batch_size": size}), seconds)

    return plan


def next_size(history: History) -> int | None:
    """Return the batch size to run next, None where the optimum is known well enough or nothing is left to run.

    `STEP` times the default's, then as much below it; then the farthest from these within the optimum's interval, and
    last what would be recommended.
    """
    feasible = history.feasible
    run = {trial.configuration.batch_size for trial in history.trials}
    default = history.spec.default_configuration.batch_size
    for wanted in (STEP * default, default / STEP):
        near = min(feasible, key=lambda size: abs(math.log(size / wanted)))
        if near not in run and abs(math.log(near / default)) > math.log(STEP) / 2:
            return near
    optimum = _expected(history, _points(history.trials), None)[1]
    low, high = optimum.interval
    left = [size for size in feasible if size not in run and low <= size <= high]
    if left and high > CLOSE * low:
        return max(left, key=lambda size: _gap(size, run))
    return None if optimum.step.batch_size in run else optimum.step.batch_size


def _gap(size: int, run: set[int]) -> float:
    """Return how far a batch size is from all that have been run, in nats."""
    return min(abs(math.log(size / other)) for other in run)


def comparable_target(study: OpenStudy, default: TrialRecord) -> Target:
    """Return the study's target, or the part of the way to it that the default's run has come.

    Raises `UsageError` where the default does not train: it has diverged, or come nowhere.
    """
    target = study.spec.record_target
    if default.state is TrialState.REACHED:
        return target
    curve = study.store.curves(study.spec.name, [default.number])[default.number]
    gains = [target.gain(one.metric) for one in curve if math.isfinite(one.metric)]
    if default.state is TrialState.DIVERGED or not gains or max(gains) <= gains[0]:
        rate = default.configuration.learning_rate
        raise UsageError(
            f"the default does not train: learning_rate = {rate:g} at batch {default.configuration.batch_size} "
            f"({default.outcome.reason if default.outcome else default.state})",
            hint=f"--set default.learning_rate={rate / 10:.3g}, then {rate * 10:.3g}; bssearch check tells more",
        )
    reached = gains[0] + WAY * (max(gains) - gains[0])
    return Target(metric=target.metric, value=target.gain(reached), goal=target.goal)


def _answer(
    study: OpenStudy,
    history: History,
    runs: Sequence[TrialRecord],
    target: Target,
    noise: float | None,
    warnings: list[Notice],
    seconds: float,
) -> QuickAnswer:
    spec = study.spec
    posterior, optimum = _expected(history, _points(runs), noise)
    configuration = history.as_run(configuration_of(spec, {"batch_size": optimum.step.batch_size}))
    line = fit_step_time(list(history.probes.values()))
    low, high = posterior.interval
    default = spec.default_configuration.batch_size
    if target != spec.record_target:
        warnings = [_of_an_easier_target(target, spec), *warnings]
    return QuickAnswer(
        study=spec.name,
        metric=target.metric,
        target=target.value,
        default_batch_size=default,
        optimal=_optimum(configuration),
        interval=list(optimum.interval),
        flat_range=list(optimum.flat_range),
        gain=optimum.relative_times.get(default, 1.0),
        b_crit=QuickCriticalBatch(estimate=posterior.estimate, low=low, high=high),
        noise_scale=noise,
        alpha_s=None if line is None else line.alpha_seconds,
        beta_s=None if line is None else line.beta_seconds,
        runs=[_run(one) for one in runs],
        seconds=seconds,
        warnings=[*warnings, *_about_runs(runs)],
    )


def _expected(
    history: History, points: Sequence[LawPoint], noise: float | None
) -> tuple[CriticalBatchPosterior, ExpectedOptimum]:
    feasible = history.feasible
    posterior = critical_batch(feasible, noise, points)
    steps = runnable_steps(list(history.probes.values()), max(feasible))
    return posterior, expected_optimum(posterior, steps, feasible)


def _points(runs: Sequence[TrialRecord]) -> list[LawPoint]:
    """Return the samples to the target of runs that follow the default's rule, by batch size."""
    sizes = sorted({run.configuration.batch_size for run in runs})
    points = [law_point(size, [run for run in runs if run.configuration.batch_size == size]) for size in sizes]
    return [point for point in points if point.samples or point.missed_at]


def _at(study: OpenStudy, runs: Sequence[TrialRecord], target: Target) -> list[TrialRecord]:
    """Return the runs as they would have ended at a target that is perhaps easier than the study's."""
    ended = [run for run in runs if run.state.is_finished and not run.state.is_missing]
    if target == study.spec.record_target:
        return ended
    curves = study.store.curves(study.spec.name, [run.number for run in ended])
    return [at_target(run, curves[run.number], target, None) for run in ended]


def _noise_scale(study: OpenStudy, seconds: float) -> tuple[float | None, list[Notice]]:
    """Return the gradient noise scale near the target, with what limits it; None where it is not known."""
    try:
        found = probe_noise(study, seconds, train_seconds_limit=seconds / NOISE_SHARE * SHARE_OF_A_RUN)
    except (WorkloadError, LaunchError, UsageError) as error:
        return None, [Notice(code="noise_not_measured", message=f"no gradient noise scale: {error}")]
    scale = found.noise.adam_scale or found.noise.scale
    warnings = []
    if found.noise.low is None or scale is None:
        return None, [Notice(code="noise_not_measured", message="the gradient could not be told from its noise")]
    if found.reason is not None:
        warnings.append(
            Notice(
                code="noise_moving",
                message=f"the noise scale was not measured near the target, and grows on the way to it: {found.reason}",
            )
        )
    return scale, warnings


def _default_run(history: History) -> TrialRecord | None:
    """Return the default's search trial that has ended by itself."""
    default = history.spec.default_configuration
    ended = (trial for trial in history.trials if trial.state.is_finished and not trial.state.is_missing)
    return next((trial for trial in ended if trial.configuration.trains_like(default)), None)


def _plan(history: History, configuration: Configuration, seconds: float) -> TrialPlan:
    """Return the plan of one run, which trains no longer than its share of the seconds, whatever a search would do."""
    spec = history.spec
    full = spec.budget.trial_train_seconds
    limit = min(full, SHARE_OF_A_RUN * seconds)
    plan = repeat(
        history, history.as_run(configuration), trial_seed(spec.seed, Phase.SEARCH, history.length), Phase.SEARCH
    )
    return replace(
        plan,
        train_seconds_limit=limit,
        limit_state=TrialState.EXHAUSTED if limit >= full else TrialState.CAPPED,
        uncapped=True,
    )


def _optimum(configuration: Configuration) -> QuickOptimum:
    return QuickOptimum(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        accumulation_steps=configuration.accumulation_steps,
        learning_rate=configuration.learning_rate,
    )


def _run(trial: TrialRecord) -> QuickRun:
    outcome = trial.outcome
    assert outcome is not None, "it has ended"
    return QuickRun(
        trial=trial.number,
        batch_size=trial.configuration.batch_size,
        learning_rate=trial.configuration.learning_rate,
        steps=outcome.steps_to_target,
        train_seconds=outcome.train_seconds,
    )


def _of_an_easier_target(target: Target, spec: StudySpec) -> Notice:
    return Notice(
        code="easier_target",
        message=f"the default did not reach {spec.target.metric} {spec.target.value:g} in the time: runs are compared "
        f"at {target.value:.4g}, and the critical batch size grows on the way to the target",
    )


def _about_runs(runs: Sequence[TrialRecord]) -> list[Notice]:
    sizes = {run.configuration.batch_size for run in runs if run.outcome and run.outcome.steps_to_target}
    if len(sizes) > 1:
        return []
    return [
        Notice(
            code="one_batch_size",
            message="only one batch size came to where runs are compared: the answer rests on the noise scale alone, "
            "which is 1.5 to 8 times off the critical batch size",
        )
    ]
