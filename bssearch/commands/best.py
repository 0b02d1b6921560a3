"""A stored study's answer and best batch schedule, for Python and for exports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bssearch.analysis.answer import Answer as Answer, BatchScheduleAnswer, SavesTime
from bssearch.analysis.batches import are_of_one_model, tuned_curves
from bssearch.analysis.build_answer import answer_beyond, compared_trials, first_verdict, predict_for_device
from bssearch.analysis.growing import typical_run
from bssearch.analysis.law.beyond import BatchCurves, beyond_target
from bssearch.analysis.objectives import TimeToTarget
from bssearch.analysis.shape import Parameters
from bssearch.errors import require, required
from bssearch.records import (
    BATCH_SCHEDULE,
    BATCH_STAGES,
    NOISE_SHARE,
    RATE_RULE,
    BatchSchedule,
    Stage,
    first_crossing,
    run_stages,
)
from bssearch.search.finding import answer
from bssearch.spec import DECAY_SHARE, StudySpec, spec_of
from bssearch.storage.repository import Store, open_store
from bssearch.training.schedule import ONE_CYCLE_END, ONE_CYCLE_RISE, ONE_CYCLE_START, horizon_steps

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as an SVG document, light or dark like the notebook."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    _repr_html_ = _repr_svg_  # inline HTML shows the tooltips


def plot(answer: Answer) -> Picture:
    """Plot the objective against the batch size."""
    from bssearch.figures.plots import objective_picture

    return Picture(objective_picture(answer))


def frame(answer: Answer) -> pd.DataFrame:
    """Return a data frame with a row per batch size; time to target and varied parameters come first."""
    import pandas as pd

    from bssearch.exchange.trial_rows import flat_table, with_first

    columns, rows = flat_table([row.model_dump(mode="json") for row in answer.batches])
    found = pd.DataFrame(rows, columns=columns)
    differing = [one for one in columns if one.startswith("best.parameters.") and found[one].nunique() > 1]
    return found[with_first(["batch_size", "time_to_target_s.median", *differing], columns)]


def page(answer: Answer) -> str:
    from bssearch.figures.page import in_notebook

    return in_notebook(answer)


def mime_bundle(answer: Answer, include: object = None, exclude: object = None) -> dict[str, str]:
    """Return the answer as text and HTML, and the chart as an image for viewers without HTML."""
    return {"text/plain": repr(answer), "text/html": page(answer), "image/svg+xml": plot(answer).svg}


Answer.plot, Answer.frame, Answer._repr_html_, Answer._repr_mimebundle_ = plot, property(frame), page, mime_bundle


def best(study: str, *, db: str | None = None, target: float | None = None) -> Answer:
    """Return a stored study's answer, or the answer for another ``target``.

    bssearch predicts the answer for a harder target, unless an imported trial reached this target.

    Raises `NotFoundError`, `DatabaseError` or `TargetNotReachedError`, and `UsageError` if a prediction is impossible.

    Example: ``print(bssearch.best("digits").optimal.batch_size)``
    """
    with open_store(db, write=False) as store:
        return answer_at(store, study, target)


def answer_at(store: Store, study: str, target: float | None = None) -> Answer:
    record = store.studies.get(study)
    measured = record.target
    if target is None or not math.isfinite(target) or measured.shortfall(target) >= 0:
        return answer(store, study, target)
    wanted = replace(measured, value=target)
    if spec_of(record).is_imported:  # imported curves may go beyond the study's target
        curves = store.trials.curves(study, [one.number for one in store.trials.of(study)])
        if any(first_crossing(one, wanted) for one in curves.values()):
            return answer(store, study, target)
    found, tuned = measured_curves(store, study)
    return answer_beyond(found, wanted, beyond_target(tuned, measured, target))


def measured_curves(store: Store, study: str) -> tuple[Answer, list[BatchCurves]]:
    """Return a study's answer and the curves of the tuned configurations.

    Raises `UsageError` if the objective is not the time to target, or the best configurations have different models.
    """
    record, found = store.studies.get(study), answer(store, study)
    spec = spec_of(record)
    require(
        record.objective == TimeToTarget.name,
        f"study {study!r} has objective {record.objective}, but bssearch predicts only for {TimeToTarget.name}",
        hint=f"run a new study with objective: {TimeToTarget.name}",
    )
    probes, trials = store.probes.by_batch_size(study), store.trials.of(study)
    verdict = first_verdict(record, spec, compared_trials(trials, store.probes.memory_boundary(study)), probes)
    assert verdict is not None, "a study with an answer has a verdict"
    require(
        are_of_one_model(spec, verdict),
        f"the best configurations of study {study!r} have different models, so bssearch cannot predict",
        hint="run a new study with one value for each parameter in space.model",
    )
    numbers = [run.number for candidate in verdict.by_batch.values() for run in candidate.runs]
    return found, list(tuned_curves(spec, verdict, probes, store.trials.curves(study, numbers), record.target))


def predict(store: Store, study: str, step_times: Path, device_name: str | None = None) -> Answer:
    """Predict a stored study's answer from another device's step times.

    ``device_name`` defaults to the stem of ``step_times``.
    """
    from bssearch.exchange.importers.step_times import read_step_times

    record, times = store.studies.get(study), read_step_times(step_times)
    return predict_for_device(record, spec_of(record), store.trials.of(study), times, device_name or step_times.stem)


DIGITS = 4  # significant digits of an exported value; a difference of 1e-4 is far below the seed-to-seed spread


def for_export(values: Mapping[str, Any], spec: StudySpec) -> dict[str, Any]:
    """Round each searched value of a configuration to `DIGITS` digits if the rounded value stays in range."""
    found, space, size = dict(values), spec.space, values["batch_size"]
    own = spec.default_configuration.optimizer  # for a program, whose values name no optimizer
    for one in space.dimensions():
        plain = one.name.removeprefix("reference_").rpartition(".")[2]
        name = one.name if one.name in values else plain
        if one.choices or not isinstance(values.get(name), float):
            continue
        factor = space.learning_rate_factor(size, values.get("optimizer", own)) if plain == "learning_rate" else 1.0
        ends = [factor * space.carried({name: end}, size)[name] for end in (one.low, one.high)]
        short = _rounded(values[name])
        if min(ends) <= short <= max(ends):
            found[name] = short
    return found


def _rounded(value: float) -> float:
    distance = abs(1 - value) if 0.9 < value < 1 else abs(value)  # betas near 1 differ by 1 − beta
    return round(value, DIGITS - 1 - math.floor(math.log10(distance))) if 0 < distance < math.inf else value


@dataclass(frozen=True, slots=True)
class ScheduledTraining:
    """A batch schedule for training, with the configuration's ``values``."""

    values: Parameters
    stages: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...]

    def for_export(self, spec: StudySpec) -> ScheduledTraining:
        short = [for_export({**self.values, **one}, spec) for one in self.stages]
        return ScheduledTraining(
            for_export(self.values, spec),
            [{name: values[name] for name in one} for one, values in zip(self.stages, short, strict=True)],
            self.notes,
        )


def scheduled_training(store: Store, name: str, answer: Answer) -> ScheduledTraining:
    """Return the best batch schedule of an answer; raise `UsageError` if no schedule reached the target."""
    found = required(
        answer.batch_schedule,
        f"study {name!r} has no schedule of growing batches that reached the target",
        hint="set space.batch_schedule in the spec, and search with --set budget.schedule_trials=20",
    )
    starts = {one.batch_size: one.start_samples for one in found.stages if one.start_samples is not None}
    notes = [] if found.saves_time == "yes" else [NO_GAIN[found.saves_time]]
    if found.noise_share is not None:
        run = typical_run(found, store.trials.of(name))
        assert run is not None, "a schedule of an answer has reached the target"
        starts = {
            one.batch_size: one.start_samples for one in run_stages(run, store.trials.observations(name, run.number))
        }
        notes.append(f"each trial measured its own noise scale; the stages are from trial {run.number}")
    return ScheduledTraining(schedule_values(found), _stages(found, starts), tuple(notes))


def schedule_values(found: BatchScheduleAnswer) -> Parameters:
    """Return a batch schedule as parameter values of ``bssearch trial add``."""
    first = found.stages[0]
    schedule = BatchSchedule(
        name=found.name,
        stages=tuple(Stage(one.start_samples or 0, one.batch_size, one.micro_batch_size) for one in found.stages),
        rate_rule=found.rate_rule,
        noise_share=found.noise_share,
    )
    values: Parameters = {"batch_size": first.batch_size}
    if first.micro_batch_size != first.batch_size:
        values |= {
            "micro_batch_size": first.micro_batch_size,
            "accumulation_steps": first.batch_size // first.micro_batch_size,
        }
    values |= found.parameters
    values |= {BATCH_SCHEDULE: found.name, BATCH_STAGES: schedule.text, RATE_RULE: str(found.rate_rule)}
    return values if found.noise_share is None else values | {NOISE_SHARE: found.noise_share}


def _stages(found: BatchScheduleAnswer, starts: Mapping[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "start_samples": starts[one.batch_size],
            "batch_size": one.batch_size,
            "micro_batch_size": one.micro_batch_size,
            "accumulation_steps": one.batch_size // one.micro_batch_size,
            "learning_rate": one.learning_rate,
        }
        for one in found.stages
        if one.batch_size in starts
    ]


NO_GAIN: Mapping[SavesTime, str] = {
    "no": "the schedule saves no time over the best constant batch size",
    "undecided": "the runs leave open whether the schedule saves time over the best constant batch size",
    "not_run": "no runs over several seeds compare the schedule with the best constant batch size",
}


_LOOP = '''\
@IMPORTS@import torch

CONFIGURATION = {
@CONFIGURATION@
}

STAGES = [  # samples before the stage, batch size, micro-batch size, peak learning rate
@STAGES@
]


def stage_at(samples):
    """Return the stage of the step after ``samples``."""
    return [stage for stage in STAGES if stage[0] <= samples][-1]


def rate_factor(samples, train_samples):
    """Return the learning rate after ``samples`` as a factor of the stage's peak; 0 at the end."""
    step = samples // @FIRST@
    warmup = round(@WARMUP@ * train_samples / @FIRST@)
@FACTOR@


def train(model, optimizer, inputs, targets, loss_function, has_ended, seed=0):
    """Train until ``has_ended(model, samples)`` or the schedule's end; return the samples seen.

    ``loss_function(outputs, targets)`` is a mean over samples. An epoch drops its incomplete last batch.
    """
    if len(inputs) < STAGES[-1][1]:
        raise ValueError(f"{len(inputs)} samples are fewer than the largest batch, {STAGES[-1][1]}; use more samples")
    generator = torch.Generator().manual_seed(seed)
    order, offset, samples = torch.randperm(len(inputs), generator=generator), 0, 0
    while (factor := rate_factor(samples, len(inputs))) > 0 and not has_ended(model, samples):
        _, batch_size, micro_batch_size, peak = stage_at(samples)
        if offset + batch_size > len(inputs):
            order, offset = torch.randperm(len(inputs), generator=generator), 0
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
        optimizer.zero_grad()
        for start in range(offset, offset + batch_size, micro_batch_size):
            rows = order[start : start + micro_batch_size].to(inputs.device)
            loss = loss_function(model(inputs[rows]), targets[rows])
            (loss * (micro_batch_size / batch_size)).backward()
@CLIP@        optimizer.step()
        offset, samples = offset + batch_size, samples + batch_size
    return samples
'''

_WARMUP = """\
    if step < warmup:
        return (step + 1) / (warmup + 1)
"""
# Python code for the learning-rate factors of `bssearch.training.schedule.RateSchedule`.
_FACTORS = {
    "constant": f"{_WARMUP}    return 1.0",
    "linear": f"{_WARMUP}    return 1 - (step - warmup) / (@HORIZON@ - warmup)",
    "cosine": f"{_WARMUP}    return (1 + math.cos(math.pi * (step - warmup) / (@HORIZON@ - warmup))) / 2",
    "warmup_stable_decay": f"{_WARMUP}    return 1 - math.sqrt(max(0.0, 1 - (@HORIZON@ - step) / @DECAY@))",
    "one_cycle": f"""\
    top = (warmup or {ONE_CYCLE_RISE!r} * @HORIZON@) - 1
    if step < top:
        start, end, progress = {ONE_CYCLE_START!r}, 1.0, step / top
    else:
        start, end, progress = 1.0, {ONE_CYCLE_END!r}, min(1.0, (step - top) / max(1.0, @HORIZON@ - 1 - top))
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2""",
}


def training_loop(found: ScheduledTraining, comments: Iterable[str]) -> str:
    """Return a Python module whose ``train`` grows the batch by the schedule.

    The caller makes the optimizer from ``CONFIGURATION``.
    """
    values, first = found.values, found.stages[0]["batch_size"]
    kind, horizon = str(values.get("schedule") or "constant"), values.get("horizon_samples")
    factor = _FACTORS.get(kind, _FACTORS["constant"])  # bssearch has no code of a program's own schedule
    if kind in _FACTORS and kind != "constant":
        factor = f"    if step >= @HORIZON@:\n        return 0.0\n{factor}"
    last = 0 if horizon is None else horizon_steps(float(horizon), first)
    norm, numbers = values.get("clip_norm"), ("start_samples", "batch_size", "micro_batch_size", "learning_rate")
    parts = {
        "@IMPORTS@": "import math\n\n" if "math." in factor else "",
        "@FACTOR@": factor,
        "@HORIZON@": repr(last),
        "@DECAY@": repr(float(values.get("decay_share") or DECAY_SHARE) * last),
        "@CLIP@": "" if norm is None else f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {norm!r})\n",
        "@FIRST@": repr(first),
        "@WARMUP@": repr(values.get("warmup_epochs") or 0.0),
        "@STAGES@": "\n".join(f"    {tuple(one[name] for name in numbers)!r}," for one in found.stages),
        "@CONFIGURATION@": "\n".join(f"    {name!r}: {value!r}," for name, value in values.items()),
    }
    text = _LOOP
    for mark, part in parts.items():  # the configuration comes last, because its values may look like marks
        text = text.replace(mark, part)
    return "".join(f"# {comment}\n" for comment in comments) + "\n" + text
