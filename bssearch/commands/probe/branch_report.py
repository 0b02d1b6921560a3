"""What the branches of a run's checkpoints say, for people and for programs, and what each of them trains with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bssearch.analysis.law.branches import BranchedSize, BranchPlan, LocalCriticalBatch, holds, is_rising
from bssearch.commands.probe.branch_points import BranchPoint
from bssearch.commands.probe.report import ProbeReport
from bssearch.records import Configuration, Goal
from bssearch.scaling import RULES_OF_OPTIMIZERS, LearningRateRule, learning_rate_factor, rule_of_optimizer
from bssearch.space import split_batch
from bssearch.spec import StudySpec

COLUMNS = ("checkpoint", "samples", "batch", "learning_rate", "end", "holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedCheckpoint:
    """What the branches of one checkpoint say: ``start`` is the metric there, ``notice`` what ended the range early."""

    point: BranchPoint
    plan: BranchPlan
    start: float
    sizes: tuple[BranchedSize, ...]
    found: LocalCriticalBatch
    notice: str | None = None


def rate_rule(spec: StudySpec) -> tuple[LearningRateRule, bool]:
    """Return how the learning rate follows the batch size, and whether anybody says so.

    The rule that the spec's space writes, else that of the default's optimizer, else the square root.
    """
    rate = spec.space.learning_rate
    written: LearningRateRule | None = getattr(rate, "rule", None)
    if written is not None and "rule" in getattr(rate, "model_fields_set", ()):
        return written, True
    optimizer = spec.default_configuration.optimizer
    return rule_of_optimizer(optimizer), optimizer in RULES_OF_OPTIMIZERS


def configuration_at(spec: StudySpec, batch_size: int, micro_batch_size: int, rule: LearningRateRule) -> Configuration:
    """Return the default at another batch size: rate by the rule, the rest by the space's ``batch_rules``.

    It runs in micro-batches of at most ``micro_batch_size``.
    """
    default = spec.default_configuration
    factor = learning_rate_factor(rule, batch_size, default.batch_size)
    ratio = batch_size / default.batch_size
    carried = spec.space.batch_rules.carried(
        {**default.parameters, "weight_decay": default.weight_decay}, ratio, factor
    )
    weight_decay = carried.pop("weight_decay")
    micro, accumulation_steps = split_batch(batch_size, micro_batch_size)
    return replace(
        default,
        batch_size=batch_size,
        micro_batch_size=micro,
        accumulation_steps=accumulation_steps,
        learning_rate=default.learning_rate * factor,
        weight_decay=weight_decay,
        parameters=carried,
    )


def report(
    spec: StudySpec,
    found: Sequence[BranchedCheckpoint],
    rule: LearningRateRule,
    repeats: int,
    tokens_per_sample: int | None,
    notes: Sequence[str],
) -> ProbeReport:
    """Return the figures of all checkpoints, in the order of training."""
    plan, rules = found[0].plan, spec.space.batch_rules
    rows = [row for one in found for row in _rows(spec, one, rule)]
    document = {
        "schema_version": 1,
        "study": spec.name,
        "metric": spec.target.metric,
        "goal": spec.record_target.goal.value,
        "batch_size": plan.batch_sizes[0],
        "branch_samples": plan.samples,
        "branch_tokens": None if tokens_per_sample is None else plan.samples * tokens_per_sample,
        "repeats": repeats,
        "rules": {"learning_rate": rule.value, "betas": rules.betas, "weight_decay": rules.weight_decay},
        "checkpoints": [_checkpoint(spec, one, rule) for one in found],
        "schedule": [
            {"step": one.point.step, "samples": one.point.samples, "batch_size": one.found.batch_size}
            for one in found
            if one.found.batch_size is not None
        ],
        "rises": is_rising([one.found for one in found]),
        "warnings": [{"code": "branches", "message": note} for note in notes]
        + [{"code": "range_ended", "message": one.notice} for one in found if one.notice is not None],
    }
    return ProbeReport(
        document=document,
        rows=rows,
        table=[
            {
                "checkpoint": row["checkpoint"],
                "samples": row["samples"],
                "batch": str(row["batch_size"]),
                "learning_rate": row["learning_rate"],
                "end": "diverged" if row["diverged"] else row["mean"],
                "holds": {True: "yes", False: "no", None: None}[row["holds"]],
            }
            for row in rows
        ],
        columns=COLUMNS,
        sentences=list(sentences(spec, found, repeats)),
    )


def sentences(spec: StudySpec, found: Sequence[BranchedCheckpoint], repeats: int) -> Iterator[str]:
    """Yield the answer of each checkpoint, whether the batch sizes rise, and what they rest on."""
    for one in found:
        yield f"{one.point.where}: {answer(one.found, one.plan.batch_sizes[0])}"
        if one.notice is not None:
            yield f"note: {one.notice}"
    rises = is_rising([one.found for one in found])
    sizes = {one.found.batch_size for one in found} - {None}
    if rises is not None and len(sizes) == 1:
        yield "The batch size is the same at all checkpoints: no growing schedule was measured."
    elif rises:
        yield (
            "The batch sizes never fall from one checkpoint to the next: a growing schedule is what was measured "
            f"(bssearch enqueue {spec.name} {schedule_words(found)} trains it)."
        )
    elif rises is not None:
        yield "The batch sizes fall between two checkpoints: a growing schedule is not what was measured."
    plan = found[0].plan
    yield (
        f"Each branch has {plan.samples} samples; its end is the mean {spec.target.metric} of the validation part over "
        f"the last quarter. A batch size holds where the mean end of its {repeats} branches is no worse than the "
        f"one-sided 95 % bound that {repeats} branches at {plan.batch_sizes[0]}, in other orders of the data, give."
    )


def schedule_words(found: Sequence[BranchedCheckpoint]) -> str:
    """Return the schedule of rising batch sizes as ``bssearch enqueue`` takes it: from each checkpoint on its own.

    Until the first one it is the run's own, that of the branches at B.
    """
    begins = [(0, found[0].plan.batch_sizes[0])]
    for one in found:
        size, samples = one.found.batch_size, one.point.samples
        if size is not None and samples is not None and size > begins[-1][1]:
            begins = [*(begin for begin in begins if begin[0] < samples), (samples, size)]
    (_, first), *later = begins
    return f"batch_size={first} batch_stages='{' '.join(f'{samples}:{size}' for samples, size in later)}'"


def answer(found: LocalCriticalBatch, base: int) -> str:
    """Return the local critical batch size of a checkpoint as a sentence."""
    match found.verdict:
        case "found":
            return f"the local critical batch size is {found.low}: {found.high} loses."
        case "at_least":
            return f"the local critical batch size is at least {found.low}: all that were tried hold."
        case "below":
            return f"the local critical batch size is below {found.high}, which loses: {base} is the smallest tried."
        case "cannot_tell":
            return f"cannot tell: {found.reason}. Longer branches (--tokens) or more of them (--repeats) may."


def _checkpoint(spec: StudySpec, one: BranchedCheckpoint, rule: LearningRateRule) -> dict[str, Any]:
    found = one.found
    return {
        "checkpoint": str(one.point.path),
        "step": one.point.step,
        "samples": one.point.samples,
        "start_metric": one.start,
        "verdict": found.verdict,
        "reason": found.reason,
        "batch_size": found.batch_size,
        "interval": [found.low, found.high],
        "mean": found.mean,
        "spread": found.spread,
        "bound": found.bound,
        "branches": [
            {name: value for name, value in row.items() if name not in {"checkpoint", "samples"}}
            for row in _rows(spec, one, rule)
        ],
    }


def _rows(spec: StudySpec, one: BranchedCheckpoint, rule: LearningRateRule) -> Iterator[dict[str, Any]]:
    bound, goal = one.found.bound, spec.record_target.goal
    for size in one.sizes:
        yield {
            "checkpoint": str(one.point.path),
            "samples": one.point.samples,
            "batch_size": size.batch_size,
            "learning_rate": configuration_at(spec, size.batch_size, size.batch_size, rule).learning_rate,
            "ends": list(size.ends),
            "mean": size.mean,
            "diverged": None in size.ends,
            "holds": _holds(size, bound, goal, is_base=size is one.sizes[0]),
        }


def _holds(size: BranchedSize, bound: float | None, goal: Goal, *, is_base: bool) -> bool | None:
    return None if bound is None or is_base else holds(size, bound, goal)
