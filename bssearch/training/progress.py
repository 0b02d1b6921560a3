"""How far a trial has come, whichever part of it came so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from bssearch.curves import Crossing
from bssearch.records import Observation


@dataclass(slots=True)
class Progress:
    """The last observation, the best metric, peaks of memory in bytes, and warnings from before a pause.

    ``crossing`` and ``reached`` are where a trial that trains on met its target, and the sentence that says so.
    """

    last: Observation | None = None
    best: float | None = None
    peaks: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    crossing: Crossing | None = None
    reached: str = ""

    @property
    def peak(self) -> int | None:
        """Return the largest peak of memory, None where none is known."""
        return max(self.peaks, default=None)

    def note_peak(self, peak: int | None) -> None:
        """Keep a peak of the trial itself, before something else is measured beside it; None is unknown."""
        if peak is not None:
            self.peaks.append(peak)

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON values, to be saved."""
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        last, crossing = state["last"], state.get("crossing")  # older checkpoints are of trials that had none
        self.last = None if last is None else Observation(**last)
        self.best, self.peaks, self.warnings = state["best"], state["peaks"], state["warnings"]
        self.crossing = None if crossing is None else Crossing(**crossing)
        self.reached = state.get("reached", "")
