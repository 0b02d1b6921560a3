"""What a board is told of a study, one JSON line an event, and what its process says of that."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bssearch.records import ParameterValue


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOpened:
    """A driver goes on with a study; ``mark`` is its own, whatever it is called, and ``spec`` its spec as YAML."""

    name: str
    mark: str
    metric: str
    target: str
    objective: str
    device: str
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial begins, or one that was paused goes on: that is the same trial. ``started_at`` is in epoch seconds."""

    number: int
    phase: str
    seed: int
    started_at: float
    parameters: Mapping[str, ParameterValue]
    retry_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialObserved:
    """One evaluation of a trial; ``figures`` are what else was measured there, by name."""

    number: int
    step: int
    train_seconds: float
    value: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial stopped, in that state and for that reason; one that is paused may go on, from another driver.

    ``is_elsewhere``: another driver started it and died, so that only what a board has of it is to be ended.
    """

    number: int
    state: str
    reason: str
    ended_at: float
    figures: Mapping[str, float]
    is_elsewhere: bool = False

    @property
    def is_over(self) -> bool:
        """Return whether the trial does not go on."""
        return self.state != "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer of the study as it is after so many trials; ``document`` is what ``bssearch best`` prints as JSON."""

    headline: str
    verdict: str
    trials: int
    parameters: Mapping[str, ParameterValue]
    figures: Mapping[str, float]
    document: str


Event = StudyOpened | TrialStarted | TrialObserved | TrialEnded | Answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a board's process has done with its events: so many ``handled``, so many ``failed``, and ``why``."""

    is_ready: bool = False
    handled: int = 0
    failed: int = 0
    why: str = field(default="")


_KINDS: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (StudyOpened, TrialStarted, TrialObserved, TrialEnded, Answered)
}


def encode(event: Event, mask: Callable[[str], str] = str) -> bytes:
    """Return an event as a line; every text in it goes through ``mask``, which takes passwords out."""
    return _line(_masked({"kind": type(event).__name__, **asdict(event)}, mask))


def decode(line: bytes) -> Event:
    """Return the event of a line."""
    fields = json.loads(line)
    return _KINDS[fields.pop("kind")](**fields)


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as a line."""
    return _line(asdict(reply))


def decode_reply(line: bytes) -> Reply:
    """Return the reply of a line."""
    return Reply(**json.loads(line))


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {mask(str(name)): _masked(one, mask) for name, one in value.items()}
    return value
