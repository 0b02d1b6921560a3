"""What a quick answer promised, beside what the search of the same study has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bssearch.analysis.shape import Model

if TYPE_CHECKING:
    from bssearch.analysis.answer import Answer


class Promise(Model):
    """A quick answer's batch size and the search's.

    ``interval`` is that which held the optimum with 90 % confidence; it ``holds`` where it meets the flat range that
    the search found. ``time_ratio`` is the time at the promised batch size, tuned by the search, over that of the
    optimum, null where the search has no time of it.
    """

    batch_size: int
    interval: list[int]
    gain: float
    found_batch_size: int
    found_flat_range: list[int]
    holds: bool
    time_ratio: float | None

    @property
    def in_words(self) -> str:
        """Return the two side by side, for people."""
        low, high = self.interval
        kept = "which holds" if self.holds else "which misses it"
        ratio = "" if self.time_ratio is None else f", where the target takes {self.time_ratio:.2g}× as long"
        return f"bssearch quick had said batch {self.batch_size}{ratio}, and {low} to {high} with 90 %, {kept}"


def promise_of(quick: Mapping[str, Any], answer: Answer) -> Promise | None:
    """Return a stored quick answer beside an answer; None before fresh seeds have confirmed that.

    Raises `KeyError`, `TypeError` and `ValueError` for what is no quick answer.
    """
    if not any(row.confirmed and row.batch_size == answer.optimal.batch_size for row in answer.batches):
        return None
    low, high = (int(end) for end in quick["interval"])
    size = int(quick["optimal"]["batch_size"])
    times = {row.batch_size: row.time_to_target_s.median for row in answer.batches if row.time_to_target_s is not None}
    best = times.get(answer.optimal.batch_size)
    flat = answer.flat_range
    return Promise(
        batch_size=size,
        interval=[low, high],
        gain=float(quick["gain"]),
        found_batch_size=answer.optimal.batch_size,
        found_flat_range=flat,
        holds=low <= flat[1] and flat[0] <= high,
        time_ratio=times[size] / best if best and size in times else None,
    )
