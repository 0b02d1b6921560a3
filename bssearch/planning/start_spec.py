"""The spec of a first study as YAML, with the reason of each choice beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from bssearch.planning.claims import Claim, claims_about
from bssearch.planning.given import check_known
from bssearch.planning.memory.request import parameter_count
from bssearch.planning.start import (
    GIB,
    LIMIT_OVER_SECONDS,
    PRIORITIES,
    SAFE_SHARE,
    STAND_IN,
    TRIALS_PER_SIZE,
    Answers,
    Choices,
    choices_of,
)
from bssearch.scaling import rule_of_optimizer
from bssearch.space.usual_rates import FINE_TUNING
from bssearch.spec import StudySpec, load_spec


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a spec, and why it is so."""

    text: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.text} # {self.reason}" if self.reason else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The answers, the spec that they come to, its ``yaml`` text, and the reasons by the field that they are about."""

    answers: Answers
    spec: StudySpec
    yaml: str
    reasons: dict[str, str]
    fixed_bytes: int
    safe_micro_batch: int | None
    claims: list[Claim]

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values; ``spec`` holds the fields that the YAML text gives."""
        return {
            "answers": asdict(self.answers),
            "spec": yaml.safe_load(self.yaml),
            "yaml": self.yaml,
            "reasons": self.reasons,
            "fixed_bytes": self.fixed_bytes,
            "safe_micro_batch": self.safe_micro_batch,
            "notes": [{"code": one.code, "message": one.message} for one in self.claims],
        }


def plan_start(**answers: Any) -> StartPlan:
    """Return a first study's spec by the handbook's questions: memory, priority, scratch or fine-tuning, devices.

    The keyword arguments are those of `bssearch.planning.start.Answers`; what is left out has its default. The spec
    loads as it is; with the stand-in workload it runs as it is too. Raises `UsageError` for wrong answers, and for
    those that contradict each other, and `LaunchError` where the model does not fit, naming what would.
    """
    unknown = [name for name in answers if name not in Answers.__dataclass_fields__]
    if unknown:
        check_known("question", unknown[0], tuple(Answers.__dataclass_fields__))
    if isinstance(answers.get("parameters"), str):
        answers["parameters"] = parameter_count(answers["parameters"])
    given = Answers(**answers)
    chosen = choices_of(given)
    lines = list(_lines(given, chosen))
    text = "\n".join([*map(str, lines), ""])
    spec = load_spec(yaml.safe_load(text))
    reasons = {line.text.strip().partition(":")[0].lstrip("# "): line.reason for line in lines if line.reason}
    return StartPlan(
        answers=given,
        spec=spec,
        yaml=text,
        reasons=reasons,
        fixed_bytes=chosen.memory.fixed_bytes,
        safe_micro_batch=chosen.memory.safe_micro_batch,
        claims=list(claims_about("start")),
    )


def _lines(answers: Answers, chosen: Choices) -> Iterator[Line]:
    yield from _head(answers, chosen)
    yield from _space(answers, chosen)
    yield from _default(answers, chosen)
    yield from _budget(answers, chosen)


def _head(answers: Answers, chosen: Choices) -> Iterator[Line]:
    memory = chosen.memory
    yield Line(
        f"# Memory first: {answers.parameters:,} parameters in {answers.precision} with {answers.optimizer} take "
        f"{memory.fixed_bytes / GIB:.3g} GiB whatever the batch,\n"
        f"# of {answers.memory_gib:g}. {_room(answers, chosen)}"
    )
    yield Line("schema_version: 1")
    yield Line(f"name: {json.dumps(answers.name)}")
    if answers.is_fine_tuning:
        yield Line(f"preset: {FINE_TUNING}", "from a pretrained model: few small steps, not to overwrite what it knows")
    stand_in = "YOURS: it stands in for your own, so that this runs as it is; `bssearch init` writes a start"
    yield Line(f"workload: {json.dumps(answers.workload)}", stand_in if answers.workload == STAND_IN else "")
    yield Line(
        f"target: {{metric: {json.dumps(answers.metric)}, value: {_number(answers.target)}, goal: {answers.goal}}}",
        "YOURS: what your training reaches today, or a bit less; `bssearch target` proposes one",
    )
    reasons = {
        "speed": "least seconds to the target, whatever the batch size",
        "accuracy": "quality before speed: the best metric within trial_train_seconds",
        "cost": "least device-hours to the target",
        "memory": "least seconds to the target among what fits",
    }
    yield Line(f"objective: {PRIORITIES[answers.priority]}", reasons[answers.priority])  # type: ignore[index]
    if answers.price_per_device_hour is not None:
        yield Line(f"price_per_device_hour: {_number(answers.price_per_device_hour)}")
    yield from _training(answers, chosen)


def _room(answers: Answers, chosen: Choices) -> str:
    """Return what is left for activations, in words."""
    safe = chosen.memory.safe_micro_batch
    if safe is None:
        return "How many samples fit beside them the memory probe finds; `bssearch plan memory` estimates it."
    return f"Within {SAFE_SHARE:.0%} of it, a share that is feasible and not optimal, {safe} samples fit at once."


def _training(answers: Answers, chosen: Choices) -> Iterator[Line]:
    if answers.workload.endswith(".py"):  # a script computes its own steps
        return
    yield Line("training:")
    if answers.precision == "fp32":
        yield Line("  precision: fp32", "as asked; auto takes bf16 where the device has it")
    else:
        wide = "bf16 where the device has it, else fp32: it needs no loss scaling, as fp16 does"
        yield Line("  precision: auto", wide)
    if chosen.memory.is_tight or answers.priority == "memory":
        yield Line(
            "  # activation_checkpointing: true",
            "memory is the bound: computes activations again, a quarter or so more time; the workload must have "
            "checkpointed_modules(model)",
        )


def _space(answers: Answers, chosen: Choices) -> Iterator[Line]:
    yield Line("space:")
    yield Line(f"  batch_size: {{low: {chosen.low}, high: {chosen.high}}}", _ladder_reason(answers, chosen))
    rule = rule_of_optimizer(answers.optimizer).value
    yield Line(
        f"  learning_rate: {{reference_batch: {chosen.batch}, low: {_number(float(f'{chosen.lowest_rate:.3g}'))}, "
        f"high: {_number(float(f'{chosen.highest_rate:.3g}'))}, rule: {rule}}}",
        f"around today's at batch {chosen.batch}; the rule is where the search begins, and is audited, not believed",
    )
    if answers.is_fine_tuning:
        yield Line("  warmup_epochs: [0, 0.1]", "little: the weights are good already")
    else:
        yield Line("  warmup_epochs: [0, 1]", "searched: needed at large batches with large rates, said to be from 8×")
    yield Line("  weight_decay: [0, 0.0001, 0.01]", "searched: what is best moves with batch size and rate")
    if answers.priority == "accuracy":
        yield Line("  dropout: {low: 0.0, high: 0.3}", "searched: a larger batch may need more; YOURS must use it")
        yield Line("  label_smoothing: [0.0, 0.1]", "likewise")
    yield Line(f"  optimizer: {{name: {answers.optimizer}}}", _optimizer_reason(answers))
    if chosen.max_micro is not None:
        devices = "32 to 64 a device is usual, and " if answers.devices > 1 else ""
        yield Line(
            f"  max_micro_batch_size: {chosen.max_micro}",
            f"{devices}larger batches accumulate: exact but for batch normalisation, and not stale after any number",
        )


def _ladder_reason(answers: Answers, chosen: Choices) -> str:
    if answers.is_fine_tuning:
        return "16 to 32 is usual in fine-tuning, and a size on either side"
    if answers.devices > 1:
        return (
            f"what {answers.devices} devices make; steps to the target are those of all of them, whose step times go "
            "into `bssearch price` and `bssearch plan scale`"
        )
    return "powers of two, from small up: the largest that fits is rarely the soonest"


def _optimizer_reason(answers: Answers) -> str:
    layerwise = answers.optimizer in ("lars", "lamb")
    return "tuned SGD and Adam are as good at 32k (Nado et al. 2021, arXiv 2102.06356)" if layerwise else ""


def _default(answers: Answers, chosen: Choices) -> Iterator[Line]:
    yield Line("default:", "YOURS: what you train with today; it runs first")
    yield Line(f"  batch_size: {chosen.batch}")
    usual = "usual from scratch" if not answers.is_fine_tuning else "a tenth of what is usual from scratch"
    yield Line(f"  learning_rate: {_number(chosen.learning_rate)}", "" if answers.learning_rate else usual)
    yield Line("  warmup_epochs: 0")
    yield Line("  weight_decay: 0")
    if answers.priority == "accuracy":
        yield Line("  dropout: 0.0")
        yield Line("  label_smoothing: 0.0")


def _budget(answers: Answers, chosen: Choices) -> Iterator[Line]:
    sizes = len([size for size in (2**power for power in range(41)) if chosen.low <= size <= chosen.high])
    yield Line("budget:")
    trials = TRIALS_PER_SIZE * (sizes + (chosen.batch.bit_count() != 1))
    yield Line(f"  trials: {trials}", f"{TRIALS_PER_SIZE} for each batch size; the search ends before where it may")
    yield Line(
        f"  trial_train_seconds: {_number(LIMIT_OVER_SECONDS * answers.seconds)}",
        f"{LIMIT_OVER_SECONDS} times what a training takes today; YOURS where that is another number",
    )
    runs = "{top: 3, runs: 5}" if answers.priority == "accuracy" else "{top: 2, runs: 3}"
    yield Line(f"confirm: {runs}", "fresh seeds for the finalists: the best of many is partly luck")
    pruner = "fast" if answers.priority == "cost" else "balanced"
    yield Line(f"pruner: {{name: {pruner}}}")
    yield Line("executor: {device: auto}", "one device; cuda where there is one")


def _number(value: float) -> str:
    """Return a number as YAML 1.1 reads one, which takes 1e-05 for a text."""
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        return mantissa
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}"
