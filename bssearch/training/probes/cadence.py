"""Evaluation cadence in steps, fixed per batch size: a seed repeats its steps."""

from __future__ import annotations

import math
from dataclasses import asdict

from bssearch.records import ProbeRecord, StepTime

# at most, in the full limit of train seconds: a crossing is then known to 0.1% of the limit
EVALUATIONS_PER_LIMIT = 1000

EVALUATION_SHARE = 0.2  # largest share of a trial's train and evaluation seconds

FEWEST_EVALUATIONS = 20  # at least, in the full limit: a crossing is then known to 5% of the limit


def eval_every_steps(step_seconds: float, evaluation_seconds: float, full_limit: float) -> int:
    """The evaluation cadence in optimizer steps.

    Evaluation may take at most `EVALUATION_SHARE`: e / (n·t + e) ≤ share gives n ≥ e·(1/share − 1) / t. The bounds
    `EVALUATIONS_PER_LIMIT` and `FEWEST_EVALUATIONS` take precedence.
    """
    by_number = full_limit / (EVALUATIONS_PER_LIMIT * step_seconds)
    by_share = evaluation_seconds * (1 / EVALUATION_SHARE - 1) / step_seconds
    return max(1, math.ceil(min(max(by_number, by_share), full_limit / (FEWEST_EVALUATIONS * step_seconds))))


def probe_record(measured: StepTime, full_limit: float) -> ProbeRecord:
    """Add the cadence to a step-time measurement."""
    cadence = None
    if measured.step_seconds is not None and measured.evaluation_seconds is not None:
        cadence = eval_every_steps(measured.step_seconds, measured.evaluation_seconds, full_limit)
    return ProbeRecord(**asdict(measured), eval_every_steps=cadence)
