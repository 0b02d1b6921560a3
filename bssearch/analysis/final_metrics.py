"""The parts of an answer on metrics at the end of runs: how well each batch size generalises."""

from __future__ import annotations

from typing import Literal

from bssearch.analysis.shape import Model, Parameters


class MetricOverSeeds(Model):
    """The target's metric on samples that were not trained on, at the end of a batch size's runs: median and spread.

    On the ``test`` part where the runs were tested, which stopped nothing and chose nothing; else the best metric on
    the ``validation`` part, which decides when a run ends and is that much too good. Runs that end at the target differ
    little on the latter. ``standard_deviation`` is over the ``runs``, null below two.
    """

    part: Literal["test", "validation"]
    median: float
    standard_deviation: float | None
    runs: int


class Gap(Model):
    """How much worse a final metric is than the best batch size's, in the metric's unit; below zero it is better.

    The difference of the medians, with the 95 % interval of the means' difference (Welch); null below three runs each.
    """

    value: float
    low: float | None
    high: float | None


class FinalMetrics(Model):
    """The final metrics of one configuration at the end of its budget: medians over ``runs``.

    ``ended_early`` counts the runs that did not come to the end, as one that diverged does; they are left out.
    ``contended`` counts those during which something else used the device. The metrics are null where all are left
    out, and the gap where there is nothing to compare.
    """

    batch_size: int
    parameters: Parameters
    runs: int
    ended_early: int
    contended: int
    final_metric: float | None
    test_metric: float | None
    gap: Gap | None
    trial_numbers: list[int]


class Generalisation(Model):
    """The batch sizes trained for the same ``train_seconds``, whenever they reached the target.

    ``best_batch_size`` has the best final metric on the validation part, which gaps are to. A gap of more than
    ``notable_gap``, two points, is warned of. ``more_regularised`` is the largest batch size with more regularisation;
    ``closed`` says whether that brought a notable gap down to less, null where there was none to close.
    """

    train_seconds: float
    best_batch_size: int
    notable_gap: float
    batches: list[FinalMetrics]
    more_regularised: FinalMetrics | None
    closed: bool | None
