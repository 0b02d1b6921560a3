"""The key figures at the top of a study's page."""

from __future__ import annotations

from bssearch.analysis.answer import Answer, Figure, Ratio, objective_in
from bssearch.analysis.law.fitted import Fit
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.numbers import ends, memory, number
from bssearch.pages.html import Tile
from bssearch.pages.words import plural
from bssearch.records import MemoryBasis
from bssearch.spec import StudySpec


def tiles_of(answer: Answer, spec: StudySpec) -> list[Tile]:
    """Return the key figures, those of the optimum first."""
    low, high = answer.flat_range
    best, largest = answer.optimal, answer.largest_that_fits
    accumulated = f"{best.accumulation_steps} × {best.micro_batch_size}" if best.accumulation_steps > 1 else ""
    over = _times(answer, answer.speedup.over_largest)
    tiles = [
        Tile("Optimal batch size", f"{best.batch_size:,}", accumulated),
        _figure_tile(answer),
        Tile("Within 5 %", f"{low:,}" if low == high else f"{low:,} to {high:,}", "medians around the optimum"),
        Tile(
            largest.in_words.capitalize(),
            f"{largest.batch_size:,}",
            "; ".join(part for part in (over, largest.reason) if part),
        ),
    ]
    if spec.default_is_known:
        tiles.append(_default_tile(answer, spec))
    if answer.fit is not None and answer.fit.verdict != "too_few_points":
        tiles.append(_critical(answer.fit))
    if answer.measured.noise_scale is not None:
        tiles.append(_noise(answer.measured.noise_scale))
    if best.test_metric is not None:
        tiles.append(Tile(f"Test {answer.target.metric}", number(best.test_metric), "of the optimum, at the target"))
    tiles += [_further(name, figure) for name, figure in best.further_metrics.items()]
    if best.peak_memory_bytes is not None:
        of = "of the optimum"
        if best.peak_memory_basis not in (None, MemoryBasis.DEVICE):
            of = "growth of the process over a trial of the optimum"
        tiles.append(Tile("Peak memory", memory(best.peak_memory_bytes), of))
    return tiles


def _further(name: str, figure: Figure) -> Tile:
    shown = ends(figure.low, figure.high).strip()
    return Tile(
        f"Test {name}", number(figure.median), f"of the optimum, at the target{shown and f', 95 % interval {shown}'}"
    )


def _default_tile(answer: Answer, spec: StudySpec) -> Tile:
    over = _times(answer, answer.speedup.over_default)
    return Tile("Your default", f"{spec.default.batch_size:,}", over or "no run of it gives a figure to compare")


def _figure_tile(answer: Answer) -> Tile:
    figure, objective = answer.optimal.objective_value, objective_in(answer)
    assert figure is not None, "an optimum has its figure"
    of = plural(figure.runs, "run")
    low, high = figure.low, figure.high
    ends = "" if low is None or high is None else f"95 % interval {number(low)} to {number(high)}, "
    return Tile(objective.label, f"{number(figure.median)}{objective.unit}", ends + of)


def _times(answer: Answer, ratio: Ratio | None) -> str:
    """Return how much a batch size takes against the optimum, in words; nothing where that is not known."""
    if ratio is None:
        return ""
    noun = objective_in(answer).noun
    shown = f"{number(ratio.value)}×{ends(ratio.low, ratio.high)}"
    return f"{'at least ' if ratio.at_least else ''}{shown} the {noun} of the optimum"


def _noise(noise: NoiseAnswer) -> Tile:
    scale = f"≥ {number(noise.low)}" if noise.scale is None else number(noise.scale)
    place = "" if noise.far_from_target is None else ", measured far from the target"
    if noise.trials is not None:
        place = f", over {noise.trials} trials"
    ends = "" if noise.scale is None or noise.high is None else f", {number(noise.low)} to {number(noise.high)}"
    return Tile("Gradient noise scale", scale, f"samples{ends}{place}")


def _critical(fit: Fit) -> Tile:
    critical = fit.b_crit
    said = "the law fits" if fit.verdict == "fits" else "the law fits poorly"
    if critical.low is None or critical.high is None:
        return Tile("Critical batch size", critical.in_words, f"90 % bound; {said}")
    interval = f"90 % interval {number(critical.low)} to {number(critical.high)}"
    return Tile("Critical batch size", number(critical.estimate), f"{interval}; {said}")
