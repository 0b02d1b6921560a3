"""Whether a loop follows its batch where that grows, as far as can be told from outside of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bssearch.errors import UsageError
from bssearch.integrations.asked import Asked, tells_accumulation
from bssearch.integrations.assignment import Assignment
from bssearch.records import Configuration

SEE = 'see "Batches that grow" in `bssearch guide own-training`'


class Followed:
    """What a loop must do anew in each stage; ``awaits_batch`` says that the first micro-batch of a size is to come."""

    def __init__(self, assignment: Assignment, asked: Asked) -> None:
        self.awaits_batch = True
        self._assignment = assignment
        self._stages = assignment.stages
        self._asked = asked
        self._before: Configuration | None = None
        self._rates_before: set[float] = set()
        self._has_warned = False

    def resume(self, steps: int) -> None:
        """Go on after so many steps in another process: what was asked for before that was of the first stage."""
        if self._stages.grows and steps:
            self._before = self._stages.at(0)
            self._asked.lately.clear()

    def go_on(self, steps: int) -> None:
        """Go on after so many steps; begin the stage that begins there."""
        if not self._stages.changes_at(steps):
            return
        self._before, self._rates_before = self._stages.last(steps), self._asked.rates
        self._asked.lately.clear()
        if self._stages.has_new_micro_batches(steps):
            self.awaits_batch = True
            self._assignment.pass_ended()

    def check_step(self, now: Configuration) -> None:
        """Check a step that is done, and warn once of a learning rate that did not follow the batch size.

        Raises `UsageError` where it is the first of a stage, and the loop has not asked for its size: it trains at the
        one before.
        """
        before, self._before = self._before, None
        if before is None:
            return
        lately = self._asked.lately
        is_whole = now.accumulation_steps == 1 and "batch_size" in lately
        if now.micro_batch_size != before.micro_batch_size and not is_whole and "micro_batch_size" not in lately:
            raise _not_asked(now, "micro_batch_size", now.micro_batch_size, before.micro_batch_size)
        if now.accumulation_steps != before.accumulation_steps and not tells_accumulation(lately):
            raise _not_asked(now, "accumulation_steps", now.accumulation_steps, before.accumulation_steps)
        if self._has_warned or math.isclose(now.learning_rate, before.learning_rate):
            return
        lacks = self._lacks_rate(now.learning_rate)
        if lacks is not None:
            self._has_warned = True
            self._assignment.warned(f"the batch has grown to {now.batch_size}, and {lacks}")

    def check_size(self, batch: Any, size: int, steps: int) -> None:
        """Warn of a micro-batch, the first of a size, that has another; its tensors tell, in either of two layouts.

        Raises `UsageError` where the batch has grown, and the loader's has not.
        """
        self.awaits_batch = False
        shapes = [tuple(one.shape[:2]) for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim]
        if not shapes or any(size in shape for shape in shapes):
            return
        found = ", ".join(sorted({str(shape[0]) for shape in shapes}))
        old = self._stages.last(steps).micro_batch_size
        if self._stages.has_new_micro_batches(steps) and any(old in shape for shape in shapes):
            raise UsageError(
                f"the batch has grown to {self._stages.at(steps).batch_size}, and the loader's micro-batches still "
                f"have {found} samples; trial.micro_batch_size is {size}",
                hint=SEE,
            )
        self._assignment.warned(f"the loader's first batch has {found} samples; trial.micro_batch_size is {size}")

    def watch(self, is_within_step: Callable[[], bool]) -> None:
        """Have an optimizer's step raise before the last micro-batch of a step: a running count knows of no change."""

        def check(*given: object) -> None:
            if is_within_step():
                raise UsageError(
                    "an optimizer of trial.state took a step before the last of the step's micro-batches, in a trial "
                    "whose batch grows",
                    hint=f"count the micro-batches anew after each step, up to trial.accumulation_steps; {SEE}",
                )

        for one in self._asked.optimizers if self._stages.grows else ():
            one.register_step_post_hook(check)

    def _lacks_rate(self, rate: float) -> str | None:
        """Return what says that the rate of a stage is not used; a schedule of the loop's own may multiply it."""
        has_asked, rates = "learning_rate" in self._asked.lately, self._asked.rates
        if not rates:
            return None if has_asked else "the loop has not asked for trial.learning_rate since"
        if self._asked.has_rate(rate) or (has_asked and rates != self._rates_before):
            return None
        return f"no optimizer of trial.state has its learning rate {rate:.4g}, but {self._asked.said_rates}"


def _not_asked(now: Configuration, field: str, value: int, before: int) -> UsageError:
    return UsageError(
        f"the batch has grown to {now.batch_size}: trial.{field} is {value} instead of {before}, and the loop has not "
        "asked for it since",
        hint=f"read trial.{field} again for each step; {SEE}",
    )
