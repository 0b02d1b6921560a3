"""How often a trial is evaluated: fixed once per batch size, in steps, so that a seed repeats its steps-to-target."""

from __future__ import annotations

import math
from dataclasses import asdict

from bssearch.records import ProbeRecord, StepTime

EVALUATIONS_PER_LIMIT = 1000
"""Evaluations in the full limit of train seconds, at most: a choice; a crossing is then known to 0.1 % of the limit."""

EVALUATION_SHARE = 0.2
"""The largest share of a trial's train and evaluation seconds that evaluation takes: a choice of the design."""

FEWEST_EVALUATIONS = 20
"""Evaluations in the full limit of train seconds, at least: a choice; a crossing is then known to 5 % of the limit."""


def eval_every_steps(step_seconds: float, evaluation_seconds: float, full_limit: float) -> int:
    """Return the evaluation cadence in optimizer steps.

    At most `EVALUATIONS_PER_LIMIT` evaluations in the full limit of train seconds, and evaluation at most
    `EVALUATION_SHARE` of train and evaluation seconds together: e / (n·t + e) ≤ share gives n ≥ e·(1/share − 1) / t.
    Where that would leave fewer than `FEWEST_EVALUATIONS` in the full limit the share gives way: a target that is not
    looked for is not seen.
    """
    by_number = full_limit / (EVALUATIONS_PER_LIMIT * step_seconds)
    by_share = evaluation_seconds * (1 / EVALUATION_SHARE - 1) / step_seconds
    return max(1, math.ceil(min(max(by_number, by_share), full_limit / (FEWEST_EVALUATIONS * step_seconds))))


def probe_record(measured: StepTime, full_limit: float) -> ProbeRecord:
    """Return a step-time measurement with the cadence that follows from it."""
    cadence = None
    if measured.step_seconds is not None and measured.evaluation_seconds is not None:
        cadence = eval_every_steps(measured.step_seconds, measured.evaluation_seconds, full_limit)
    return ProbeRecord(**asdict(measured), eval_every_steps=cadence)
