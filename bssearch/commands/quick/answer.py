"""``quick``: a batch size from a minute of measurements, before any search.

The default is trained, then its neighbours on the ladder with learning rates by the space's rule, for as long as there
is time; the gradient noise scale is measured near the target. From the steps of the runs and the noise scale follows
the critical batch size (`bssearch.analysis.law.critical_batch`), and with measured step times the batch size that is
expected to reach the target soonest. What time is left tries other learning rates there. The runs are search trials of
the study, so that a search goes on from them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bssearch.analysis.derived import at_target
from bssearch.analysis.law.affine_step_time import fit_step_time
from bssearch.analysis.law.quick import Promise, QuickAnswer, QuickCriticalBatch, QuickOptimum, QuickRun
from bssearch.analysis.objectives.samples_to_target import samples_after
from bssearch.analysis.objectives.time_to_target import TimeToTarget
from bssearch.analysis.shape import Model, Notice
from bssearch.commands.enqueue import any_configuration_of
from bssearch.commands.opening import ExecutorFactory, Launch, OpenStudy, opened
from bssearch.commands.probe.noise import probe_noise
from bssearch.commands.quick.plan import (
    FASTER,
    RATE_STEP,
    SHARE_OF_A_RUN,
    QuickPlan,
    by_rule,
    ended_run,
    expected,
    law_points,
    rule_configuration,
    seconds_by_rate,
    with_other_rates,
)
from bssearch.errors import LaunchError, TargetNotReachedError, UsageError, WorkloadError
from bssearch.history import History
from bssearch.records import GradientNoise, NoiseMeasurement, Phase, Target, TrialRecord, TrialState
from bssearch.search.finding import SearchEnd, answer, save_quick, stored_quick
from bssearch.search.listener import Listener
from bssearch.space.usual_rates import FINE_TUNING
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

MANY_EPOCHS = 5.0
"""Epochs to the target from which on the data are seen so often that samples to the target mislead: a choice."""

AFTER_SEARCH = Notice(
    code="after_search",
    message="the study's search has ended, and this rests on its trials too: it is not stored, and no promise to keep",
)
"""What a quick answer is told that comes after the search."""

PROXY = "1.5 to 8 times off the critical batch size"
"""What the noise scale is known to be, by measurements at several models."""


def about_noise(found: NoiseMeasurement) -> Iterator[Notice]:
    """Yield what is wrong with a noise scale that was measured."""
    if noise_scale_of(found.noise) is None:
        low = found.noise.adam_low or found.noise.low
        bound = "the gradient could not be told from its noise" if low is None else f"it is above {low:.3g} samples"
        yield Notice(code="noise_not_measured", message=f"no gradient noise scale: {bound}, and no more is known")
    elif found.reason is not None:
        yield Notice(
            code="noise_moving",
            message=f"the noise scale was not measured near the target, and grows on the way to it: {found.reason}",
        )


def noise_scale_of(noise: GradientNoise) -> float | None:
    """Return the noise scale as the optimizer sees it, None where its interval reaches 0 or infinity."""
    preconditioned = (noise.adam_scale, noise.adam_low, noise.adam_high)
    for scale, low, high in (preconditioned, (noise.scale, noise.low, noise.high)):
        if scale and low and high and 0 < low <= scale <= high < math.inf:
            return scale
    return None


def about_target(target: Target, spec: StudySpec) -> Iterator[Notice]:
    """Yield that runs are compared at a part of the way, where the default did not get to the study's target."""
    if target != spec.record_target:
        yield Notice(
            code="easier_target",
            message=f"the default did not reach {spec.target.metric} {spec.target.value:g} in the time: runs are "
            f"compared at {target.value:.4g}, and the critical batch size grows on the way to the target",
        )


def about_runs(runs: Sequence[TrialRecord], noise_scale: float | None) -> Iterator[Notice]:
    """Yield that the runs tell of one batch size alone, or of none."""
    sizes = {run.configuration.batch_size for run in runs if run.outcome and run.outcome.steps_to_target}
    if len(sizes) > 1:
        return
    rests = "no noise scale is known either" if noise_scale is None else "the answer rests on the noise scale alone"
    yield Notice(
        code="one_batch_size",
        message=f"only one batch size came to where runs are compared; {rests}"
        + ("" if noise_scale is None else f", which is {PROXY}"),
    )


def about_training(
    spec: StudySpec, preset: str | None, samples_to_target: float | None, train_samples: int | None
) -> Iterator[Notice]:
    """Yield what the training is, where it is not what a quick answer is made for: the time to a target from scratch.

    ``preset`` is what completed the spec. ``samples_to_target`` are those of the default, ``train_samples`` those of an
    epoch; None where they are not known.
    """
    if spec.objective != TimeToTarget.name:
        yield Notice(
            code="other_objective",
            message=f"the study's objective is {spec.objective}; a quick answer is of the time to the target",
        )
    parameters = spec.default_configuration.parameters
    horizon = parameters.get("horizon_samples")
    if horizon is not None:
        yield Notice(
            code="fixed_horizon",
            message=f"the default's {parameters['schedule']} schedule ends after {horizon:g} samples at every batch "
            "size: a fixed number of epochs asks which batch size ends best, not which is soonest at a target",
        )
    if preset == FINE_TUNING:
        yield Notice(
            code="fine_tuning",
            message="a fine-tuning: what is forgotten at a batch size, and how it generalises, is not measured here",
        )
    if samples_to_target is not None and train_samples and samples_to_target > MANY_EPOCHS * train_samples:
        yield Notice(
            code="many_epochs",
            message=f"the default needs {samples_to_target / train_samples:.1f} epochs: the law of the critical batch "
            "size holds for samples that are new, and overfitting depends on the batch size",
        )


SECONDS = 60.0
"""How long a quick answer may take where nobody says otherwise."""

VISITS = 1
"""Visits in which the steps of a batch size are timed: a search adds more."""

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

    It takes about ``seconds`` in all, or what timing the steps of every batch size and one run take, where that is
    more. Raises `UsageError` for a number that is not finite and above 0, and where the default does not train, else as
    `run_study`.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds = {seconds:g} must be a finite number > 0")
    began = time.monotonic()
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
        return stored_quick_answer(study, QuickPlan(seconds, began), spec.preset)


def stored_quick_answer(study: OpenStudy, plan: QuickPlan, preset: str | None = None) -> QuickAnswer:
    """Make the quick answer of an open study and store it; raises what `quick` raises.

    Once a search has ended it is not stored: what rests on the trials of a search promises nothing. ``preset`` is what
    completed the spec.
    """
    found = quick_answer(study, plan, preset)
    if SearchEnd.stored(study.store, study.spec.name) is not None:
        return found.model_copy(update={"warnings": [*found.warnings, AFTER_SEARCH]})
    save_quick(study.store, study.spec.name, found.model_dump(mode="json"))
    return found


def quick_answer(study: OpenStudy, plan: QuickPlan, preset: str | None = None) -> QuickAnswer:
    """Make the runs that a quick answer rests on, measure, and return it."""
    spec = study.spec
    study.driver().run_planned(plan.next_size, Phase.SEARCH, visits=VISITS)
    history = study.history()
    default = ended_run(history, spec.default_configuration)
    if default is None:
        raise UsageError(f"the default configuration of study {spec.name!r} has not run to an end")
    target = comparable_target(study, default, plan)
    noise, warnings = _noise_scale(study, plan)
    runs = _at(study, by_rule(history), target)
    posterior, optimum = expected(history, law_points(runs), noise)
    size = optimum.step.batch_size
    study.driver().run_planned(plan.next_rate(size), Phase.SEARCH, visits=VISITS)
    history = study.history()
    line, (low, high) = fit_step_time(list(history.probes.values())), posterior.interval
    best, rate_gain = _optimum(history, size)
    default_size, default_rate = spec.default.batch_size, spec.default.learning_rate
    return QuickAnswer(
        study=spec.name,
        metric=target.metric,
        target=target.value,
        default_batch_size=default_size,
        optimal=best,
        interval=list(optimum.interval),
        flat_range=list(optimum.flat_range),
        gain=optimum.relative_times.get(default_size, 1.0),
        learning_rate_gain=rate_gain,
        learning_rate_range=learning_rate_range(default_rate, best.learning_rate, size / default_size),
        largest_micro_batch_size=max(probe.micro_batch_size for probe in history.probes.values()),
        b_crit=QuickCriticalBatch(estimate=posterior.estimate, low=low, high=high),
        noise_scale=noise,
        alpha_s=None if line is None else line.alpha_seconds,
        beta_s=None if line is None else line.beta_seconds,
        runs=[_run(one) for one in [*runs, *with_other_rates(history, size)]],
        seconds=plan.passed,
        warnings=[
            *about_target(target, spec),
            *warnings,
            *about_runs(runs, noise),
            *about_training(spec, preset, _samples_to_target(default), study.train_samples),
        ],
    )


def learning_rate_range(default: float, rate: float, ratio: float) -> list[float]:
    """Return the learning rates among which a retuned one is to be looked for, lowest first.

    Those between no scaling from the ``default`` and linear scaling by the ``ratio`` of batch sizes, and `RATE_STEP`
    times either way of the ``rate`` that is recommended.
    """
    ends = (default, default * ratio, rate / RATE_STEP, rate * RATE_STEP)
    return [min(ends), max(ends)]


def comparable_target(study: OpenStudy, default: TrialRecord, plan: QuickPlan) -> Target:
    """Return the study's target, or the part of the way to it that the default's run has come.

    Where the default does not train, for it has diverged or come nowhere, others are tried: raises `UsageError` with a
    learning rate that trains, if one does.
    """
    target = study.spec.record_target
    if default.state is TrialState.REACHED:
        return target
    gains = _gains(study, default)
    if not _trains(default, gains):
        raise _does_not_train(study, default, plan)
    reached = gains[0] + WAY * (max(gains) - gains[0])
    return Target(metric=target.metric, value=target.gain(reached), goal=target.goal)


def _gains(study: OpenStudy, run: TrialRecord) -> list[float]:
    """Return the finite gains of a run, in the order of its evaluations."""
    curve = study.store.curves(study.spec.name, [run.number])[run.number]
    gains = [study.spec.record_target.gain(one.metric) for one in curve]
    return [gain for gain in gains if math.isfinite(gain)]


def _trains(run: TrialRecord, gains: Sequence[float]) -> bool:
    """Return whether a run came nearer to the target than it began."""
    return run.state is not TrialState.DIVERGED and bool(gains) and max(gains) > gains[0]


def _does_not_train(study: OpenStudy, default: TrialRecord, plan: QuickPlan) -> UsageError:
    """Return the error for a default that does not train, with a learning rate that was seen to, if one was."""
    size, rule = default.configuration.batch_size, default.configuration.learning_rate
    why = default.outcome.reason if default.outcome else default.state
    problem = f"the default does not train: learning_rate = {rule:g} at batch {size} ({why})"
    tried = []
    for rate in (rule / RATE_STEP**2, rule * RATE_STEP**2):
        configuration = any_configuration_of(study.spec, {"batch_size": size, "learning_rate": rate})
        study.driver().run_planned(plan.once(configuration), Phase.SEARCH, visits=VISITS)
        run = ended_run(study.history(), configuration)
        if run is not None and _trains(run, _gains(study, run)):
            hint = f"--set default.learning_rate={rate:.3g} --set name={study.spec.name}-2, for it is another study"
            return UsageError(f"{problem}; with {rate:.3g} it does", hint=hint)
        tried.append(f"{rate:.3g}")
    check = "bssearch check looks at the workload, the loss and the first steps"
    was_stopped = default.state is TrialState.CAPPED
    longer = f"more than --seconds {plan.seconds:g} lets it train for longer; " if was_stopped else ""
    return UsageError(f"{problem}, nor with {' or '.join(tried)}", hint=longer + check)


def _optimum(history: History, batch_size: int) -> tuple[QuickOptimum, float]:
    """Return what to train with at a batch size, and how much sooner its learning rate is there than the rule's."""
    rule = history.as_run(rule_configuration(history, batch_size))
    seconds = seconds_by_rate(history, batch_size)
    fastest = min(seconds, key=seconds.__getitem__, default=rule.learning_rate)
    gain = seconds.get(rule.learning_rate, math.inf) / seconds.get(fastest, math.inf)
    is_faster = FASTER <= gain < math.inf
    best = QuickOptimum(
        batch_size=batch_size,
        micro_batch_size=rule.micro_batch_size,
        accumulation_steps=rule.accumulation_steps,
        learning_rate=fastest if is_faster else rule.learning_rate,
    )
    return best, gain if is_faster else 1.0


def _at(study: OpenStudy, runs: Sequence[TrialRecord], target: Target) -> list[TrialRecord]:
    """Return the runs as they would have ended at a target that is perhaps easier than the study's."""
    if target == study.spec.record_target:
        return list(runs)
    curves = study.store.curves(study.spec.name, [run.number for run in runs])
    return [at_target(run, curves[run.number], target, None) for run in runs]


def _noise_scale(study: OpenStudy, plan: QuickPlan) -> tuple[float | None, list[Notice]]:
    """Return the gradient noise scale near the target, with what limits it; None where it is not known."""
    try:
        found = probe_noise(
            study, plan.noise_seconds(study.history()), train_seconds_limit=SHARE_OF_A_RUN * plan.seconds
        )
    except (WorkloadError, LaunchError, UsageError) as error:
        return None, [Notice(code="noise_not_measured", message=f"no gradient noise scale: {error}")]
    return noise_scale_of(found.noise), list(about_noise(found))


def _samples_to_target(run: TrialRecord) -> float | None:
    return None if run.outcome is None else samples_after(run, run.outcome.steps_to_target)


def _run(trial: TrialRecord) -> QuickRun:
    outcome = trial.outcome
    assert outcome is not None, "it has ended"
    return QuickRun(
        trial=trial.number,
        batch_size=trial.configuration.batch_size,
        learning_rate=trial.configuration.learning_rate,
        steps=outcome.steps_to_target,
        train_seconds=outcome.train_seconds if outcome.time_to_target_s is None else outcome.time_to_target_s,
    )


class Kept(Promise):
    """The promise of one study."""

    study: str


class TrackRecord(Model):
    """The quick answers that a search has been held against, and ``waiting``, the studies still without one.

    ``held`` of them hold: their interval meets the flat range that the search found. ``median_time_ratio`` is that of
    the time at the promised batch size over that of the optimum, null where none is known.
    """

    studies: list[Kept]
    held: int
    median_time_ratio: float | None
    waiting: list[str]


def track_record(store: Store) -> TrackRecord:
    """Return how often the quick answers of a database's studies held."""
    kept, waiting = [], []
    for study in store.studies():
        if stored_quick(store, study.name) is None:
            continue
        try:
            promise = answer(store, study.name).quick
        except TargetNotReachedError:
            promise = None
        if promise is None:
            waiting.append(study.name)
        else:
            kept.append(Kept(study=study.name, **promise.model_dump()))
    ratios = [one.time_ratio for one in kept if one.time_ratio is not None]
    return TrackRecord(
        studies=kept,
        held=sum(one.holds for one in kept),
        median_time_ratio=statistics.median(ratios) if ratios else None,
        waiting=waiting,
    )
