"""An answer in sentences, and the trade-offs between batch sizes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bssearch.analysis.answer import Answer, Batch, Figure, FrontPoint, Ratio, Time, objective_in
from bssearch.analysis.batches import MODELS_DIFFER
from bssearch.analysis.certainty import ENOUGH
from bssearch.analysis.objectives import Objective
from bssearch.analysis.optimum import Candidate
from bssearch.analysis.shape import Notice
from bssearch.records import FLAT_RATIO, TRAINING, MemoryBasis
from bssearch.records.text import NOTHING, ends, memory, noise_scale, number, percent, plural, plural_of


def headline(answer: Answer) -> str:
    text = f"{_reaches(answer)} ({answer.optimal.objective_value.origin})"
    better = [text for text in comparisons(answer) if text]
    text += f", {' and '.join(better)}." if better else "."
    return " ".join(filter(None, [text, what_else(answer), _how_sure(answer)]))


def comparisons(answer: Answer) -> tuple[str, str]:
    largest = answer.largest_that_fits.batch_size
    untuned = any(row.batch_size == largest and row.untuned for row in answer.batches)
    named = f"{largest}, the {answer.largest_that_fits.in_words}{' (hardly tuned)' if untuned else ''}"
    objective, found = objective_in(answer), answer.speedup
    over_largest = None if largest == answer.optimal.batch_size else found.over_largest
    return _compared(over_largest, named, objective), _compared(found.over_default, "your default", objective)


def _reaches(answer: Answer) -> str:
    objective = objective_in(answer)
    reaches = f"{'is predicted to reach' if answer.is_predicted else 'reaches'} {answer.target.in_words}"
    shown = with_interval(answer.optimal.objective_value, objective.digits, objective.unit)
    provisional = "Provisional: batch" if answer.provisional else "Batch"
    return f"{provisional} {answer.optimal.batch_size} {objective.sentence(answer.target.metric, reaches, shown)}"


def _how_sure(answer: Answer) -> str:
    if not answer.provisional or answer.within_5_percent is None:
        return ""
    step = answer.settling
    text = how_sure(answer).replace("batch", "Batch", 1)
    if step is not None and answer.imported:
        return f"{text}. Next: {step.command} {step.why}."
    return f"{text}." if step is None else f"{text}; {step.why}: {step.command}."


def further_metrics(answer: Answer, *, training: bool = False) -> str:
    known = answer.optimal.further_metrics.items()
    shown = [f"{name} {with_interval(figure)}" for name, figure in known if name.startswith(TRAINING) == training]
    where = "training samples" if training else "the test part"
    return f"The optimum's further metrics on {where}: {' and '.join(shown)}." if shown else ""


def about_growing(answer: Answer) -> str:
    if (grown := answer.batch_schedule) is None:
        return ""
    saves = {
        "yes": "A growing batch saves time",
        "no": "A growing batch saves no time",
        "undecided": "The runs do not show whether a growing batch saves time",
        "not_run": "The saving of a growing batch is unknown, because no other seed repeated the schedule",
    }[grown.saves_time]
    if grown.ratio is not None:
        ratio = grown.ratio
        shown = f"{'≥ ' if ratio.at_least else ''}{number(ratio.value)}{ends(ratio.low, ratio.high)}"
        figure = "time" if answer.objective == "time_to_target" else answer.objective.replace("_", " ")
        runs = plural(grown.runs, "run")
        saves += f": the schedule takes {shown} × the {figure} of batch {answer.optimal.batch_size} ({runs})"
    first, *later = grown.stages
    if first.start_samples is None:
        sizes = ", ".join(str(one.batch_size) for one in later)
        when = f"{sizes}, each at most {number(grown.noise_share or 0.0)} × the gradient noise scale"
    else:
        when = ", ".join(f"{one.batch_size} after {one.start_samples:,} samples" for one in later)
    return (
        f"{saves}. The schedule starts with batch {first.batch_size} and grows to {when}; the learning rate starts at "
        f"{number(first.learning_rate)}, {grown.rate_rule.in_words}."
    )


def about_devices(answer: Answer) -> str:
    """Return a sentence about the fewest devices within 5 % of the least time; empty if not timed."""
    if not answer.by_devices:
        return ""
    base, *further = answer.by_devices
    fastest = min(one.seconds for one in answer.by_devices)
    best = next(one for one in answer.by_devices if one.seconds <= FLAT_RATIO * fastest)
    noun = "GPU" if answer.device.type == "cuda" else "process"
    many = plural_of(noun)
    alone = f"On {plural(base.world_size, noun)} batch {base.batch_size} takes"
    text = f"{alone} {number(base.seconds)} s"
    if best is base:
        others = (f"{one.world_size} {many} take {number(one.seconds)} s at batch {one.batch_size}" for one in further)
        return f"{text}; more {many} save under 5 %: {', '.join(others)}."
    verb = "reach" if best.runs else "are predicted to reach"
    sooner = f"{number(best.speedup.value, 2)}×{ends(best.speedup.low, best.speedup.high, 2)} sooner"
    text += (
        f"; {best.world_size} {many} {verb} the target {sooner} with batch {best.batch_size}, at "
        f"{number(best.cost / base.cost, 2)}× the cost"
    )
    return f"{text}{'' if best is further[-1] else f'; more than {best.world_size} save under 5 %'}."


def how_sure(answer: Answer) -> str:
    share, printed = answer.within_5_percent or 0.0, answer.configuration_within_5_percent
    text = f"batch {answer.optimal.batch_size} is within 5 % of the best with a probability of {_percent(share)}"
    if answer.provisional and answer.would_settle is None and answer.next and not answer.imported:
        return f"{text}; more runs, trials or step times would not settle the answer"
    if printed is None or answer.provisional or printed >= ENOUGH:
        return text
    return f"{text}; further tuning of the values below may save over 5 % (probability {_percent(1 - printed)})"


def _percent(share: float) -> str:
    return f"{math.floor(100 * share)} %"


def with_interval(figure: Figure | Time, digits: int = 3, unit: str = "") -> str:
    return f"{number(figure.median, digits)}{unit}{ends(figure.low, figure.high, digits)}"


def what_else(answer: Answer) -> str:
    """Return a sentence about the batch sizes within 5 % of the best; empty if unknown."""
    best, objective = answer.optimal.objective_value, objective_in(answer)
    if best.low is None or not objective.has_ratios:
        return ""  # fewer than three runs have no interval
    figures = {row.batch_size: row.objective_value for row in answer.batches if row.objective_value}
    if answer.recommendation.rule == "law":
        return (
            f"Batch {answer.recommendation.least_batch_size} has the least median, but all runs together favour "
            f"batch {answer.optimal.batch_size}."
        )
    low, high = answer.flat_range
    if low < high and answer.predicted is not None:
        return f"Batch sizes {low} to {high} are predicted to be within 5 % of the best."
    if low < high:
        inside = {row.batch_size for row in answer.batches if low <= row.batch_size <= high}
        verb = "are" if inside <= {*answer.tied} else "have medians"
        return f"Batch sizes {low} to {high} {verb} within 5 % of the best."
    lowest = min(figure.median for figure in figures.values())
    rivals = {
        size: figure
        for size, figure in figures.items()
        if figure.runs >= best.runs and size != answer.optimal.batch_size
    }
    near = [str(size) for size, figure in rivals.items() if objective.is_flat(figure.median, min(lowest, best.median))]
    if near:
        return f"The median of batch {', '.join(near)} is also within 5 % of the best."
    is_shown = rivals.keys() <= {*answer.worse} and not answer.provisional
    return "No other confirmed batch size is within 5 % of the best." if rivals and is_shown else ""


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
        amount = percent(factor - 1)
    return f"{'at least ' if ratio.at_least else ''}{amount} {better if ratio.value > 1 else worse} than {versus}"


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def speedup_shares(answer: Answer) -> str:
    """Return the gain over the default, split into retuning and batch size; empty if unknown or below 0.5 %."""
    found, default = answer.speedup, answer.speedup.over_default
    retuning, batch = found.from_retuning, found.from_batch_size
    if default is None or retuning is None or batch is None or default.at_least or default.value < 1.005:
        return ""
    if batch.value == 1:
        return "by retuning alone"
    if retuning.value == 1:
        return "by batch size alone"
    return f"{number(retuning.value, 2)}× by retuning, {number(batch.value, 2)}× by batch size"


def about_cost(answer: Answer) -> str:
    if answer.cost is None or answer.cost.trainings is None:
        return ""
    time = answer.optimal.time_to_target_s
    length = "" if time is None or time.median is None else f" of {number(time.median)} s"
    shown = f"{answer.cost.trainings:,.0f}"
    return f"study cost: {shown} training{'' if shown == '1' else 's'}{length}"


def about_law(answer: Answer) -> list[str]:
    fit = answer.fit
    if (law := answer.predicted) is not None:
        return [
            f"In the predicted law, S_min is {number(law.s_min)} steps; B_crit in samples is {law.b_crit.in_words}."
        ]
    if fit is None and any(one.code == MODELS_DIFFER for one in answer.warnings):
        return ["There is no law, because the best configurations have different models."]
    if fit is None:
        return ["There is no law, because fewer than two batch sizes reached the target."]
    if fit.verdict == "too_few_points":
        return ["There is no law yet, because the law needs three tuned batch sizes."]
    fits, ratio = "fits" if fit.verdict == "fits" else "fits poorly", fit.noise_scale_ratio
    noise = "" if ratio is None else f"; the gradient noise scale is {number(ratio)} times B_crit"
    parts = [
        f"The law S = S_min·(1 + B_crit/B) {fits}. S_min is {number(fit.s_min)} steps; B_crit in samples is "
        f"{fit.b_crit.in_words}. The largest residual is {number(100 * fit.max_residual)} %{noise}."
    ]
    if fit.predicted is not None and fit.verdict == "fits":
        parts.append(f"With the measured step times, the law predicts the least time at {fit.predicted.in_words}.")
    if fit.including_untuned is not None:
        parts.append(f"Including hardly tuned batch sizes, B_crit is {number(fit.including_untuned.b_crit.estimate)}.")
    return parts


def about_device(answer: Answer) -> str:
    step, memory = answer.measured.step_time, answer.measured.memory
    sentences = (
        ""
        if step is None
        else f"A step takes {number(1e3 * step.alpha_s)} ms plus {number(1e3 * step.beta_s)} ms per sample (within "
        f"{number(round(100 * step.max_residual, 2), 2)} %); batch {step.throughput_knee} reaches 90 % of the highest "
        "throughput.",
        ""
        if memory is None or memory.smallest_that_does_not is None
        else f"A micro-batch of {memory.largest_that_fits} fits; {memory.smallest_that_does_not} does not.",
        "Peak memory was not measured." if all(row.peak_memory_bytes is None for row in answer.batches) else "",
    )
    return " ".join(filter(None, sentences))


def front(
    batches: Sequence[Batch], price_per_device_hour: float | None, *, confirmed: bool, devices: int = 1
) -> list[FrontPoint]:
    """Return the time and cost of batch sizes that reached the target.

    If ``confirmed``, the front has only confirmed sizes.
    """
    price = price_per_device_hour
    found = [
        (
            row.batch_size,
            row.time_to_target_s.median,
            row.samples_to_target if price is None else row.time_to_target_s.median * devices * price / 3600,
            row.confirmed or not confirmed,
        )
        for row in batches
        if row.time_to_target_s is not None and row.samples_to_target is not None
    ]
    compared = [(time, paid) for _, time, paid, is_compared in found if is_compared]
    return [
        FrontPoint(
            batch_size=size,
            time_to_target_s=time,
            cost=paid,
            on_front=is_compared and not any(t <= time and c <= paid and (t < time or c < paid) for t, c in compared),
        )
        for size, time, paid, is_compared in found
    ]


class _Resource(NamedTuple):
    least: str
    amount: Callable[[Batch], float | None]
    unit: str


# Resources by the name of the objective that minimises the resource
RESOURCES: Mapping[str, _Resource] = {
    "time_to_target": _Resource(
        "the least time", lambda row: None if row.time_to_target_s is None else row.time_to_target_s.median, " s"
    ),
    "samples_to_target": _Resource("the fewest samples", lambda row: row.samples_to_target, ""),
    "energy_to_target": _Resource("the least energy", lambda row: row.energy_joules, " J"),
}


def about_trade_offs(batches: Sequence[Batch], optimal: Candidate, *, confirmed: bool) -> list[Notice]:
    """Return a notice if the optimum takes over 5 % more of a resource than another batch size."""
    if not optimal.objective.stops_at_target:
        return []
    compared = {row.batch_size: row for row in batches if row.confirmed or not confirmed}
    best = compared[optimal.configuration.batch_size]
    own = {"cost_to_target": "time_to_target"}.get(optimal.objective.name, optimal.objective.name)
    noun = optimal.objective.noun
    parts = list(_cheaper(best, list(compared.values()), own, noun))
    if not parts:
        return []
    among = " among the confirmed batch sizes," if confirmed else ""
    message = f"batch {best.batch_size} is best by {noun}, but{among} {'; '.join(parts)}"
    return [Notice(code="trade_off", message=message)]


def _cheaper(best: Batch, rows: Sequence[Batch], own: str, noun: str) -> Iterator[str]:
    objective = RESOURCES.get(own)
    spent = None if objective is None else objective.amount(best)
    for name, resource in RESOURCES.items():
        mine = resource.amount(best)
        known = [(amount, row) for row in rows if (amount := resource.amount(row)) is not None]
        if name == own or mine is None or not known:
            continue
        least, row = min(known, key=lambda one: one[0])
        more = None if objective is None or spent is None else objective.amount(row)
        if mine <= FLAT_RATIO * least or (more is not None and spent is not None and more < spent):
            continue
        price = "" if not spent or more is None else f", at {number(more / spent)} times the {noun}"
        figures = f"{number(least)} against {number(mine)}{resource.unit}"
        yield f"batch {row.batch_size} takes {resource.least}, {figures}{price}"


def trade_off_rows(answer: Answer) -> tuple[list[str], list[list[str]]]:
    rows = _shown(answer)
    known = {
        heading: cells for heading, shown in _columns(answer).items() if any(cells := [shown(row) for row in rows])
    }
    if not known.keys() - {"time", "samples"}:
        return [], []
    return ["batch", *known], [
        [str(row.batch_size), *(one or NOTHING for one in line)]
        for row, line in zip(rows, zip(*known.values(), strict=True), strict=True)
    ]


def _shown(answer: Answer) -> list[Batch]:
    return [row for row in answer.batches if row.best is not None]


def _columns(answer: Answer) -> dict[str, Callable[[Batch], str]]:
    parts = {row.generalisation.part for row in _shown(answer) if row.generalisation is not None}

    def metric(part: str) -> Callable[[Batch], str]:
        return lambda row: (
            row.generalisation.in_words if row.generalisation is not None and row.generalisation.part == part else ""
        )

    return {
        "time": lambda row: "" if row.time_to_target_s is None else f"{number(row.time_to_target_s.median)} s",
        "samples": lambda row: "" if row.samples_to_target is None else number(row.samples_to_target),
        "energy": lambda row: "" if row.energy_joules is None else f"{number(row.energy_joules)} J",
        "peak memory": lambda row: "" if row.peak_memory_bytes is None else memory(row.peak_memory_bytes),
        **{f"{part} {answer.target.metric}": metric(part) for part in sorted(parts)},
        "noise scale": lambda row: (
            ""
            if row.noise_scale is None
            else noise_scale(row.noise_scale.scale, row.noise_scale.low, row.noise_scale.high)
        ),
    }


def about_columns(answer: Answer) -> list[str]:
    rows = _shown(answer)
    bases = {row.peak_memory_basis for row in rows if row.peak_memory_basis is not None}
    parts = {row.generalisation.part for row in rows if row.generalisation is not None}
    on_device = MemoryBasis.DEVICE in bases
    how = " (sampled; a short peak may be missed)" if MemoryBasis.RESIDENT_SAMPLED in bases else ""
    explanations = [
        (on_device, "Peak memory: the largest memory of the tensors on the device."),
        (
            bases and not on_device,
            f"Peak memory: growth of the process’s resident memory over the trial{how}.",
        ),
        (
            "test" in parts,
            "Test metric: at the end of a run, on samples that neither train nor stop the run; ± is over seeds.",
        ),
        (
            "validation" in parts,
            "Validation metric: the best value of a run, on the samples that stop the run at the target; ± is over "
            "seeds.",
        ),
        (
            any(row.noise_scale is not None for row in rows),
            "Noise scale: the gradient noise scale near the target, in samples, over trials of the batch size.",
        ),
    ]
    return [sentence for holds, sentence in explanations if holds]
