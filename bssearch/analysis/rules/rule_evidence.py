"""The rules of thumb that give no configuration of their own: what was measured settles them, or nothing does."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from bssearch.analysis.answer import Answer
from bssearch.analysis.generalisation import FinalMetrics
from bssearch.analysis.law.fitted import CriticalBatch
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.optimum import Candidate
from bssearch.analysis.rules.regret import NONE, Finding, Judgement, Regret, judge
from bssearch.records import StepTime
from bssearch.space import MemoryBoundary
from bssearch.spec import StudySpec
from bssearch.step_times import StepSeconds

MEMORY_SHARE = 0.8
"""The share of the largest micro-batch that the rule "fill the memory to 80 %" gives."""

NEAR = 2.0
"""A batch size stands for a share of memory where it is no further below than this factor: one octave. A choice."""

SAME = 1.25
"""A noise scale and a critical batch size within this factor of each other count as equal: a choice."""

APART = 2.0
"""Beyond this factor of each other they differ; between the two nothing is said. A choice."""

FROM_90_TO_95 = 1.96 / 1.645
"""The half width of a 95 % interval over a 90 % one's, both of a normal distribution."""

COSTS = (1.5, 2.0)
"""The factors between which the rule says accumulation multiplies the step time."""


class Evidence(NamedTuple):
    """The verdict on a rule at a batch size (None for the whole study), and the trials behind it."""

    batch_size: int | None
    judgement: Judgement
    trial_numbers: tuple[int, ...] = ()


def command(spec: StudySpec, words: str) -> str:
    """Return the command that would tell, in brackets; nothing of an imported study, of which none can be run."""
    return "" if spec.is_imported else f" (bssearch {words})"


def about_memory(
    spec: StudySpec,
    answer: Answer,
    optima: Mapping[int, Candidate],
    step_seconds: StepSeconds,
    memory: MemoryBoundary,
    train_samples: int | None,
) -> Evidence:
    """Compare the batch size nearest below 80 % of the largest micro-batch known to fit with the optimum.

    Where memory never ran out, the largest that fits is known only where it is the whole training part.
    """
    if memory.fits is None:
        return _not_run(None, f"no micro-batch size is known to fit{command(spec, 'probe memory')}")
    whole = train_samples is not None and memory.fits >= train_samples
    if memory.too_large is None and not whole:
        known = f"no micro-batch ran out of memory; {memory.fits} is the largest that ran"
        return _not_run(None, known + command(spec, "probe memory"))
    share = MEMORY_SHARE * memory.fits
    size = max((size for size in optima if size <= share), default=None)
    if size is None or size * NEAR < share:
        nearest = "none that ran lies below" if size is None else f"the nearest below that ran is {size}"
        return _not_run(None, f"80 % of memory is batch {share:.0f}; {nearest}")
    where = f"80 % of the {memory.fits} samples that fit is {share:.0f}"
    tuned, there = optima[answer.optimal.batch_size], optima[size]
    numbers = tuple(run.number for run in there.runs)
    if there is tuned:
        return Evidence(size, Judgement("held", f"{where}: it is the optimum", NONE), numbers)
    for one in (tuned, there):
        if not one.is_confirmed:
            return _not_run(size, f"{where}; batch {one.configuration.batch_size} has no complete confirmation")
    judgement = judge(there, tuned, step_seconds, wanted=len(there.runs), limit=spec.budget.trial_train_seconds)
    reason = f"{judgement.reason}; {where}, against the optimum's batch {answer.optimal.batch_size}"
    return Evidence(size, Judgement(judgement.finding, reason, judgement.regret), numbers)


def about_noise_scale(spec: StudySpec, answer: Answer) -> Evidence:
    """Compare the gradient noise scale, as Adam sees it under AdamW, with the critical batch size of a law that fits.

    Their ratio's 95 % interval adds the two intervals' half widths on logarithms in quadrature. Held: the estimates are
    within `SAME` of each other, the intervals overlap, and the ratio's lies within `APART`; broke: it lies beyond.
    """
    noise, fit = answer.measured.noise_scale, answer.fit
    if noise is None:
        return _not_run(None, f"no noise scale was measured{command(spec, 'probe noise')}")
    if fit is None or fit.verdict != "fits":
        why = "there is no law" if fit is None else f"the law is {fit.verdict.replace('_', ' ')}"
        return _not_run(None, f"{why}: no critical batch size to compare the noise scale with")
    is_adam = answer.optimal.parameters["optimizer"] == "adamw" and noise.adam_low is not None
    scale, low, high = _adam(noise) if is_adam else (noise.scale, noise.low, noise.high)
    seen = " as Adam sees it" if is_adam else ""
    far = "" if noise.far_from_target is None else f", measured far from the target ({noise.far_from_target})"
    shown = f"≥ {low:.3g}" if scale is None else f"{scale:.3g}"
    regret, overlap = _ratio((scale, low, high), fit.b_crit)
    reason = f"noise scale{seen} {shown} over critical batch {fit.b_crit.in_words}{far}"
    return Evidence(None, Judgement(_apart(regret, overlap), reason, regret))


def _adam(noise: NoiseAnswer) -> tuple[float | None, float, float | None]:
    assert noise.adam_low is not None, "it was measured"
    return noise.adam_scale, noise.adam_low, noise.adam_high


def _ratio(noise: tuple[float | None, float, float | None], critical: CriticalBatch) -> tuple[Regret | None, bool]:
    """Return noise scale / critical batch size, and whether their intervals overlap; None where nothing bounds it."""
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
    return None if noise is None or critical is None else math.hypot(noise, FROM_90_TO_95 * critical)


def _apart(ratio: Regret | None, overlap: bool) -> Finding:
    if ratio is None:
        return "undecided"
    low, high = ratio.low or 0.0, math.inf if ratio.high is None else ratio.high
    if low > APART or high < 1 / APART:
        return "broke"
    near = not ratio.at_least and 1 / SAME <= ratio.value <= SAME
    return "held" if near and overlap and low >= 1 / APART and high <= APART else "undecided"


def about_generalisation(spec: StudySpec, answer: Answer) -> Evidence:
    """Say whether the largest batch size trained to the full limit ends over 2 points worse than the best."""
    found = answer.generalisation
    if found is None or len(found.batches) < 2:
        known = "no two batch sizes were trained to the same full limit"
        return _not_run(None, known + command(spec, f"confirm {spec.name} --to-budget"))
    largest, points = found.batches[-1], found.notable_gap
    numbers = tuple(largest.trial_numbers)
    if largest.batch_size == found.best_batch_size:
        return Evidence(largest.batch_size, _of_best_largest(found.batches[:-1], points), numbers)
    gap = largest.gap
    if gap is None or gap.low is None or gap.high is None:
        known = "its runs did not come to their end" if gap is None else f"a gap of {gap.value:.3g} without an interval"
        return _not_run(largest.batch_size, known)
    reason = (
        f"it ends {gap.value:.3g} [{gap.low:.3g}, {gap.high:.3g}] worse than batch {found.best_batch_size}; "
        f"2 points are {points:.3g}"
    )
    finding: Finding = "held" if gap.low > points else "broke" if gap.high < points else "undecided"
    return Evidence(largest.batch_size, Judgement(finding, reason), numbers)


def _of_best_largest(others: Sequence[FinalMetrics], points: float) -> Judgement:
    """Return what the others say where the largest batch size ends best: it is worse than none of them by 2 points."""
    lows = [one.gap.low for one in others if one.gap is not None and one.gap.low is not None]
    said = "the largest ends with the best metric itself"
    if len(lows) < len(others):
        return Judgement("undecided", f"{said}; no interval below three runs a side")
    return Judgement("broke" if min(lows) > -points else "undecided", said)


def about_accumulation(spec: StudySpec, step_times: Collection[StepTime]) -> list[Evidence]:
    """Compare the step time in micro-batches with that at once, at each batch size that was timed in both ways.

    Held: the ratio's interval lies within `COSTS`, broke: outside; its ends are those of the two medians' intervals.
    """
    found = []
    for size in sorted({one.batch_size for one in step_times}):
        timed = [one for one in step_times if one.batch_size == size and one.step_seconds]
        here = sorted(timed, key=lambda one: one.contended)
        whole = next((one for one in here if one.micro_batch_size == size), None)
        split = min(
            (one for one in here if one.micro_batch_size < size), key=lambda one: one.micro_batch_size, default=None
        )
        if whole is not None and split is not None:
            found.append(_cost(whole, split, command(spec, f"audit {spec.name}")))
    known = "no batch size was timed both at once and in micro-batches"
    return found or [_not_run(None, known + command(spec, f"audit {spec.name}"))]


def _cost(whole: StepTime, split: StepTime, again: str) -> Evidence:
    if whole.contended or split.contended:
        sizes = " and ".join(str(one.micro_batch_size) for one in (whole, split) if one.contended)
        why = f"in micro-batches of {sizes} it was timed while others used the device{again}"
        return _not_run(whole.batch_size, why)
    assert whole.step_seconds is not None and split.step_seconds is not None, "both were timed"
    low = (split.step_seconds_low or split.step_seconds) / (whole.step_seconds_high or whole.step_seconds)
    high = (split.step_seconds_high or split.step_seconds) / (whole.step_seconds_low or whole.step_seconds)
    ratio = Regret(value=split.step_seconds / whole.step_seconds, low=low, high=high, at_least=False)
    finding: Finding = "undecided"
    if COSTS[0] <= low and high <= COSTS[1]:
        finding = "held"
    elif high < COSTS[0] or low > COSTS[1]:
        finding = "broke"
    count, micro = split.batch_size // split.micro_batch_size, split.micro_batch_size
    seconds = f"{1000 * split.step_seconds:.3g} ms for {1000 * whole.step_seconds:.3g} ms"
    return Evidence(whole.batch_size, Judgement(finding, f"{count} micro-batches of {micro}: {seconds} a step", ratio))


def _not_run(batch_size: int | None, reason: str) -> Evidence:
    return Evidence(batch_size, Judgement("not_run", reason))
