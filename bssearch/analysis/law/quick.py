"""The shape of a quick answer: what ``bssearch quick --format json`` prints, before any search."""

from __future__ import annotations

from typing import Literal

from bssearch.analysis.answer import Notice
from bssearch.analysis.shape import Model


class QuickOptimum(Model):
    """The batch size that is expected to reach the target soonest, in micro-batches, with the learning rate by rule."""

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    learning_rate: float


class QuickCriticalBatch(Model):
    """The critical batch size in samples, with its 90 % interval."""

    estimate: float
    low: float
    high: float


class QuickRun(Model):
    """A run of the quick answer, with its steps to the target, null where that was not reached.

    ``train_seconds`` are those to the target, else those that it ran.
    """

    trial: int
    batch_size: int
    learning_rate: float
    steps: int | None
    train_seconds: float


class QuickAnswer(Model):
    """A batch size from a minute of measurements, which no search has verified.

    ``interval`` holds the optimum with 90 % confidence, ``flat_range`` the batch sizes expected to be within 5 % of it.
    ``gain`` is the default's expected time over that of ``optimal`` with learning rates by the rule; the learning rate
    of ``optimal`` is another one where that was seen to be there sooner, ``learning_rate_gain`` times (else 1), and a
    retuned one is to be looked for in ``learning_rate_range``. ``largest_micro_batch_size`` is the largest that ran.
    The time of a step is ``alpha_s`` + ``beta_s`` × samples, null below three batch sizes. ``target`` is what the
    ``runs`` were compared at: easier than the study's where the default did not get there. ``noise_scale`` is null
    where it is not known, or its interval reaches 0 or infinity.
    """

    schema_version: Literal[1] = 1
    verified: Literal[False] = False
    study: str
    metric: str
    target: float
    default_batch_size: int
    optimal: QuickOptimum
    interval: list[int]
    flat_range: list[int]
    gain: float
    learning_rate_gain: float
    learning_rate_range: list[float]
    largest_micro_batch_size: int
    b_crit: QuickCriticalBatch
    noise_scale: float | None
    alpha_s: float | None
    beta_s: float | None
    runs: list[QuickRun]
    seconds: float
    warnings: list[Notice]
