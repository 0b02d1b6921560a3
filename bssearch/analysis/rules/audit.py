"""Compare the rules of thumb with a study."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from bssearch.analysis.answer import Answer, BatchScheduleAnswer
from bssearch.analysis.batches import default_configuration
from bssearch.analysis.build_answer import compared_trials
from bssearch.analysis.generalisation import FinalMetrics
from bssearch.analysis.growing import growing_batch, judge_growing
from bssearch.analysis.objectives import make_objective, objective_of
from bssearch.analysis.optimum import Candidate, decide, estimate, ratio_interval
from bssearch.analysis.rules.rule_book import (
    ADAM,
    ADAM_ABOVE,
    BROKE,
    HELD,
    NONE,
    RULES,
    SGD,
    SGD_UP_TO,
    Finding,
    Judgement,
    Regret,
    Rule,
    judge,
    small_batch,
)
from bssearch.analysis.shape import CriticalBatch, Model, Parameters, parameters_of
from bssearch.records import (
    FEWEST_RUNS,
    FEWEST_SIZES,
    FROM_90_TO_95,
    LARGE_BATCH,
    LAYERWISE,
    Configuration,
    Phase,
    StepSeconds,
    StepTime,
    TrialRecord,
    TrialState,
    grouped,
    step_seconds_of,
    student_t,
    train_seconds_of,
)
from bssearch.records.text import plural
from bssearch.spec import FINE_TUNING, StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary

MEMORY_SHARE = 0.8

NEAR = 2.0  # the compared batch size may be this factor below `MEMORY_SHARE`

SAME = 1.25  # noise scale and critical batch size count as equal within this factor

APART = 2.0  # noise scale and critical batch size differ beyond this factor

LARGER, EPOCHS = 4, (1.5, 2.0)  # ratio of batch sizes, and the rule's ratios of epochs

COSTS = (1.5, 2.0)  # the rule's ratios of step times with and without accumulation

SMALLER = (10.0, 20.0)  # the rule's ratios of the batch size from scratch to the batch size for fine-tuning


def command(spec: StudySpec, verb: str, options: str = "") -> str:
    return "" if spec.is_imported else f"; run `bssearch {verb} {shlex.quote(spec.name)}{options}`"


def about_memory(
    spec: StudySpec,
    answer: Answer,
    optima: Mapping[int, Candidate],
    step_seconds: StepSeconds,
    memory: MemoryBoundary,
    train_samples: int | None,
) -> RuleFinding:
    """Compare the optimum with the batch size nearest below 80 % of the largest micro-batch that fits."""
    if memory.fits is None:
        return _not_run(Rule.MEMORY, None, f"no known micro-batch size fits{command(spec, 'probe memory')}")
    whole = train_samples is not None and memory.fits >= train_samples
    if memory.too_large is None and not whole:
        known = f"no micro-batch ran out of memory; {memory.fits} is the largest size that ran"
        return _not_run(Rule.MEMORY, None, known + command(spec, "probe memory"))
    share = MEMORY_SHARE * memory.fits
    size = max((size for size in optima if size <= share), default=None)
    if size is None or size * NEAR < share:
        nearest = "no smaller batch size ran" if size is None else f"the nearest smaller size that ran is {size}"
        return _not_run(Rule.MEMORY, None, f"80 % of memory is batch {share:.0f}; {nearest}")
    where = f"80 % of the {memory.fits} samples that fit is {share:.0f}"
    tuned, there = optima[answer.optimal.batch_size], optima[size]
    numbers = tuple(run.number for run in there.runs)
    if there is tuned:
        return _finding(
            Rule.MEMORY, size, Judgement("held", f"{where}; the nearest batch size is the optimum", NONE), numbers
        )
    for one in (tuned, there):
        if not one.is_confirmed:
            known = f"{where}; confirmation of batch {one.configuration.batch_size} is incomplete"
            return _not_run(Rule.MEMORY, size, known + command(spec, "study confirm"))
    judgement = judge(there, tuned, step_seconds, wanted=len(there.runs), limit=spec.budget.trial_train_seconds)
    reason = f"{judgement.reason}; {where}, against the optimum's batch {answer.optimal.batch_size}"
    return _finding(Rule.MEMORY, size, Judgement(judgement.finding, reason, judgement.regret), numbers)


def about_noise_scale(spec: StudySpec, answer: Answer) -> RuleFinding:
    """Compare the gradient noise scale with the critical batch size.

    The rule broke if the ratio's interval is beyond a factor of `APART`. The rule held if the intervals overlap, the
    ratio is within `SAME`, and the ratio's interval is within `APART`.
    """
    noise, fit = answer.measured.noise_scale, answer.fit
    if noise is None:
        return _not_run(Rule.NOISE_SCALE, None, f"the noise scale is unknown{command(spec, 'probe noise')}")
    if fit is None or fit.verdict != "fits":
        why = (
            "the study has no law"
            if fit is None
            else "the law fits poorly"
            if fit.verdict == "poor"
            else "the law needs three tuned batch sizes"
        )
        return _not_run(Rule.NOISE_SCALE, None, f"{why}, so the critical batch size is unknown")
    (scale, low, high), seen = (noise.scale, noise.low, noise.high), ""
    if answer.optimal.parameters["optimizer"] == "adamw" and noise.adam_low is not None:
        (scale, low, high), seen = (noise.adam_scale, noise.adam_low, noise.adam_high), " with Adam's preconditioner"
    far = "" if noise.far_from_target is None else f" (measured far from the target: {noise.far_from_target})"
    shown = f"≥ {low:.3g}" if scale is None else f"{scale:.3g}"
    regret, overlap = _ratio((scale, low, high), fit.b_crit)
    reason = f"noise scale{seen} {shown}{far} / critical batch {fit.b_crit.in_words}"
    return _finding(Rule.NOISE_SCALE, None, Judgement(_apart(regret, overlap), reason, regret))


def _ratio(noise: tuple[float | None, float, float | None], critical: CriticalBatch) -> tuple[Regret | None, bool]:
    scale, low, high = noise
    overlap = (critical.high is None or low <= critical.high) and (
        high is None or critical.low is None or critical.low <= high
    )
    if scale is None:
        if low <= 0:
            return None, overlap
        bound = None if critical.high is None else low / critical.high
        return Regret(value=low / critical.estimate, low=bound, high=None, at_least=True), overlap
    value = scale / critical.estimate
    below = _quadrature(_log(scale, low), _log(critical.high, critical.estimate))
    above = _quadrature(_log(high, scale), _log(critical.estimate, critical.low))
    return (
        Regret(
            value=value,
            low=None if below is None else value * math.exp(-below),
            high=None if above is None else value * math.exp(above),
            at_least=False,
        ),
        overlap,
    )


def _log(larger: float | None, smaller: float | None) -> float | None:
    return None if larger is None or smaller is None or smaller <= 0 else math.log(larger / smaller)


def _quadrature(noise: float | None, critical: float | None) -> float | None:
    # half widths of logarithms
    return None if noise is None or critical is None else math.hypot(noise, FROM_90_TO_95 * critical)


def _apart(ratio: Regret | None, overlap: bool) -> Finding:
    if ratio is None:
        return "undecided"
    low, high = ratio.low or 0.0, math.inf if ratio.high is None else ratio.high
    if low > APART or high < 1 / APART:
        return "broke"
    near = not ratio.at_least and 1 / SAME <= ratio.value <= SAME
    return "held" if near and overlap and low >= 1 / APART and high <= APART else "undecided"


def about_generalisation(spec: StudySpec, answer: Answer) -> RuleFinding:
    """Judge whether the largest batch size's final metric is over 2 points worse than the best metric."""
    found = answer.generalisation
    if found is None or len(found.batches) < 2:
        known = (
            f"fewer than two batch sizes trained to the same full limit; {FEWEST_RUNS} runs of two sizes take "
            f"{2 * FEWEST_RUNS * spec.budget.trial_train_seconds:.3g} train seconds"
        )
        return _not_run(Rule.GENERALISATION, None, known + command(spec, "study confirm", " --to-budget"))
    largest, points = found.batches[-1], found.notable_gap
    numbers = tuple(largest.trial_numbers)
    if largest.batch_size == found.best_batch_size:
        return _finding(Rule.GENERALISATION, largest.batch_size, _of_best_largest(found.batches[:-1], points), numbers)
    gap = largest.gap
    if gap is None or gap.low is None or gap.high is None:
        known = (
            f"no run of batch {largest.batch_size} trained to the full limit"
            if gap is None
            else f"the gap of {gap.value:.3g} has no interval"
        )
        known += f"; {FEWEST_RUNS} runs per batch size are necessary{command(spec, 'study confirm', ' --to-budget')}"
        return _not_run(Rule.GENERALISATION, largest.batch_size, known)
    reason = (
        f"the final metric is {gap.value:.3g} [{gap.low:.3g}, {gap.high:.3g}] worse than at batch "
        f"{found.best_batch_size}; 2 points are {points:.3g}"
    )
    finding: Finding = "held" if gap.low > points else "broke" if gap.high < points else "undecided"
    return _finding(Rule.GENERALISATION, largest.batch_size, Judgement(finding, reason), numbers)


def _of_best_largest(others: Sequence[FinalMetrics], points: float) -> Judgement:
    lows = [one.gap.low for one in others if one.gap is not None and one.gap.low is not None]
    text = "the largest batch size ends with the best metric"
    if len(lows) < len(others):
        return Judgement("undecided", f"{text}; an interval needs three runs per batch size")
    return Judgement("broke" if min(lows) > -points else "undecided", text)


def about_epochs(spec: StudySpec, optima: Mapping[int, Candidate]) -> list[RuleFinding]:
    """Compare the samples to the target of confirmed batch sizes a factor `LARGER` apart."""
    samples = make_objective("samples_to_target", spec.record_target)
    confirmed = {size: estimate(one.runs, samples) for size, one in optima.items() if one.is_confirmed}
    found = []
    for size, larger in ((one, LARGER * one) for one in sorted(confirmed) if LARGER * one in confirmed):
        if (interval := ratio_interval(confirmed[larger], confirmed[size])) is None:
            needs = f"batch {size} and {larger} each need three runs or more, and all runs must reach the target"
            found.append(_not_run(Rule.EPOCHS, larger, needs))
            continue
        value = math.exp(confirmed[larger].log_mean - confirmed[size].log_mean)
        ratio = Regret(value=value, low=interval[0], high=interval[1], at_least=False)
        numbers = tuple(run.number for one in (size, larger) for run in optima[one].runs)
        reason = f"samples to the target of batch {larger} / samples of batch {size}"
        found.append(_finding(Rule.EPOCHS, larger, Judgement(_within(ratio, EPOCHS), reason, ratio), numbers))
    known = f"the study has no confirmed batch sizes a factor {LARGER} apart"
    return found or [_not_run(Rule.EPOCHS, None, known + command(spec, "study confirm"))]


def _within(ratio: Regret, claimed: tuple[float, float]) -> Finding:
    low, high = ratio.low or 0.0, math.inf if ratio.high is None else ratio.high
    if high < claimed[0] or low > claimed[1]:
        return "broke"
    return "held" if claimed[0] <= low and high <= claimed[1] else "undecided"


def about_accumulation(spec: StudySpec, step_times: Collection[StepTime]) -> list[RuleFinding]:
    """Compare step times with and without accumulation; the rule held if the ratio's interval is within `COSTS`."""
    found = []
    for size in sorted({one.batch_size for one in step_times}):
        here = sorted(
            [one for one in step_times if one.batch_size == size and one.step_seconds], key=lambda one: one.contended
        )
        whole = next((one for one in here if one.micro_batch_size == size), None)
        split = min(
            (one for one in here if one.micro_batch_size < size), key=lambda one: one.micro_batch_size, default=None
        )
        if whole is not None and split is not None:
            found.append(_cost(whole, split, command(spec, "study audit")))
    known = "no batch size has step times both with and without accumulation"
    return found or [_not_run(Rule.ACCUMULATION, None, known + command(spec, "study audit"))]


def _cost(whole: StepTime, split: StepTime, again: str) -> RuleFinding:
    if whole.contended or split.contended:
        sizes = " and ".join(str(one.micro_batch_size) for one in (whole, split) if one.contended)
        why = f"other work disturbed the step times of micro-batch {sizes}{again}"
        return _not_run(Rule.ACCUMULATION, whole.batch_size, why)
    assert whole.step_seconds is not None and split.step_seconds is not None, "the step times are known"
    low = (split.step_seconds_low or split.step_seconds) / (whole.step_seconds_high or whole.step_seconds)
    high = (split.step_seconds_high or split.step_seconds) / (whole.step_seconds_low or whole.step_seconds)
    ratio = Regret(value=split.step_seconds / whole.step_seconds, low=low, high=high, at_least=False)
    count, micro = split.batch_size // split.micro_batch_size, split.micro_batch_size
    seconds = (
        f"{1000 * split.step_seconds:.3g} ms per step, against {1000 * whole.step_seconds:.3g} ms without accumulation"
    )
    reason = f"{count} micro-batches of {micro}: {seconds}"
    return _finding(Rule.ACCUMULATION, whole.batch_size, Judgement(_within(ratio, COSTS), reason, ratio))


def about_fine_tuning(spec: StudySpec, answer: Answer, scratch: Mapping[str, Answer]) -> list[RuleFinding]:
    # The flat ranges give the interval, open if a range is at the end of the batch sizes.
    if spec.preset != FINE_TUNING:
        return [_not_run(Rule.FINE_TUNING, None, f"the spec has no preset {FINE_TUNING}")]
    found, (low, high) = [], _flat_range(answer)
    for name, one in scratch.items():
        size, from_scratch = answer.optimal.batch_size, one.optimal.batch_size
        smallest, largest = _flat_range(one)
        ratio = Regret(
            value=from_scratch / size,
            low=None if smallest is None or high is None else smallest / high,
            high=None if largest is None or low is None else largest / low,
            at_least=False,
        )
        reason = f"batch {from_scratch} of study {name} / batch {size}; the interval spans the sizes within 5 %"
        finding = _within(ratio, SMALLER)
        if answer.provisional or one.provisional:
            finding, reason = "undecided", f"{reason}, but an answer is provisional"
        found.append(_finding(Rule.FINE_TUNING, size, Judgement(finding, reason, ratio)))
    known = f"the database has no answer of a study that trains {spec.workload} from scratch for {spec.objective}"
    return found or [_not_run(Rule.FINE_TUNING, None, known)]


def _flat_range(answer: Answer) -> tuple[int | None, int | None]:
    (low, high), rows = answer.flat_range, answer.batches
    return None if low == rows[0].batch_size else low, None if high == rows[-1].batch_size else high


def _not_run(rule: Rule, batch_size: int | None, reason: str) -> RuleFinding:
    return _finding(rule, batch_size, Judgement("not_run", reason))


def _other_kind(
    trials: Sequence[TrialRecord], tuned: Candidate, is_other: Callable[[str], bool], wanted: str
) -> Configuration | str:
    # The best search configuration with the `wanted` optimizers, or the reason against
    size = tuned.configuration.batch_size
    found = [
        (figure, trial.number, trial.configuration)
        for trial in trials
        if trial.phase is Phase.SEARCH
        and trial.state is TrialState.REACHED
        and trial.configuration.batch_size == size
        and is_other(trial.configuration.optimizer)
        if (figure := tuned.objective.figure(trial)) is not None
    ]
    if not found:
        remedy = (
            "import such a run"
            if all(trial.is_imported for trial in trials)
            else f"add such a trial with `bssearch trial add STUDY batch_size={size} optimizer=… learning_rate=…`"
        )
        return f"no search trial of batch {size} with {wanted} reached the target; {remedy}"
    return min(found, key=lambda one: one[:2])[2]


def _other_of_layerwise(trials: Sequence[TrialRecord], tuned: Candidate) -> Configuration | str:
    if tuned.configuration.optimizer in LAYERWISE:
        return _other_kind(trials, tuned, lambda one: one not in LAYERWISE, "an optimizer other than lars and lamb")
    return _other_kind(trials, tuned, lambda one: one in LAYERWISE, "lars or lamb")


def _sgd_or_adam(trials: Sequence[TrialRecord], tuned: Candidate) -> Configuration | str:
    size, optimizer = tuned.configuration.batch_size, tuned.configuration.optimizer
    if SGD_UP_TO < size <= ADAM_ABOVE:
        return f"the rule leaves the optimizer open above batch {SGD_UP_TO} and up to {ADAM_ABOVE}"
    if optimizer not in (*SGD, *ADAM):
        return f"the rule is about SGD and Adam, but batch {size} trains best with {optimizer}"
    other = ADAM if optimizer in SGD else SGD
    return _other_kind(trials, tuned, lambda one: one in other, " or ".join(other))


def _judge_sgd_or_adam(
    other: Candidate, tuned: Candidate, step_seconds: StepSeconds, *, wanted: int, limit: float
) -> Judgement:
    # Judge by the rule's optimizer's figure / the other optimizer's
    named = SGD if tuned.configuration.batch_size <= SGD_UP_TO else ADAM
    pair = (tuned, other) if tuned.configuration.optimizer in named else (other, tuned)
    return _of_pair(*pair, step_seconds, wanted=wanted, limit=limit)


def _judge_layerwise(
    other: Candidate, tuned: Candidate, step_seconds: StepSeconds, *, wanted: int, limit: float
) -> Judgement:
    # Judge by the figure without / with a layerwise optimizer; undecided below `LARGE_BATCH`
    size, is_layerwise = tuned.configuration.batch_size, tuned.configuration.optimizer in LAYERWISE
    pair = (other, tuned) if is_layerwise else (tuned, other)
    found = _of_pair(*pair, step_seconds, wanted=wanted, limit=limit).reversed()
    if size >= LARGE_BATCH:
        return found
    below = f"the rule is about batch sizes ≥ {LARGE_BATCH:,}, not {size}"
    return Judgement("undecided", f"{below}; {found.reason}", found.regret)


def _of_pair(rule: Candidate, other: Candidate, step_seconds: StepSeconds, *, wanted: int, limit: float) -> Judgement:
    names = rule.configuration.optimizer, other.configuration.optimizer
    if other.estimate.reached:
        found = judge(rule, other, step_seconds, wanted=wanted, limit=limit)
    else:
        runs = len(other.runs)
        found = Judgement(
            "held" if runs >= wanted else "undecided", f"0 of {runs} runs with {names[1]} reached the target"
        )
    return replace(found, reason=f"{names[0]} against {names[1]}: {found.reason}")


ROUNDING = 1e-9

SLOPES = (0.0, 0.5, 1.0)  # none, sqrt, linear

FULL_LIMIT_PHASES = frozenset({Phase.AUDIT, Phase.TO_BUDGET})


class RuleFinding(Model):
    """The finding on a rule.

    ``regret`` is the rule's objective value / the tuned optimum's, or another ratio that the rule is about.
    """

    rule: Rule
    batch_size: int | None
    configuration: Parameters | None
    regret: Regret | None
    verdict: Finding
    reason: str
    trial_numbers: list[int]


class LearningRateSlope(Model):
    """The slope of log learning rate over log batch size; ``excludes`` has the `SLOPES` outside the 95 % interval."""

    estimate: float
    low: float
    high: float
    excludes: list[float]


class Audit(Model):
    """Findings on the rules of thumb."""

    study: str
    rules: list[RuleFinding]
    learning_rate_slope: LearningRateSlope | None
    spent_train_seconds: float


@dataclass(frozen=True)
class Case:
    """A rule at a batch size, with the configuration to run or the ``reason`` for no run."""

    rule: Rule
    batch_size: int
    configuration: Configuration | None = None
    tuned: Candidate | None = None
    reason: str = ""

    @property
    def is_tuned(self) -> bool:
        return (
            self.configuration is not None and self.tuned is not None and self.configuration == self.tuned.configuration
        )

    @property
    def can_be_decided(self) -> bool:
        """False for the rule on LARS and LAMB below `LARGE_BATCH`, because the judgement is always undecided."""
        return self.rule is not Rule.LAYERWISE or self.batch_size >= LARGE_BATCH


def audit(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    answer: Answer,
    step_times: Collection[StepTime] = (),
    memory: MemoryBoundary = UNKNOWN,
    *,
    runs: int | None = None,
    train_samples: int | None = None,
    train_seconds: float | None = None,
    scratch: Mapping[str, Answer] = MappingProxyType({}),
) -> Audit:
    """Compare each rule with the study's records.

    ``train_seconds`` is the budget of audit runs; ``scratch`` has answers of studies that train from scratch.
    """
    wanted = spec.confirm.runs if runs is None else runs
    optima = tuned_optima(spec, trials, step_times, memory)
    step_seconds = step_seconds_of(step_times, spec.timed_model)
    spent = spent_train_seconds(trials)
    unmade = _why_unmade(spec, train_seconds if train_seconds is not None and spent >= train_seconds else None)
    return Audit(
        study=answer.study,
        rules=[
            *(
                of_case(spec, trials, case, step_seconds, wanted, unmade)
                for case in cases(spec, trials, answer, optima)
            ),
            about_memory(spec, answer, optima, step_seconds, memory, train_samples),
            about_noise_scale(spec, answer),
            *about_epochs(spec, optima),
            about_generalisation(spec, answer),
            *about_accumulation(spec, step_times),
            *about_fine_tuning(spec, answer, scratch),
        ],
        learning_rate_slope=learning_rate_slope(spec, answer),
        spent_train_seconds=spent,
    )


def cases(
    spec: StudySpec, trials: Sequence[TrialRecord], answer: Answer, optima: Mapping[int, Candidate]
) -> list[Case]:
    """Return each rule's cases, mostly at the optimum and at the largest confirmed batch size without accumulation."""
    base = default_configuration(spec, trials)
    largest = max(
        (size for size, one in optima.items() if one.is_confirmed and one.configuration.accumulation_steps == 1),
        default=answer.largest_that_fits.batch_size,
    )
    best = answer.optimal.batch_size
    both = sorted({best, largest})
    sizes, top = [size for size in both if size != base.batch_size], both[-1]
    others = [
        _case(spec, base, Rule.LAYERWISE, top, optima[top], trials),
        *(_case(spec, base, Rule.SGD_OR_ADAM, size, optima[size], trials) for size in both),
        _small_batch(spec, optima, best),
        _case(spec, base, Rule.GROWING, best, optima[best], trials, answer.batch_schedule),
    ]
    if not sizes:
        reason = (
            "the optimum and the largest confirmed batch size are the default batch size, so the rule changes nothing"
        )
        return [*(Case(rule, base.batch_size, reason=reason) for rule in RULES), *others]
    return [*(_case(spec, base, rule, size, optima[size], trials) for rule in RULES for size in sizes), *others]


def tuned_optima(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    step_times: Collection[StepTime] = (),
    memory: MemoryBoundary = UNKNOWN,
) -> Mapping[int, Candidate]:
    compared, step_seconds = compared_trials(trials, memory), step_seconds_of(step_times, spec.timed_model)
    verdict = decide(compared, spec.confirm.runs, objective_of(spec), step_seconds)
    return {} if verdict is None else verdict.by_batch


def runs_of(spec: StudySpec, trials: Sequence[TrialRecord], configuration: Configuration) -> tuple[TrialRecord, ...]:
    """Return a configuration's runs with results, one per seed: confirmation runs, else runs of `FULL_LIMIT_PHASES`."""
    completed = [one for one in trials if one.configuration == configuration and is_result(spec, one)]
    by_seed = grouped(
        (one.seed, one) for phases in ({Phase.CONFIRM}, FULL_LIMIT_PHASES) for one in completed if one.phase in phases
    )
    return tuple(runs[0] for runs in by_seed.values())


def is_result(spec: StudySpec, trial: TrialRecord) -> bool:
    """True if a run reached the target, diverged, or had the full limit and did not run out of memory."""
    ended_itself = trial.state in {TrialState.REACHED, TrialState.DIVERGED}
    is_whole = ended_itself or trial.train_seconds_limit >= spec.budget.trial_train_seconds
    return is_whole and trial.state.has_result and trial.state is not TrialState.OOM


def spent_train_seconds(trials: Collection[TrialRecord]) -> float:
    return train_seconds_of(trial for trial in trials if trial.phase is Phase.AUDIT)


def learning_rate_slope(spec: StudySpec, answer: Answer) -> LearningRateSlope | None:
    """Return the recommended optimizer's slope; None if the rate is fixed or fewer than three batch sizes are tuned."""
    if isinstance(spec.space.learning_rate, int | float):
        return None
    optimizer = answer.optimal.parameters.get("optimizer")
    points = [
        (math.log(row.batch_size), math.log(float(rate)))
        for row in answer.batches
        if row.best is not None and not row.untuned and row.best.parameters.get("optimizer") == optimizer
        if (rate := row.best.parameters.get("learning_rate")) is not None
    ]
    if len(points) < FEWEST_SIZES:
        return None
    sizes, rates = np.array(points).T
    (slope, _), covariance = np.polyfit(sizes, rates, 1, cov=True)
    half = student_t(len(points) - 2) * math.sqrt(covariance[0, 0])
    return LearningRateSlope(
        estimate=float(slope),
        low=float(slope - half),
        high=float(slope + half),
        excludes=[one for one in SLOPES if abs(one - slope) > half + ROUNDING],
    )


def _case(
    spec: StudySpec,
    base: Configuration,
    rule: Rule,
    batch_size: int,
    tuned: Candidate,
    trials: Sequence[TrialRecord],
    found: BatchScheduleAnswer | None = None,
) -> Case:
    if not tuned.is_confirmed:
        return Case(rule, batch_size, reason=f"confirmation is incomplete{command(spec, 'study confirm')}")
    if not math.isfinite(tuned.value):
        reached = f"{tuned.estimate.reached} of {tuned.estimate.runs}"
        return Case(rule, batch_size, reason=f"only {reached} runs of the tuned configuration reached the target")
    given: Configuration | str
    match rule:
        case Rule.LAYERWISE:
            given = _other_of_layerwise(trials, tuned)
        case Rule.SGD_OR_ADAM:
            given = _sgd_or_adam(trials, tuned)
        case Rule.GROWING:
            given = growing_batch(spec, trials, tuned, found)
        case _ if not spec.default_is_known:
            given = "the default is unknown; pass --default-batch to `bssearch import`"
        case _:
            given = RULES[rule](spec.space, base, tuned.configuration)
    return Case(rule, batch_size, reason=given) if isinstance(given, str) else Case(rule, batch_size, given, tuned)


def _small_batch(spec: StudySpec, optima: Mapping[int, Candidate], best: int) -> Case:
    accumulated = min(
        (one for one in optima.values() if one.is_confirmed and one.configuration.accumulation_steps > 1),
        key=lambda one: one.value,
        default=None,
    )
    if accumulated is None or not math.isfinite(accumulated.value):
        return Case(Rule.SMALL_BATCH, best, reason="no confirmed batch size with accumulation reached the target")
    size = accumulated.configuration.batch_size // accumulated.configuration.accumulation_steps
    if size not in spec.batch_sizes:
        return Case(Rule.SMALL_BATCH, size, reason=f"space.batch_size lacks the micro-batch size {size}")
    near = optima.get(size)
    confirmed = near.configuration if near is not None and near.is_confirmed else None
    given = small_batch(spec.space, accumulated.configuration, confirmed)
    if isinstance(given, str):
        return Case(Rule.SMALL_BATCH, size, reason=given)
    return Case(Rule.SMALL_BATCH, size, given, accumulated)


def by_cost(spec: StudySpec, found: Sequence[Case]) -> list[Case]:
    asked = (case for case in found if case.configuration is not None and not case.is_tuned)
    return sorted(asked, key=lambda case: (not case.can_be_decided, run_seconds(spec, case)))


def run_seconds(spec: StudySpec, case: Case) -> float:
    known = None if case.tuned is None else case.tuned.time.median
    return spec.budget.trial_train_seconds if known is None else known


def runs_to_decide(regret: Regret | None, made: int) -> float:
    """Return the runs until the rule holds or breaks, with the interval's width ∝ 1/√runs; infinite if never.

    Twice ``made`` if the interval is unknown.
    """
    if regret is None or not regret.low or regret.high is None:
        return 2.0 * made
    distance = max(math.log(HELD / regret.value), math.log(regret.value / BROKE))
    half = math.log(regret.high / regret.low) / 2
    return made * (half / distance) ** 2 if distance > 0 else math.inf


def of_case(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    case: Case,
    step_seconds: StepSeconds,
    wanted: int,
    unmade: str = "",
) -> RuleFinding:
    """Judge a rule by the runs so far; ``unmade`` is the reason for missing runs."""
    if case.configuration is None or case.tuned is None:
        return _not_run(case.rule, case.batch_size, case.reason)
    if case.is_tuned:
        reason = "the tuned optimum has no warmup" if case.rule is Rule.WARMUP else "the rule gives the tuned optimum"
        judgement, runs = Judgement("held", reason, NONE), case.tuned.runs
    else:
        runs = runs_of(spec, trials, case.configuration)
        judgement = _of_runs(spec, trials, case, runs, step_seconds, wanted, unmade)
    if case.rule is Rule.WARMUP:
        judgement = judgement.reversed()
    return _finding(case.rule, case.batch_size, judgement, [run.number for run in runs], case.configuration)


def _of_runs(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    case: Case,
    runs: tuple[TrialRecord, ...],
    step_seconds: StepSeconds,
    wanted: int,
    unmade: str,
) -> Judgement:
    assert case.configuration is not None and case.tuned is not None, "the case has a configuration to run"
    if len(runs) < wanted and not spec.is_imported:
        cost = (wanted - len(runs)) * run_seconds(spec, case)
        unmade = f"{unmade}; about {cost:.3g} train seconds for {plural(wanted - len(runs), 'run')}"
    if not runs:
        return Judgement("not_run", _why_in_vain(trials, case.configuration) or unmade)
    objective = case.tuned.objective
    tuned = Candidate(case.tuned.configuration, runs_of(spec, trials, case.tuned.configuration), objective)
    rule = Candidate(case.configuration, runs, objective)
    compare = {
        Rule.LAYERWISE: _judge_layerwise,
        Rule.SGD_OR_ADAM: _judge_sgd_or_adam,
        Rule.GROWING: judge_growing,
    }.get(case.rule, judge)
    judgement = compare(rule, tuned, step_seconds, wanted=wanted, limit=spec.budget.trial_train_seconds)
    why = f"{judgement.reason}; {_difference(case.configuration, tuned.configuration)}"
    if case.rule is Rule.SMALL_BATCH:
        why += f", batch {case.batch_size} instead of {tuned.configuration.batch_size}"
    if len(runs) < wanted and judgement.finding == "undecided":
        why += f"; {_why_in_vain(trials, case.configuration) or unmade}"
    return replace(judgement, reason=why)


def _difference(rule: Configuration, tuned: Configuration) -> str:
    mine, theirs = parameters_of(rule), parameters_of(tuned)
    return ", ".join(
        f"{name.replace('_', ' ')} {_shown(mine[name])} instead of {_shown(theirs[name])}"
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    )


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _why_in_vain(trials: Sequence[TrialRecord], configuration: Configuration) -> str:
    vain = [
        trial
        for trial in trials
        if trial.phase in FULL_LIMIT_PHASES
        and trial.configuration.trains_like(configuration)
        and trial.outcome is not None
        if trial.state in {TrialState.FAILED, TrialState.OOM}
    ]
    return f"trial {vain[-1].number} {vain[-1].state}: {vain[-1].outcome.reason}" if vain and vain[-1].outcome else ""


def _why_unmade(spec: StudySpec, spent_budget: float | None) -> str:
    if spec.is_imported:
        return "imported studies cannot run trials"
    if spent_budget is not None:
        return f"the budget of {spent_budget:g} train seconds is spent; raise --train-seconds"
    return f"test the rule with `bssearch study audit {shlex.quote(spec.name)}`"


def _finding(
    rule: Rule,
    batch_size: int | None,
    judgement: Judgement,
    trial_numbers: Collection[int] = (),
    configuration: Configuration | None = None,
) -> RuleFinding:
    whole: Parameters | None = None
    if configuration is not None:
        sizes = ("batch_size", "micro_batch_size", "accumulation_steps")
        whole = {**{name: getattr(configuration, name) for name in sizes}, **parameters_of(configuration)}
    return RuleFinding(
        rule=rule,
        batch_size=batch_size,
        configuration=whole,
        regret=judgement.regret,
        verdict=judgement.finding,
        reason=judgement.reason,
        trial_numbers=list(trial_numbers),
    )
