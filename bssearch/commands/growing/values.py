"""The best schedule of growing batches as values: those of a configuration, and its stages written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bssearch.analysis.answer import Answer, BatchScheduleAnswer
from bssearch.analysis.growing import typical_run
from bssearch.batch_schedule import NOISE_SHARE, RATE_RULE, BatchSchedule, Stage
from bssearch.errors import UsageError
from bssearch.records import BATCH_SCHEDULE, BATCH_STAGES
from bssearch.run_stages import run_stages

if TYPE_CHECKING:
    from bssearch.analysis.shape import Parameters
    from bssearch.storage.repository import Store


@dataclass(frozen=True, slots=True)
class ScheduledTraining:
    """What to train with: ``values`` as a configuration has them, and the stages with their samples and rates.

    ``notes`` are what must be known of them.
    """

    values: Parameters
    stages: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...]


def scheduled_training(store: Store, name: str, answer: Answer) -> ScheduledTraining:
    """Return the best schedule of a study's answer; of one that its trial decided, the stages as its run had them.

    Raises `UsageError` where no schedule reached the target.
    """
    found = answer.batch_schedule
    if found is None:
        raise UsageError(
            f"study {name!r} has no schedule of growing batches that reached the target",
            hint="search for one: space.batch_schedule in its spec, and --set budget.schedule_trials=20",
        )
    starts = {one.batch_size: one.start_samples for one in found.stages if one.start_samples is not None}
    notes = [] if found.saves_time == "yes" else [_no_gain(found)]
    if found.noise_share is not None:
        run = typical_run(found, store.trials(name))
        assert run is not None, "a schedule of an answer has reached the target"
        ran = run_stages(run, store.observations(name, run.number))
        starts = {one.batch_size: one.start_samples for one in ran}
        notes.append(f"the trials grew by the noise scale that they measured: the stages are as trial {run.number} ran")
    return ScheduledTraining(schedule_values(found), _stages(found, starts), tuple(notes))


def schedule_values(found: BatchScheduleAnswer) -> Parameters:
    """Return the values of a schedule by name, as ``bssearch enqueue`` takes those of the batch."""
    first = found.stages[0]
    schedule = BatchSchedule(
        name=found.name,
        stages=tuple(Stage(one.start_samples or 0, one.batch_size, one.micro_batch_size) for one in found.stages),
        rate_rule=found.rate_rule,
        noise_share=found.noise_share,
    )
    values: Parameters = {"batch_size": first.batch_size}
    if first.micro_batch_size != first.batch_size:
        accumulation_steps = first.batch_size // first.micro_batch_size
        values |= {"micro_batch_size": first.micro_batch_size, "accumulation_steps": accumulation_steps}
    values |= found.parameters
    values |= {BATCH_SCHEDULE: found.name, BATCH_STAGES: schedule.text, RATE_RULE: str(found.rate_rule)}
    return values if found.noise_share is None else values | {NOISE_SHARE: found.noise_share}


def _stages(found: BatchScheduleAnswer, starts: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the stages that are known to begin, with all that a training needs of each."""
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


def _no_gain(found: BatchScheduleAnswer) -> str:
    said = {
        "no": "it saves no time over the best batch size that stays",
        "undecided": "whether it saves time over the best batch size that stays is undecided",
        "not_run": "whether it saves time over the best batch size that stays was not repeated with other seeds",
    }
    return said[found.saves_time]
