"""Time and samples to the target at each batch size: what is predicted of one device from α, β and B_crit.

S steps to the target are S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv 1812.06162, equation 5.2 solved for
them), and each takes α + β·B seconds: t(B) = (α + β·B)·S_min·(1 + B_crit / B), least at B = √(B_crit·α/β). A batch that
does not fit at once is accumulated, of micro-batches that each take their own α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bssearch.planning.scale import LARGEST_BATCH, Row, ScaleRequest, device_rows

BEYOND = 8
"""How far the batch sizes reach beyond what is marked, either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch size: its ``row`` on one device, and its time and samples over the least of all points."""

    row: Row
    relative_time: float
    relative_samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """Powers of two with what each takes.

    ``fastest`` has the least time of them. ``optimum`` is √(B_crit·α/β), if nothing had to be accumulated; 0 if α is 0.
    """

    points: Sequence[Point]
    fastest: Point
    optimum: float
    b_crit: float


def plan_trade_off(asked: ScaleRequest) -> TradeOff:
    """Return what each batch size takes to the target on one device, whatever batch size is asked for."""
    alpha, beta, b_crit, micro = asked.alpha_s or 0.0, asked.beta_s or 1.0, asked.b_crit or 1.0, asked.max_micro or 0
    optimum = math.sqrt(b_crit * alpha / beta)
    marked = [one for one in (b_crit, optimum, micro) if one]
    low, high = _exponent(math.floor, min(marked) / BEYOND), _exponent(math.ceil, max(marked) * BEYOND)
    requests = (
        asked.model_copy(update={"devices": 1, "per_device_batch": None, "batch": 2**exponent})
        for exponent in range(low, high + 1)
    )
    rows = [device_rows(one, b_crit)[0] for one in requests]
    seconds = [row.relative_samples / row.samples_per_s for row in rows]
    points = [
        Point(
            row=row,
            relative_time=one / min(seconds),
            relative_samples=row.relative_samples / rows[0].relative_samples,
        )
        for row, one in zip(rows, seconds, strict=True)
    ]
    fastest = min(points, key=lambda point: point.relative_time)
    return TradeOff(points=points, fastest=fastest, optimum=optimum, b_crit=b_crit)


def _exponent(whole: Callable[[float], int], size: float) -> int:
    """Return the exponent of the power of two that is nearest to a size, of those that are planned."""
    return max(0, min(LARGEST_BATCH.bit_length() - 1, whole(math.log2(max(1.0, size)))))
