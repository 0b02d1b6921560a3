"""An answer in words."""

from __future__ import annotations

from bssearch.analysis.answer import Answer, Figure, Ratio, Time
from bssearch.analysis.numbers import number
from bssearch.analysis.objectives.measure import FLAT, UNITS
from bssearch.records import Objective

BETTER: dict[str, tuple[str, str]] = {
    Objective.TIME_TO_TARGET: ("faster", "slower"),
    Objective.SAMPLES_TO_TARGET: ("fewer samples", "more samples"),
    Objective.COST_TO_TARGET: ("cheaper", "dearer"),
    Objective.ENERGY_TO_TARGET: ("less energy", "more energy"),
}


def headline(answer: Answer) -> str:
    """Return the answer in words: the optimum, how sure, how much better, and what else would do."""
    optimal = answer.optimal
    figure = optimal.objective_value
    assert figure is not None, "an optimum has its figure"
    text = _reaches(answer, figure) + f" ({figure.runs} run{'s' if figure.runs > 1 else ''})"
    largest = answer.largest_that_fits.batch_size
    untuned = any(row.batch_size == largest and row.untuned for row in answer.batches)
    named = f"the largest that fits ({largest}{', untuned' if untuned else ''})"
    comparisons = [
        (answer.speedup.over_largest, named, largest == optimal.batch_size),
        (answer.speedup.over_default, "your default", False),
    ]
    better = [
        _compared(ratio, versus, BETTER[answer.objective])
        for ratio, versus, same in comparisons
        if ratio is not None and not same
    ]
    text += f", {' and '.join(better)}." if better else "."
    return " ".join([text, *_what_else(answer, figure)])


def _reaches(answer: Answer, figure: Figure) -> str:
    target, time = answer.target, answer.optimal.time_to_target_s
    wanted = f"{target.metric} {target.goal.sign} {target.value:g}"
    is_predicted = any(notice.code == "predicted" for notice in answer.warnings)
    reaches = f"Batch {answer.optimal.batch_size} {'is predicted to reach' if is_predicted else 'reaches'} {wanted}"
    match answer.objective:
        case Objective.METRIC_IN_BUDGET:
            return (
                f"Batch {answer.optimal.batch_size} comes to {target.metric} {with_interval(figure, 4)} in the budget"
            )
        case Objective.SAMPLES_TO_TARGET:
            return f"{reaches} with {with_interval(figure)} samples"
        case Objective.COST_TO_TARGET:
            unit = " device-hours" if answer.price_per_device_hour is None else ""
            return f"{reaches} at a cost of {with_interval(figure, unit=unit)}"
        case Objective.ENERGY_TO_TARGET:
            return f"{reaches} with {with_interval(figure)} J"
    assert time is not None, "an optimum has reached the target"
    return f"{reaches} in {with_interval(time, unit=' s')}"


def with_interval(figure: Figure | Time, digits: int = 3, unit: str = "") -> str:
    """Return a figure for people, with its 95 % interval where there is one."""
    low, high = figure.low, figure.high
    interval = "" if low is None or high is None else f" [{number(low, digits)}, {number(high, digits)}]"
    return f"{number(figure.median, digits)}{unit}{interval}"


def _what_else(answer: Answer, best: Figure) -> list[str]:
    """Return the sentence on other batch sizes within 5 %, of those with as many runs; none below three runs."""
    if best.low is None or answer.objective == Objective.METRIC_IN_BUDGET:
        return []  # too few runs to say anything of
    figures = {row.batch_size: row.objective_value for row in answer.batches if row.objective_value}
    if answer.recommendation.rule == "law":
        least = answer.recommendation.least_batch_size
        median = number(figures[least].median) + UNITS[Objective(answer.objective)]
        return [f"The law decides, for the seeds differ too much: batch {least} has the least median, {median}."]
    low, high = answer.flat_range
    if low < high:
        inside = {row.batch_size for row in answer.batches if low <= row.batch_size <= high}
        verb = "is" if inside <= {*answer.tied} else "has a median"
        return [f"Anything from {low} to {high} {verb} within 5 %."]
    lowest = min(figure.median for figure in figures.values())
    rivals = {
        size: figure
        for size, figure in figures.items()
        if figure.runs >= best.runs and size != answer.optimal.batch_size
    }
    near = [str(size) for size, figure in rivals.items() if figure.median <= FLAT * min(lowest, best.median)]
    if near:
        return [f"The median of batch {', '.join(near)} is within 5 %, too."]
    undecided = {"not_separated", "unconfirmed"} & {notice.code for notice in answer.warnings}
    return ["No other batch size confirmed is within 5 %."] if rivals and not undecided else []


def _compared(ratio: Ratio, versus: str, words: tuple[str, str]) -> str:
    better, worse = words
    factor = max(ratio.value, 1 / ratio.value)
    if factor < 1.005 and not ratio.at_least:
        return f"as fast as {versus}" if better == "faster" else f"the same as {versus}"
    amount = f"{factor - 1:.0%}".replace("%", " %") if factor < 1.1 else f"{number(factor, 2)}×"
    return f"{'at least ' if ratio.at_least else ''}{amount} {better if ratio.value > 1 else worse} than {versus}"
