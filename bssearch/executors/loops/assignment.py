"""What a loop of the user's own is asked to do, as it sees it."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch

from bssearch.errors import UsageError
from bssearch.executors.messages import Assign, Reply
from bssearch.records import BATCH_SCHEDULE, Configuration, ParameterValue, TrialState
from bssearch.records.batch_schedule import batch_schedule_of, constant_configurations

Metrics = Mapping[str, Any]
Evaluate = Callable[[], Metrics]


class LoopStages:
    """The configuration of each step of a loop, and the samples seen before it; without a schedule there is one.

    ``keeps_micro_batches`` says that only the accumulation grows: the loop goes over a loader whose size cannot change.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._schedule = batch_schedule_of(configuration)
        self.grows = self._schedule is not None
        self.keeps_micro_batches = False
        self._each = constant_configurations(configuration)
        self._first_steps, self._first_samples = [0], [0]
        if self._schedule is None or self._schedule.is_measured:
            return
        for before, stage in pairwise(self._schedule.stages):
            samples = self._first_samples[-1]
            steps = math.ceil((stage.start_samples - samples) / before.batch_size)
            self._first_steps.append(self._first_steps[-1] + steps)
            self._first_samples.append(samples + steps * before.batch_size)

    @property
    def largest(self) -> int:
        """Return the largest batch size."""
        return self._each[-1].batch_size

    def check(self) -> None:
        """Raise `UsageError` for a schedule that no loop of the user's own can follow."""
        if self._schedule is not None and self._schedule.is_measured:
            raise UsageError(
                f"{BATCH_SCHEDULE} = {self._schedule.name!r} goes by the gradient noise scale, which is not measured "
                "in a loop of your own: its gradients are its own",
                hint="a schedule by samples: geometric, linear or milestones; or a workload",
            )

    def refuse(self, who: str, why: str) -> None:
        """Raise `UsageError` where the batch grows; ``who`` trains, and cannot follow, for that is ``why``."""
        if self._schedule is not None:
            raise UsageError(
                f"{BATCH_SCHEDULE} = {self._schedule.name!r}: {who} cannot let the batch grow: {why}",
                hint='a loop of your own in one process, see "Batches that grow" in `bssearch guide own-training`',
            )

    def at(self, steps: int) -> Configuration:
        """Return the batch size, its split and the peak learning rate of the step after so many."""
        return self._each[self._place(steps)]

    def last(self, steps: int) -> Configuration:
        """Return those of the last of so many steps, or of the first one before it has been taken."""
        return self.at(max(0, steps - 1))

    def changes_at(self, steps: int) -> bool:
        """Return whether the step after so many is the first of a stage that follows another one."""
        return steps > 0 and self._place(steps) != self._place(steps - 1)

    def has_new_micro_batches(self, steps: int) -> bool:
        """Return whether the step after so many begins a stage whose micro-batches have another size."""
        return self.changes_at(steps) and self.at(steps).micro_batch_size != self.last(steps).micro_batch_size

    def samples(self, steps: int) -> int:
        """Return the samples that the first ``steps`` see."""
        place = self._place(steps)
        return self._first_samples[place] + (steps - self._first_steps[place]) * self._each[place].batch_size

    def has_seen_again(self, samples: int, steps: int) -> bool:
        """Return whether the last of so many steps has seen the last of another ``samples``, or none was taken."""
        return self.samples(steps) % samples < self.last(steps).batch_size

    def keep_micro_batches(self) -> None:
        """Let only the accumulation grow from now on; raise `UsageError` where a stage is not made of the first's."""
        self.check()
        size = self._each[0].micro_batch_size
        for one in self._each:
            if self.grows and one.batch_size % size:
                raise UsageError(
                    f"batch {one.batch_size} is not made of the loader's micro-batches of {size}, whose size cannot "
                    "change",
                    hint="a function that makes the loader: trial.batches(lambda size: DataLoader(data, "
                    "batch_size=size, ...))",
                )
        self.keeps_micro_batches = self.grows
        if self.grows:
            self._each = [one.in_micro_batches(size) for one in self._each]

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"keeps_micro_batches": self.keeps_micro_batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        if state["keeps_micro_batches"]:
            self.keep_micro_batches()

    def _place(self, steps: int) -> int:
        return bisect_right(self._first_steps, steps) - 1


class Line(Protocol):
    """The line from a loop to its search."""

    def send(self, reply: Reply) -> None:
        """Send a reply; raise `ValueError` if it holds NaN."""

    def progressed(self) -> None:
        """Take note of progress, which keeps the trial from passing for hung."""

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        """Return how the trial is to end, and why; None while it is to go on."""


class Assignment:
    """What a loop is asked to do: to train a trial, to be timed, to say what it is, or nothing (it runs alone).

    What stands here is that of a loop of which nothing is timed, paused or saved. A loop that ``cycles`` goes through
    its data again and again; one that ``evaluates_passes`` is evaluated after each pass, whatever `is_due` says; of one
    that is a look (``is_look``) nothing counts as a trial.
    """

    configuration: Configuration
    parameters: Mapping[str, ParameterValue]
    device: str
    seed = 0
    cycles = True
    evaluates_passes = False
    is_look = False
    is_over = False

    def __init__(self, configuration: Configuration, assign: Assign | None = None) -> None:
        self.configuration = configuration
        self.stages = LoopStages(configuration)
        if assign is not None:
            self.device, self.parameters = assign.device, assign.parameters

    def checkpoint(self) -> str | None:
        """Return the checkpoint of a longer run of which this is a branch, None for a training from its start."""
        return None

    def begin(self) -> None:
        """Begin the training's time; called once before the first step."""

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after so many steps; 0 before the first."""
        return False

    def pause(self) -> None:
        """Leave the training's time."""

    def resume(self) -> None:
        """Go on with the training's time."""

    def stepped(self, step: int, samples: int | None) -> None:
        """Take note of the optimizer steps up to ``step``; None if their ``samples`` were not counted."""

    def diverged(self, reason: str) -> bool:
        """End a trial whose gradients stay not finite; return whether it could end there."""
        return False

    def waited(self, seconds: float) -> None:
        """Take note of a wait for data within the training."""

    def warned(self, sentence: str) -> None:
        """Take note of what makes the trial less than it seems."""

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Take in an evaluation that was due."""

    def settle(self) -> None:
        """End the trial between two steps, if it is asked to or is late; all of the last one has been done."""

    def passes(self, loader: object, in_order: bool) -> int | None:
        """Begin a pass over a loader; return how many of its micro-batches a paused trial has behind it.

        They are to be skipped, then `skipped` called. ``in_order`` says that the loader's order is bssearch's own,
        which leaves them out by itself. None if the pass begins at its start.
        """
        return None

    def skipped(self) -> None:
        """Take note that what a paused trial had behind it has been skipped."""

    def pass_ended(self) -> None:
        """Take note that a pass ends before its loader does: the next one has micro-batches of another size."""

    def looped(self, step: int, because: str = "") -> None:
        """Take note that the loop ended by itself after so many steps; ``because`` says what ended it."""

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        """Keep what a paused training resumes from; return the steps and samples that it has behind it."""
        return 0, 0

    def test(self, evaluate: Evaluate) -> None:
        """Evaluate the test part, if it is asked for."""

    def failed(self, error: BaseException) -> bool:
        """Return whether an error of the user's code is told as an outcome or an answer."""
        return False

    def finish(self) -> None:
        """Tell how the trial ended, once it has and unless that is told."""

    def close(self) -> None:
        """Let go of what measures."""


def ended_by(because: str) -> str:
    """Return what follows the sentence that a loop has ended by itself: what ended it, where that is known."""
    return f": {because}" if because else ""


def number_of(metrics: Metrics, metric: str) -> float:
    """Return one of the metrics that a loop reports as a float, which may be NaN.

    Raises `UsageError` where it is missing or no number.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"evaluate() returned a {type(metrics).__name__}; it must return a mapping such as {{{metric!r}: 0.9}}"
        )
    if metric not in metrics:
        offered = ", ".join(sorted(map(str, metrics))) or "nothing"
        raise UsageError(f"the evaluation reports {offered}; the study's target is of {metric!r}")
    try:
        return float(metrics[metric])
    except (TypeError, ValueError):
        raise UsageError(f"the evaluation reports {metric} = {metrics[metric]!r}: not a number") from None


class Alone(Assignment):
    """The assignment of a script that nobody searches with.

    It is evaluated after every ``evaluate_every`` steps (None: after each pass of `batches`), before the first one not,
    and ends after ``steps`` of them (None: where the script's loop does). It ``prints`` what it evaluates.
    """

    cycles = False

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        parameters: Mapping[str, ParameterValue],
        evaluate_every: int | None = None,
        steps: int | None = None,
        *,
        prints: bool = True,
    ) -> None:
        for name, value in (("evaluate_every", evaluate_every), ("steps", steps)):
            if value is not None and value < 1:
                raise UsageError(f"current_trial({name}={value}): must be >= 1, or None")
        super().__init__(configuration)
        self.seed = seed
        self.parameters = parameters
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._every = evaluate_every
        self.evaluates_passes = evaluate_every is None
        self._most_steps = math.inf if steps is None else steps
        self._prints = prints

    def is_due(self, step: int) -> bool:
        """Return whether the loop is to be evaluated."""
        return self._every is not None and step > 0 and step % self._every == 0

    def stepped(self, step: int, samples: int | None) -> None:
        """End after the last step, unless it is evaluated."""
        self.is_over = step >= self._most_steps and not self.is_due(step)

    def warned(self, sentence: str) -> None:
        """Print it."""
        print(sentence, file=sys.stderr)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Print an evaluation; end after that of the last step."""
        self.is_over = step >= self._most_steps
        if not isinstance(metrics, Mapping):
            raise UsageError(f"evaluate() returned a {type(metrics).__name__}; it must return a mapping of metrics")
        if self._prints:
            print_evaluation(step, {**metrics, **({} if loss is None else {"loss": loss})})

    def test(self, evaluate: Evaluate) -> None:
        """Print the metrics of the test part."""
        told = ", ".join(f"{name} {value}" for name, value in evaluate().items())
        if self._prints:
            print(f"test: {told}", file=sys.stderr)

    def looped(self, step: int, because: str = "") -> None:
        """The loop may end when it likes."""


def print_evaluation(step: int, metrics: Metrics) -> None:
    """Print what an evaluation has found, to stderr."""
    told = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
    print(f"step {step}: {told}", file=sys.stderr)
