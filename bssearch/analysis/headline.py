"""An answer in sentences."""

from __future__ import annotations

import math

from bssearch.analysis.answer import Answer, Figure, Ratio, Time, objective_in
from bssearch.analysis.batches import MODELS_DIFFER
from bssearch.analysis.certainty import ENOUGH
from bssearch.analysis.objectives import Objective
from bssearch.records.text import ends, number, plural


def headline(answer: Answer) -> str:
    """Answer's headline."""
    figure = answer.optimal.objective_value
    assert figure is not None, "an optimum has its figure"
    text = f"{_reaches(answer, figure)} ({plural(figure.runs, 'run')})"
    better = [text for text in comparisons(answer) if text]
    text += f", {' and '.join(better)}." if better else "."
    return " ".join(filter(None, [text, what_else(answer), _how_sure(answer)]))


def comparisons(answer: Answer) -> tuple[str, str]:
    """How much better the optimum is than the largest batch size and the default."""
    largest = answer.largest_that_fits.batch_size
    untuned = any(row.batch_size == largest and row.untuned for row in answer.batches)
    named = f"{largest}, the {answer.largest_that_fits.in_words}{' (hardly tuned)' if untuned else ''}"
    objective, found = objective_in(answer), answer.speedup
    over_largest = None if largest == answer.optimal.batch_size else found.over_largest
    return _compared(over_largest, named, objective), _compared(found.over_default, "your default", objective)


def _reaches(answer: Answer, figure: Figure) -> str:
    objective = objective_in(answer)
    reaches = f"{'is predicted to reach' if answer.is_predicted else 'reaches'} {answer.target.in_words}"
    shown = with_interval(figure, objective.digits, objective.unit)
    provisional = "Provisional: batch" if answer.provisional else "Batch"
    return f"{provisional} {answer.optimal.batch_size} {objective.sentence(answer.target.metric, reaches, shown)}"


def _how_sure(answer: Answer) -> str:
    if not answer.provisional or answer.within_5_percent is None:
        return ""
    step = answer.settling
    text = how_sure(answer).replace("batch", "Batch", 1)
    return f"{text}." if step is None else f"{text}; {step.why}: {step.command}."


def further_metrics(answer: Answer) -> str:
    """Sentence about further test metrics."""
    told = [f"{name} {with_interval(figure)}" for name, figure in answer.optimal.further_metrics.items()]
    return f"On the test part it also has {' and '.join(told)}." if told else ""


def about_growing(answer: Answer) -> str:
    """Whether a growing batch saves time, and its schedule."""
    grown = answer.batch_schedule
    if grown is None:
        return ""
    saves = {
        "yes": "A growing batch saves time",
        "no": "A growing batch saves no time",
        "undecided": "Whether a growing batch saves time is undecided",
        "not_run": "Whether a growing batch saves time is unknown, because no other seed repeated it",
    }[grown.saves_time]
    if grown.ratio is not None:
        bound = "≥ " if grown.ratio.at_least else ""
        shown = f"{bound}{number(grown.ratio.value)}{ends(grown.ratio.low, grown.ratio.high)}"
        figure = "time" if answer.objective == "time_to_target" else answer.objective.replace("_", " ")
        runs = plural(grown.runs, "run")
        saves += f": it takes {shown} × the {figure} of batch {answer.optimal.batch_size} ({runs})"
    first, *later = grown.stages
    if first.start_samples is None:
        sizes = ", ".join(str(one.batch_size) for one in later)
        when = f"{sizes} once within {number(grown.noise_share or 0.0)} × the gradient noise scale"
    else:
        when = ", ".join(f"{one.batch_size} from {one.start_samples:,} samples on" for one in later)
    return (
        f"{saves}. It begins with {first.batch_size} and has {when}; learning rate {number(first.learning_rate)} at "
        f"first, {grown.rate_rule.in_words}."
    )


def how_sure(answer: Answer) -> str:
    """How probably the recommended batch size is within 5 % of the best, and its printed values if less."""
    share, printed = answer.within_5_percent or 0.0, answer.configuration_within_5_percent
    text = f"batch {answer.optimal.batch_size} is within 5 % of the best with a probability of {_percent(share)}"
    if answer.provisional and answer.would_settle is None and answer.next and not answer.imported:
        return f"{text}; it cannot be settled here, because neither runs nor trials nor step times would help"
    if printed is None or answer.provisional or printed >= ENOUGH:
        return text
    return f"{text}, its printed values with {_percent(printed)}"


def _percent(share: float) -> str:
    return f"{math.floor(100 * share)} %"


def with_interval(figure: Figure | Time, digits: int = 3, unit: str = "") -> str:
    """Figure with its 95 % interval."""
    return f"{number(figure.median, digits)}{unit}{ends(figure.low, figure.high, digits)}"


def what_else(answer: Answer) -> str:
    """Sentence on other batch sizes within 5 %."""
    best, objective = answer.optimal.objective_value, objective_in(answer)
    if best is None or best.low is None or not objective.has_ratios:
        return ""  # fewer than three runs show nothing
    figures = {row.batch_size: row.objective_value for row in answer.batches if row.objective_value}
    if answer.recommendation.rule == "law":
        least = answer.recommendation.least_batch_size
        median = number(figures[least].median) + objective.unit
        return (
            f"Batch {least} has the least median, {median}, but {best.runs} runs cannot tell the two apart; steps and "
            "step times of all batch sizes favour this one."
        )
    low, high = answer.flat_range
    if low < high:
        inside = {row.batch_size for row in answer.batches if low <= row.batch_size <= high}
        verb = "is" if inside <= {*answer.tied} else "has a median"
        return f"Anything from {low} to {high} {verb} within 5 %."
    lowest = min(figure.median for figure in figures.values())
    rivals = {
        size: figure
        for size, figure in figures.items()
        if figure.runs >= best.runs and size != answer.optimal.batch_size
    }
    near = [str(size) for size, figure in rivals.items() if objective.is_flat(figure.median, min(lowest, best.median))]
    if near:
        return f"The median of batch {', '.join(near)} is also within 5 %."
    is_shown = rivals.keys() <= {*answer.worse} and not answer.provisional
    return "No other confirmed batch size is within 5 %." if rivals and is_shown else ""


def _compared(ratio: Ratio | None, versus: str, objective: Objective) -> str:
    if ratio is None:
        return ""
    better, worse = objective.comparative
    factor = max(ratio.value, 1 / ratio.value)
    if factor < 1.005 and not ratio.at_least:
        return f"{objective.equal} {versus}"
    if not ratio.is_shown:
        return f"not shown to be {better} than {versus} ({number(ratio.value, 2)}×{ends(ratio.low, ratio.high, 2)})"
    if ratio.at_least or factor >= 1.1 or ratio.low is not None:
        low, high = (ratio.low, ratio.high) if ratio.value > 1 else (_inverse(ratio.high), _inverse(ratio.low))
        amount = f"{number(factor, 2)}×{ends(low, high, 2)}"
    else:
        amount = f"{factor - 1:.0%}".replace("%", " %")
    return f"{'at least ' if ratio.at_least else ''}{amount} {better if ratio.value > 1 else worse} than {versus}"


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def speedup_shares(answer: Answer) -> str:
    """How retuning and batch size share the gain over the default."""
    found, default = answer.speedup, answer.speedup.over_default
    retuning, batch = found.from_retuning, found.from_batch_size
    if default is None or retuning is None or batch is None or default.at_least or default.value < 1.005:
        return ""
    if batch.value == 1:
        return "all from retuning"
    if retuning.value == 1:
        return "all from the batch size"
    return f"{number(retuning.value, 2)}× by retuning, {number(batch.value, 2)}× by batch size"


def about_cost(answer: Answer) -> str:
    """What the study cost, in trainings at the optimum."""
    if answer.cost is None or answer.cost.trainings is None:
        return ""
    return f"the study cost {answer.cost.trainings:,.0f} trainings"


def about_law(answer: Answer) -> list[str]:
    """Sentences about the law and its fit."""
    fit = answer.fit
    if fit is None and any(one.code == MODELS_DIFFER for one in answer.warnings):
        return ["No law: the best configurations of the batch sizes have different models."]
    if fit is None:
        return ["No law: fewer than two batch sizes reached the target."]
    if fit.verdict == "too_few_points":
        return ["No law yet: it needs three tuned batch sizes."]
    fits, ratio = "fits" if fit.verdict == "fits" else "fits poorly", fit.noise_scale_ratio
    noise = "" if ratio is None else f"; the gradient noise scale is {number(ratio)} times B_crit"
    parts = [
        f"The law S = S_min·(1 + B_crit/B) {fits}: S_min = {number(fit.s_min)} steps, B_crit {fit.b_crit.in_words}, "
        f"largest residual {number(100 * fit.max_residual)} %{noise}."
    ]
    if fit.predicted is not None and fit.verdict == "fits":
        parts.append(f"With the measured step times it predicts the least time at {fit.predicted.in_words}.")
    if fit.including_untuned is not None:
        parts.append(f"Including untuned batch sizes, B_crit is {number(fit.including_untuned.b_crit.estimate)}.")
    return parts


def about_device(answer: Answer) -> str:
    """Sentences about step time and memory."""
    step, memory = answer.measured.step_time, answer.measured.memory
    told = []
    if step is not None:
        told.append(
            f"A step takes {number(1e3 * step.alpha_s)} ms plus {number(1e3 * step.beta_s)} ms per sample (within "
            f"{number(100 * step.max_residual, 2)} %); batch {step.throughput_knee} has 90 % of the highest throughput."
        )
    if memory is not None and memory.smallest_that_does_not is not None:
        told.append(f"A micro-batch of {memory.largest_that_fits} fits; {memory.smallest_that_does_not} does not.")
    if all(row.peak_memory_bytes is None for row in answer.batches):
        told.append("Peak memory was not measured.")
    return " ".join(told)
