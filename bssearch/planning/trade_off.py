"""Time and samples to the target at each batch size: what is predicted of one device from α, β and B_crit.

S steps to the target are S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv 1812.06162, equation 5.2 solved for
them), and each takes α + β·B seconds: t(B) = (α + β·B)·S_min·(1 + B_crit / B), least at B = √(B_crit·α/β). A batch that
does not fit at once is accumulated, of micro-batches that each take their own α.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.planning.scale import LARGEST_BATCH, Hardware, Interval, Load, Row, plan_devices

BEYOND = 8
"""How far the batch sizes reach beyond what is marked, either way: a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch size: its ``row`` on one device, and its time and samples over the least of all points."""

    row: Row
    relative_time: float
    relative_samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """Powers of two with what each takes.

    ``fastest`` has the least time of them. ``optimum`` is √(B_crit·α/β), where nothing had to be accumulated; 0 where α
    is 0.
    """

    points: Sequence[Point]
    fastest: Point
    optimum: float
    b_crit: float


def plan_trade_off(hardware: Hardware, b_crit: Interval, *, max_micro: int | None = None) -> TradeOff:
    """Return what each batch size takes to the target on one device, with at most ``max_micro`` samples at once.

    Raises `UsageError` for a ``max_micro`` that is no whole number above 0.
    """
    optimum = math.sqrt(b_crit.estimate * hardware.alpha_s / hardware.beta_s)
    sizes = _sizes([b_crit.estimate, *([optimum] if optimum else []), *([max_micro] if max_micro else [])])
    rows = [plan_devices(1, hardware, Load(batch=size, max_micro=max_micro), b_crit).rows[0] for size in sizes]
    seconds = [row.relative_samples / row.samples_per_s for row in rows]
    least, fewest = min(seconds), rows[0].relative_samples
    points = [
        Point(row=row, relative_time=one / least, relative_samples=row.relative_samples / fewest)
        for row, one in zip(rows, seconds, strict=True)
    ]
    return TradeOff(
        points=points,
        fastest=min(points, key=lambda point: point.relative_time),
        optimum=optimum,
        b_crit=b_crit.estimate,
    )


def _sizes(marked: Sequence[float]) -> list[int]:
    """Return powers of two around what is marked."""
    most = LARGEST_BATCH.bit_length() - 1
    low = max(0, min(most, math.floor(math.log2(max(1.0, min(marked) / BEYOND)))))
    high = max(0, min(most, math.ceil(math.log2(max(1.0, max(marked) * BEYOND)))))
    return [2**exponent for exponent in range(low, high + 1)]
