"""What a loop of the user's own is asked to do, as it sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from bssearch.errors import UsageError
from bssearch.records import Configuration, ParameterValue

if TYPE_CHECKING:
    from bssearch.integrations.branching import RequestedBranch
    from bssearch.integrations.growing.stages import LoopStages

Metrics = Mapping[str, Any]
Evaluate = Callable[[], Metrics]


class Assignment(Protocol):
    """What a loop is asked to do: to train a trial, to be timed, to say what it is, or nothing (it runs alone)."""

    seed: int
    device: str
    parameters: Mapping[str, ParameterValue]
    stages: LoopStages

    @property
    def configuration(self) -> Configuration:
        """Return the batch size, micro-batches and learning rate to train with."""
        ...

    @property
    def branch(self) -> RequestedBranch | None:
        """Return the branch of a longer run that is to be trained, None for a training from its start."""
        ...

    @property
    def is_over(self) -> bool:
        """Return whether the loop is to end."""
        ...

    @property
    def cycles(self) -> bool:
        """Return whether the loop goes through its data again and again."""
        ...

    @property
    def evaluates_passes(self) -> bool:
        """Return whether the loop is evaluated after each pass over its data, whatever `is_due` says."""
        ...

    @property
    def is_look(self) -> bool:
        """Return whether the training is only looked at, so that nothing of it counts as a trial."""
        ...

    def begin(self) -> None:
        """Begin the training's time; called once before the first step."""
        ...

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after so many steps; 0 before the first."""
        ...

    def pause(self) -> None:
        """Leave the training's time."""
        ...

    def resume(self) -> None:
        """Go on with the training's time."""
        ...

    def stepped(self, step: int, samples: int | None) -> None:
        """Take note of the optimizer steps up to ``step``; None if their ``samples`` were not counted."""
        ...

    def diverged(self, reason: str) -> bool:
        """End a trial whose gradients stay not finite; return whether it could end there."""
        ...

    def waited(self, seconds: float) -> None:
        """Take note of a wait for data within the training."""
        ...

    def warned(self, sentence: str) -> None:
        """Take note of what makes the trial less than it seems."""
        ...

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Take in an evaluation that was due."""
        ...

    def settle(self) -> None:
        """End the trial between two steps, where it is asked to or is late; all of the last one has been done."""
        ...

    def passes(self, loader: object, in_order: bool) -> int | None:
        """Begin a pass over a loader; return how many of its micro-batches a paused trial has behind it.

        They are to be skipped, then `skipped` called. ``in_order`` says that the loader's order is bssearch's own,
        which leaves them out by itself. None where the pass begins at its start.
        """
        ...

    def skipped(self) -> None:
        """Take note that what a paused trial had behind it has been skipped."""
        ...

    def pass_ended(self) -> None:
        """Take note that a pass ends before its loader does: the next one has micro-batches of another size."""
        ...

    def looped(self, step: int, because: str = "") -> None:
        """Take note that the loop ended by itself after so many steps; ``because`` says what ended it."""
        ...

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        """Keep what a paused training resumes from; return the steps and samples that it has behind it."""
        ...

    def test(self, evaluate: Evaluate) -> None:
        """Evaluate the test part, where it is asked for."""
        ...


def ended_by(because: str) -> str:
    """Return what follows the sentence that a loop has ended by itself: what ended it, where that is known."""
    return f": {because}" if because else ""


class Untimed:
    """What an `Assignment` does that times nothing, and of which nothing is paused or saved."""

    is_look = False
    branch: RequestedBranch | None = None

    def begin(self) -> None:
        """Nothing is timed."""

    def pause(self) -> None:
        """Nothing is timed."""

    def resume(self) -> None:
        """Nothing is timed."""

    def diverged(self, reason: str) -> bool:
        """Nothing ends as diverged."""
        return False

    def waited(self, seconds: float) -> None:
        """No wait is counted apart."""

    def settle(self) -> None:
        """Nothing is asked between two steps."""

    def passes(self, loader: object, in_order: bool) -> int | None:
        """Nothing was paused."""
        return None

    def skipped(self) -> None:
        """Nothing was paused."""

    def pass_ended(self) -> None:
        """Nothing is paused."""

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        """Nothing is saved."""
        return 0, 0


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
