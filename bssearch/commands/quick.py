"""Recommend a batch size in a minute, from a few runs and the gradient noise."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from bssearch.analysis.build_answer import at_target, runnable_steps
from bssearch.analysis.law.batch_model import LawPoint, fit_step_time, law_point
from bssearch.analysis.law.quick import (
    CriticalBatchPosterior,
    ExpectedOptimum,
    Promise,
    QuickAnswer,
    QuickCriticalBatch,
    QuickOptimum,
    QuickRun,
    critical_batch,
    expected_optimum,
)
from bssearch.analysis.objectives import TimeToTarget, samples_after
from bssearch.analysis.shape import Model, Notice
from bssearch.commands.launch import HERE, QUICK_SECONDS, Launch
from bssearch.commands.opening import OpenStudy, opened
from bssearch.commands.probes import probe_noise
from bssearch.commands.trials import any_configuration_of, configuration_of
from bssearch.errors import LaunchError, TargetNotReachedError, UsageError, WorkloadError, require, required, with_hint
from bssearch.records import (
    Configuration,
    GradientNoise,
    NoiseMeasurement,
    Phase,
    Target,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
    grouped,
    median_known,
)
from bssearch.search.confirmation import repeat
from bssearch.search.engine import NextRun
from bssearch.search.finding import answer, save_quick, stored_quick
from bssearch.search.history import History, trial_seed
from bssearch.search.stored_finding import stored_end
from bssearch.spec import FINE_TUNING, StudySpec
from bssearch.storage.repository import Store

SHARE_OF_A_RUN = 0.25  # largest share of the time for one run: four runs test the default and other sizes

NOISE_SHARE = 0.1  # share of the time for measuring gradients near the target

LEAST_NOISE_SHARE = 0.25  # least part of `NOISE_SHARE`, even when the time is over

# Runs at other batch sizes stop at this multiple of the fastest run's time: slower sizes are not optimal.
SLOWER = 1.5

STEP = 4  # ratio of neighbouring runs' batch sizes; the seed-to-seed spread hides the effect of a doubling

CLOSE = 3.0  # the optimum's interval is narrow enough if its ends have at most this ratio

RATE_STEP = 3.0  # ratio of compared learning rates; single runs resolve no smaller ratio

FASTER = 1.25  # least speed-up of another learning rate, because of the seed-to-seed spread

LONGER = 2.0  # repeat a stopped run of the default if the limit is now this many times as long

AS_FAR = 1.2  # limit of a run with another learning rate, as a multiple of the time to beat


class QuickPlan:
    """Plans the runs of a quick answer, within ``seconds`` after ``began``."""

    def __init__(self, seconds: float, began: float) -> None:
        self.seconds = seconds
        self._began = began

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.passed)

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    def next_size(self, history: History) -> TrialPlan | None:
        """Return the next run by the learning-rate rule: the default, then other batch sizes.

        Returns None if the default diverged, no run has train seconds, or no time or batch size remains.
        """
        spec = history.spec
        default = ended_run(history, spec.default_configuration)
        if default is None or self._is_too_short(default, spec.budget.trial_train_seconds):
            return self._run(history, spec.default_configuration, self.seconds)
        fastest = _fastest(history)
        if default.state is TrialState.DIVERGED or fastest is None:
            return None
        left = self.left - (0.0 if spec.is_program else NOISE_SHARE * self.seconds + fastest.wall_seconds)
        size = next_size(history, by_rule(history)) if left >= fastest.wall_seconds else None
        if size is None:
            return None
        share = fastest.train_seconds / max(fastest.train_seconds, fastest.wall_seconds)
        return self._run(history, rule_configuration(history, size), min(share * left, SLOWER * fastest.train_seconds))

    def noise_seconds(self, history: History) -> float:
        fastest, share = _fastest(history), NOISE_SHARE * self.seconds
        before = 0.0 if fastest is None else fastest.wall_seconds
        return max(LEAST_NOISE_SHARE * share, min(share, self.left - before))

    def next_rate(self, batch_size: int) -> NextRun:
        def plan(history: History) -> TrialPlan | None:
            times = seconds_by_rate(history, batch_size)
            fastest = min(times.values(), default=math.inf)
            rate = next_rate(times, rule_configuration(history, batch_size).learning_rate)
            if rate is None or self.left < fastest:
                return None
            try:
                configuration = configuration_of(history.spec, {"batch_size": batch_size, "learning_rate": rate})
            except UsageError:  # a search cannot start from a rate outside the space
                return None
            return self._run(history, configuration, min(self.left, AS_FAR * fastest))

        return plan

    def once(self, configuration: Configuration) -> NextRun:
        def plan(history: History) -> TrialPlan | None:
            return None if ended_run(history, configuration) else self._run(history, configuration, self.seconds)

        return plan

    def _is_too_short(self, run: TrialRecord, full: float) -> bool:
        longest = max(run.outcome.train_seconds if run.outcome else 0.0, run.train_seconds_limit)
        return run.state is TrialState.CAPPED and LONGER * longest <= min(full, SHARE_OF_A_RUN * self.seconds)

    def _run(self, history: History, configuration: Configuration, limit: float) -> TrialPlan:
        full = history.spec.budget.trial_train_seconds
        share = min(full, SHARE_OF_A_RUN * self.seconds)
        seed = trial_seed(history.spec.seed, Phase.SEARCH, history.length)
        return replace(
            repeat(history, history.as_run(configuration), seed, Phase.SEARCH),
            train_seconds_limit=min(limit, share),
            limit_state=TrialState.EXHAUSTED if min(limit, share) >= full else TrialState.CAPPED,
            uncapped=limit >= share,
        )


def rule_configuration(history: History, batch_size: int) -> Configuration:
    return any_configuration_of(history.spec, {"batch_size": batch_size})


def ended_run(history: History, configuration: Configuration) -> TrialRecord | None:
    """Return a configuration's first ended, uncapped search trial, else the capped trial with the highest limit."""
    runs = [run for run in _ended(history) if run.configuration.trains_like(configuration)]
    whole = next((run for run in runs if run.state is not TrialState.CAPPED), None)
    return whole or max(runs, key=lambda run: run.train_seconds_limit, default=None)


def by_rule(history: History) -> list[TrialRecord]:
    rules = {size: rule_configuration(history, size) for size in history.feasible}
    runs = [run for run in _ended(history) if run.configuration.batch_size in rules]
    return [run for run in runs if run.configuration.trains_like(rules[run.configuration.batch_size])]


def next_size(history: History, runs: Sequence[TrialRecord]) -> int | None:
    """Return the next batch size to run, or None; ``runs`` follow the learning-rate rule.

    The first sizes are the default × and ÷ `STEP`. Sizes in the optimum's interval follow, farthest from ``runs``
    first, until the interval spans at most the factor `CLOSE`. The last size is the recommendation.
    """
    run = {trial.configuration.batch_size for trial in runs}
    optimum = expected(history, law_points(runs), None)[1]
    if neighbours := _neighbours(history) - run:
        return min(neighbours, key=optimum.relative_times.__getitem__)
    low, high = optimum.interval
    left = [size for size in history.feasible if size not in run and low <= size <= high]
    if left and high > CLOSE * low:
        return max(
            left, key=lambda size: min(abs(math.log(size / other)) for other in run)
        )  # the farthest size, in nats
    return None if optimum.step.batch_size in run else optimum.step.batch_size


def next_rate(seconds: Mapping[float, float], rule: float) -> float | None:
    """Return the next learning rate to run, or None if the search is over or all rates missed the target.

    ``seconds`` are the seconds to the target by rate, ∞ for a rate that missed the target. Rates start at ``rule``, and
    rise by the factor `RATE_STEP` while runs get faster, else fall.
    """
    if not math.isfinite(min(seconds.values(), default=math.inf)):
        return None
    fastest = min(seconds, key=seconds.__getitem__)
    up, down = fastest * RATE_STEP, fastest / RATE_STEP
    wanted = (up, down) if fastest >= rule else (down, up)
    return next((rate for rate in wanted if not any(math.isclose(rate, one) for one in seconds)), None)


def seconds_by_rate(history: History, batch_size: int) -> dict[float, float]:
    """Return the least seconds to the target by learning rate, ∞ for a rate that missed the target."""
    runs = [(run.configuration.learning_rate, run.outcome) for run in _at_any_rate(history, batch_size)]
    hits = grouped((rate, end.time_to_target_s) for rate, end in runs if end is not None)
    return {rate: min(math.inf if one is None else one for one in here) for rate, here in hits.items()}


def _at_any_rate(history: History, batch_size: int) -> list[TrialRecord]:
    rule, runs = rule_configuration(history, batch_size), [(run, run.configuration) for run in _ended(history)]
    return [run for run, one in runs if one.trains_like(replace(rule, learning_rate=one.learning_rate))]


def law_points(runs: Sequence[TrialRecord]) -> list[LawPoint]:
    sizes = sorted({run.configuration.batch_size for run in runs})
    points = [law_point(size, [run for run in runs if run.configuration.batch_size == size]) for size in sizes]
    return [point for point in points if point.samples or point.missed_at]


def expected(
    history: History, points: Sequence[LawPoint], noise: float | None
) -> tuple[CriticalBatchPosterior, ExpectedOptimum]:
    feasible = history.feasible
    posterior = critical_batch(feasible, noise, points)
    return posterior, expected_optimum(
        posterior, runnable_steps(list(history.probes.values()), max(feasible)), feasible
    )


def _ended(history: History) -> Iterator[TrialRecord]:
    return (trial for trial in history.trials if trial.state.has_result)


def _neighbours(history: History) -> set[int]:
    default = history.spec.default_configuration.batch_size
    near = {
        min(history.feasible, key=lambda size: abs(math.log(size / end))) for end in (STEP * default, default / STEP)
    }
    return {size for size in near if abs(math.log(size / default)) > math.log(STEP) / 2}


def _fastest(history: History) -> TrialOutcome | None:
    ends = [run.outcome for run in by_rule(history) if run.outcome is not None]
    reached = [end for end in ends if end.state is TrialState.REACHED and end.train_seconds > 0]
    default = ended_run(history, history.spec.default_configuration)
    known = None if default is None else default.outcome
    return min(reached, key=lambda end: end.train_seconds, default=known if known and known.train_seconds > 0 else None)


MANY_EPOCHS = 5.0  # from this many epochs on, repeated data make samples to the target misleading

AFTER_SEARCH = Notice(
    code="after_search",
    message="this answer uses trials of the ended search, so bssearch does not store the answer",
)

# Error of the noise scale as an estimate of the critical batch size, measured on several models.
PROXY = "differ from the critical batch size by a factor of 1.5 to 8"


def about_noise(found: NoiseMeasurement, unit: str) -> Iterator[Notice]:
    if noise_scale_of(found.noise) is None:
        low = found.noise.adam_low or found.noise.low
        known = f"the scale is above {low:.3g} {unit}" if low else "the noise hides the gradient"
        yield Notice(
            code="noise_not_measured",
            message=f"bssearch could not measure the gradient noise scale: {known}; raise --seconds",
        )
    elif found.reason is not None:
        yield Notice(
            code="noise_moving",
            message=f"bssearch measured the noise scale far from the target ({found.reason}), but the scale usually "
            "grows toward the target",
        )


def noise_scale_of(noise: GradientNoise) -> float | None:
    """Return the noise scale for Adam, else for SGD; None if neither scale has an interval between 0 and ∞."""
    for scale, low, high in ((noise.adam_scale, noise.adam_low, noise.adam_high), (noise.scale, noise.low, noise.high)):
        if scale and low and high and 0 < low <= scale <= high < math.inf:
            return scale
    return None


def caveats(
    spec: StudySpec,
    preset: str | None,
    target: Target,
    runs: Sequence[TrialRecord],
    noise_scale: float | None,
    of_noise: Sequence[Notice],
    epochs: float | None,
) -> list[Notice]:
    """Return a notice for each limitation of a quick answer; ``target`` may be easier than the study's target."""
    sizes = {run.configuration.batch_size for run in runs if run.outcome and run.outcome.steps_to_target}
    rests = f"the answer depends on the noise scale alone, which may {PROXY}"
    parameters = spec.default_configuration.parameters
    horizon = parameters.get("horizon_samples")
    told = [
        (
            "easier_target",
            target != spec.record_target,
            f"the default missed {spec.target.metric} {spec.target.value:g}, so the answer compares runs at the easier "
            f"target {target.value:.4g}, which usually has a smaller critical batch size",
        ),
        *((one.code, True, one.message) for one in of_noise),
        (
            "one_batch_size",
            len(sizes) < 2,
            "fewer than two batch sizes reached the answer's target, and "
            + ("the noise scale is unknown" if noise_scale is None else rests)
            + "; raise --seconds for more runs",
        ),
        (
            "other_objective",
            spec.objective != TimeToTarget.name,
            f"the study's objective is {spec.objective}, but a quick answer minimises the time to the target",
        ),
        (
            "fixed_horizon",
            horizon is not None,
            f"the default's {parameters.get('schedule')} schedule ends after {horizon or 0:g} samples, so runs "
            "differ in the final metric, not in the time to the target",
        ),
        (
            "fine_tuning",
            preset == FINE_TUNING,
            "a quick answer does not measure forgetting or generalisation after fine-tuning",
        ),
        (
            "many_epochs",
            (epochs or 0.0) > MANY_EPOCHS,
            f"the default needs {epochs or 0.0:.1f} epochs, but the law of the critical batch size assumes new "
            "samples and no overfitting",
        ),
    ]
    return [Notice(code=code, message=message) for code, holds, message in told if holds]


WAY = 0.9  # if the default misses the target, the answer compares runs at this share of the default's progress


def quick(spec: StudySpec, launch: Launch = HERE, *, seconds: float = QUICK_SECONDS) -> QuickAnswer:
    require(0 < seconds < math.inf, f"seconds = {seconds:g} must be a finite number > 0")
    began = time.monotonic()
    with opened(spec, launch) as study:
        return stored_quick_answer(study, QuickPlan(seconds, began), spec.preset)


def stored_quick_answer(study: OpenStudy, plan: QuickPlan, preset: str | None = None) -> QuickAnswer:
    """Make a quick answer, and store it unless it uses an ended search's trials."""
    found = quick_answer(study, plan, preset)
    if stored_end(study.store, study.spec.name) is not None:
        return found.model_copy(update={"warnings": [*found.warnings, AFTER_SEARCH]})
    save_quick(study.store, study.spec.name, found)
    return found


def quick_answer(study: OpenStudy, plan: QuickPlan, preset: str | None = None) -> QuickAnswer:
    """Make a quick answer without storing it.

    Raises `UsageError` if no run of the default has a result, or if the default does not train.
    """
    spec = study.spec
    study.driver().run_planned(plan.next_size, Phase.SEARCH)
    history = study.history()
    default = required(
        ended_run(history, spec.default_configuration),
        f"no run of the default configuration of study {spec.name!r} has a result",
        hint=f"`bssearch trial list {spec.name}` shows how the runs ended",
    )
    target = comparable_target(study, default, plan)
    noise, warnings = _noise_scale(study, plan)
    runs = _at(study, by_rule(history), target)
    posterior, optimum = expected(history, law_points(runs), noise)
    size = optimum.step.batch_size
    study.driver().run_planned(plan.next_rate(size), Phase.SEARCH)
    history = study.history()
    line, (low, high) = fit_step_time(list(history.probes.values())), posterior.interval
    rule = rule_configuration(history, size).learning_rate
    others = [run for run in _at_any_rate(history, size) if run.configuration.learning_rate != rule]
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
        runs=[_run(one) for one in [*runs, *others]],
        seconds=plan.passed,
        warnings=caveats(spec, preset, target, runs, noise, warnings, _epochs(default, study.train_samples)),
    )


def learning_rate_range(default: float, rate: float, ratio: float) -> list[float]:
    """Return the learning-rate range that spans the default, its linear scaling, and ``rate`` × and ÷ `RATE_STEP`."""
    ends = (default, default * ratio, rate / RATE_STEP, rate * RATE_STEP)
    return [min(ends), max(ends)]


def comparable_target(study: OpenStudy, default: TrialRecord, plan: QuickPlan) -> Target:
    """Return the study's target, or the metric at `WAY` of the default's progress if the default missed the target.

    Raises `UsageError` if the default does not train.
    """
    target = study.spec.record_target
    if default.state is TrialState.REACHED:
        return target
    gains = _gains(study, default)
    if not _trains(default, gains):
        raise _does_not_train(study, default, plan)
    return Target(metric=target.metric, value=target.gain(gains[0] + WAY * (max(gains) - gains[0])), goal=target.goal)


def _gains(study: OpenStudy, run: TrialRecord) -> list[float]:
    curve = study.store.trials.curves(study.spec.name, [run.number])[run.number]
    gains = [study.spec.record_target.gain(one.metric) for one in curve]
    return [gain for gain in gains if math.isfinite(gain)]


def _trains(run: TrialRecord, gains: Sequence[float]) -> bool:
    return run.state is not TrialState.DIVERGED and bool(gains) and max(gains) > gains[0]


def _does_not_train(study: OpenStudy, default: TrialRecord, plan: QuickPlan) -> UsageError:
    size, rule = default.configuration.batch_size, default.configuration.learning_rate
    why = default.outcome.reason if default.outcome else default.state
    problem = f"the default does not train: learning_rate = {rule:g} at batch {size} ({why})"
    tried = []
    for rate in (rule / RATE_STEP**2, rule * RATE_STEP**2):
        configuration = any_configuration_of(study.spec, {"batch_size": size, "learning_rate": rate})
        study.driver().run_planned(plan.once(configuration), Phase.SEARCH)
        run = ended_run(study.history(), configuration)
        if run is not None and _trains(run, _gains(study, run)):
            hint = f"make another study with --set default.learning_rate={rate:.3g} --set name={study.spec.name}-2"
            return UsageError(f"{problem}; the default trains with learning rate {rate:.3g}", hint=hint)
        tried.append(f"{rate:.3g}")
    longer = f"raise --seconds {plan.seconds:g} for a longer training; " if default.state is TrialState.CAPPED else ""
    hint = f"{longer}test the workload, the loss and the first steps with `bssearch check`"
    return UsageError(
        f"{problem}; the default does not train with learning rate {' or '.join(tried)} either", hint=hint
    )


def _optimum(history: History, batch_size: int) -> tuple[QuickOptimum, float]:
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
    if target == study.spec.record_target:
        return list(runs)
    curves = study.store.trials.curves(study.spec.name, [run.number for run in runs])
    return [at_target(run, curves[run.number], target, None) for run in runs]


def _noise_scale(study: OpenStudy, plan: QuickPlan) -> tuple[float | None, list[Notice]]:
    try:
        found = probe_noise(
            study, plan.noise_seconds(study.history()), train_seconds_limit=SHARE_OF_A_RUN * plan.seconds
        )
    except (WorkloadError, LaunchError, UsageError) as error:
        message = f"bssearch could not measure the gradient noise scale: {with_hint(error)}"
        return None, [Notice(code="noise_not_measured", message=message)]
    return noise_scale_of(found.noise), list(about_noise(found, study.spec.training.batch_unit))


def _epochs(run: TrialRecord, train_samples: int | None) -> float | None:
    samples = None if run.outcome is None else samples_after(run, run.outcome.steps_to_target)
    return None if samples is None or not train_samples else samples / train_samples


def _run(trial: TrialRecord) -> QuickRun:
    outcome = trial.outcome
    assert outcome is not None, "the trial has ended"
    return QuickRun(
        trial=trial.number,
        batch_size=trial.configuration.batch_size,
        learning_rate=trial.configuration.learning_rate,
        steps=outcome.steps_to_target,
        train_seconds=outcome.train_seconds if outcome.time_to_target_s is None else outcome.time_to_target_s,
    )


class Kept(Promise):
    """A study's quick answer, compared with the search."""

    study: str


class TrackRecord(Model):
    """A database's quick answers, compared with the searches."""

    studies: list[Kept]
    held: int  # number of intervals that overlap the search's flat range
    median_time_ratio: float | None  # time at the quick answer's batch size over the time at the optimum
    waiting: list[str]  # studies without a confirmed search


def track_record(store: Store) -> TrackRecord:
    kept, waiting = [], []
    for study in store.studies.summaries():
        if stored_quick(store, study.name) is None:
            continue
        promise = None
        with suppress(TargetNotReachedError):
            promise = answer(store, study.name).quick
        if promise is None:
            waiting.append(study.name)
        else:
            kept.append(Kept(study=study.name, **promise.model_dump()))
    return TrackRecord(
        studies=kept,
        held=sum(one.holds for one in kept),
        median_time_ratio=median_known([one.time_ratio for one in kept]),
        waiting=waiting,
    )
