"""With what a loop takes its next step, where its batch grows: that follows from the steps that are done."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Any

from bssearch.batch_schedule import batch_schedule_of, constant_configurations
from bssearch.errors import UsageError
from bssearch.records import BATCH_SCHEDULE, Configuration


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
