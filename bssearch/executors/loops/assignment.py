"""The work that bssearch assigns to a user's training loop."""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from bssearch.errors import UsageError, require
from bssearch.executors.base import Assign, Reply
from bssearch.records import (
    BATCH_SCHEDULE,
    Configuration,
    ParameterValue,
    TrialState,
    batch_schedule_of,
    constant_configurations,
)
from bssearch.training.advisor import Weights

Metrics = Mapping[str, Any]
Evaluate = Callable[[], Metrics]

HOW_TO_EVALUATE = (
    "pass evaluate= to trial.batches(), or call trial.report(accuracy=...) when trial.evaluation_due is true"
)


class LoopStages:
    """The stages of a batch size schedule, or a single stage.

    ``keeps_micro_batches`` says whether only the accumulation grows, at one micro-batch size.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._schedule = batch_schedule_of(configuration)
        self._name = f"{BATCH_SCHEDULE} = {configuration.parameters.get(BATCH_SCHEDULE)!r}"
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
        return self._each[-1].batch_size

    def check(self) -> None:
        """Raise `UsageError` if the schedule follows the gradient noise."""
        require(
            self._schedule is None or not self._schedule.is_measured,
            f"{self._name} follows the gradient noise scale, but batches of your own loop cannot follow this scale",
            hint="use geometric, linear or milestones, or train a workload",
        )

    def refuse(self, who: str, why: str) -> None:
        """Raise `UsageError` if the batch size has a schedule."""
        require(
            self._schedule is None,
            f"{self._name}: {who} cannot grow the batch: {why}",
            hint=f"remove {BATCH_SCHEDULE} from the space, or use your own loop in one process; see "
            '"Batches that grow" in `bssearch guide own-training`',
        )

    def at(self, steps: int) -> Configuration:
        """Return the configuration after ``steps`` steps, at the peak learning rate."""
        return self._each[self._place(steps)]

    def last(self, steps: int) -> Configuration:
        """Return the configuration of step ``max(1, steps)``."""
        return self.at(max(0, steps - 1))

    def changes_at(self, steps: int) -> bool:
        """True if the next step begins another stage."""
        return steps > 0 and self._place(steps) != self._place(steps - 1)

    def has_new_micro_batches(self, steps: int) -> bool:
        return self.changes_at(steps) and self.at(steps).micro_batch_size != self.last(steps).micro_batch_size

    def samples(self, steps: int) -> int:
        place = self._place(steps)
        return self._first_samples[place] + (steps - self._first_steps[place]) * self._each[place].batch_size

    def has_seen_again(self, samples: int, steps: int) -> bool:
        """True at step 0 and after every ``samples`` samples."""
        return self.samples(steps) % samples < self.last(steps).batch_size

    def keep_micro_batches(self) -> None:
        """Let only accumulation grow. Raises `UsageError` if the micro-batch size does not divide a batch size."""
        size = self._each[0].micro_batch_size
        for one in self._each:
            require(
                one.batch_size % size == 0,
                f"batch size {one.batch_size} must be a multiple of {size}, the size of the loader's micro-batches",
                hint="give a function that makes the loader: trial.batches(lambda size: DataLoader(data, "
                "batch_size=size, ...))",
            )
        self.keeps_micro_batches = self.grows
        self._each = [one.in_micro_batches(size) for one in self._each]

    def state(self) -> dict[str, Any]:
        return {"keeps_micro_batches": self.keeps_micro_batches}

    def restore(self, state: dict[str, Any]) -> None:
        if state["keeps_micro_batches"]:
            self.keep_micro_batches()

    def _place(self, steps: int) -> int:
        return bisect_right(self._first_steps, steps) - 1


class Line(Protocol):
    """A loop's connection to its search."""

    def send(self, reply: Reply) -> None:
        """Send a reply. Raises `ValueError` if a number is not finite."""

    def progressed(self) -> None:
        """Record progress. A trial without progress counts as hung."""

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        """Return the state and reason of a requested stop, if any."""


class Assignment:
    """The work of a loop: a trial, a measurement, a description, or a run without a search.

    The methods of this base class have no effect. For ``searched`` and ``needs_samples``, see `Program`.

    Attributes:
        cycles: whether the loop repeats the data.
        evaluates_passes: whether to evaluate after each pass over the data.
        is_look: whether the work is a measurement or description.
        counts_tokens: whether batch sizes count tokens; None outside a study.
    """

    parameters: Mapping[str, ParameterValue]
    device: str
    seed = 0
    cycles = True
    evaluates_passes = False
    is_look = False
    is_over = False
    counts_tokens: bool | None = None
    searched: Collection[str] = ()
    needs_samples = False

    def __init__(self, configuration: Configuration, assign: Assign | None = None) -> None:
        self.configuration = configuration
        self.stages = LoopStages(configuration)
        if assign is not None:
            self.device, self.parameters = assign.device, assign.parameters
            self.counts_tokens = assign.program.counts_tokens
            self.searched, self.needs_samples = assign.program.searched, assign.program.needs_samples

    def checkpoint(self) -> str | None:
        """Return the path of the checkpoint to branch from, if any."""
        return None

    def begin(self) -> None:
        """Start the clock."""

    def is_due(self, step: int) -> bool:
        """True if an evaluation is due after ``step`` steps."""
        return False

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stepped(self, step: int, samples: int | None) -> None:
        """Record ``step`` completed steps and the new ``samples``, if known."""

    def diverged(self, reason: str) -> bool:
        """End the trial as diverged. Returns False if the work is not a trial."""
        return False

    def modelled(self, modules: Sequence[nn.Module], tokens: Weights) -> None:
        """Note the trained modules, and the tokens of the current micro-batches, if known."""

    def first_rate(self, is_peak: bool) -> None:
        """Note whether the first step has the peak learning rate."""

    def waited(self, seconds: float) -> None: ...

    def warned(self, sentence: str) -> None: ...

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None: ...

    def settle(self) -> None:
        """End the trial if the search requests a stop or the trial has reached a limit."""

    def passes(self, loader: object, in_order: bool) -> int | None:
        """Begin a pass.

        Returns the number of micro-batches to skip, or None unless the trial resumes within a pass. If ``in_order`` is
        set, bssearch's sampler skips the micro-batches. Then call `skipped`.
        """
        return None

    def skipped(self) -> None:
        """Note that the loop has skipped the micro-batches."""

    def pass_ended(self) -> None:
        """End the pass early, because the micro-batch size changes."""

    def looped(self, step: int, because: str = "") -> None:
        """Handle a loop that ends before the trial."""

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        """Register objects to checkpoint. Returns the numbers of completed steps and samples."""
        return 0, 0

    def test(self, evaluate: Evaluate) -> None: ...

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """Report that memory ran out. Returns False if the caller must report the error."""
        return False

    def finish(self) -> None:
        """Report the trial's end, once."""

    def close(self) -> None:
        """Stop measuring memory."""


def ended_by(because: str) -> str:
    return f": {because}" if because else ""


def number_of(metrics: Metrics, metric: str) -> float:
    """Return the metric's value, possibly NaN. Raises `UsageError` if the metric is missing or not a number."""
    require(
        isinstance(metrics, Mapping),
        f"evaluate() returned {type(metrics).__name__}; expected a mapping such as {{{metric!r}: 0.9}}",
    )
    require(
        metric in metrics,
        f"the evaluation reports {', '.join(sorted(map(str, metrics))) or 'no metric'}; the study's target metric is "
        f"{metric!r}",
        hint=f"report or log {metric!r}, or correct target.metric in the spec",
    )
    try:
        return float(metrics[metric])
    except (TypeError, ValueError):
        raise UsageError(
            f"the evaluation reports {metric} = {metrics[metric]!r}, which is not a number",
            hint=f"report {metric} as a number",
        ) from None


class Alone(Assignment):
    """A script's run without a search.

    If ``evaluate_every`` is None, an evaluation follows each pass. If ``steps`` is None, the loop itself ends the run.
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
            require(value is None or value >= 1, f"current_trial(): {name} = {value} must be >= 1, or None")
        super().__init__(configuration)
        self.seed = seed
        self.parameters = parameters
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._every = evaluate_every
        self.evaluates_passes = evaluate_every is None
        self._most_steps = math.inf if steps is None else steps
        self._prints = prints

    def is_due(self, step: int) -> bool:
        return self._every is not None and step > 0 and step % self._every == 0

    def stepped(self, step: int, samples: int | None) -> None:
        self.is_over = step >= self._most_steps and not self.is_due(step)

    def warned(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        self.is_over = step >= self._most_steps
        require(
            isinstance(metrics, Mapping),
            f"evaluate() returned {type(metrics).__name__}; expected a mapping of metrics",
        )
        if self._prints:
            print_evaluation(step, {**metrics, **({} if loss is None else {"loss": loss})})

    def test(self, evaluate: Evaluate) -> None:
        metrics = evaluate()
        if self._prints:
            print(f"test: {', '.join(f'{name} {value}' for name, value in metrics.items())}", file=sys.stderr)


def print_evaluation(step: int, metrics: Metrics) -> None:
    values = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
    print(f"step {step}: {', '.join(values)}", file=sys.stderr)
