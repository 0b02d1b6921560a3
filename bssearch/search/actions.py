"""Actions of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.errors import BSSearchError
from bssearch.records import TrialPlan, TrialState, TrialStop


@dataclass(frozen=True, slots=True)
class Start:
    """Start a trial; `Engine.started` follows, unless another driver started one first."""

    plan: TrialPlan


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Time batch sizes that lack step times, if ``to_compare`` for confirmation; `Engine.timed` follows."""

    to_compare: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Request this host's right to confirm; `Engine.claimed` follows."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release the right to confirm."""


@dataclass(frozen=True, slots=True)
class Settle:
    """End paused trials of this driver and of dead ones; with ``for_disk`` (too many bytes), of any driver."""

    numbers: Sequence[int]
    state: TrialState
    for_disk: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again when a trial ends or after a while.

    ``for_others``: trials of other drivers. ``for_claim``: another driver confirms.
    """

    for_others: tuple[int, ...] = ()
    for_claim: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """The search ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Show a line to the user."""

    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is complete."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The run failed."""

    error: BSSearchError


Action = Start | TimeSteps | Claim | Release | TrialStop | Settle | Wait | SearchEnded | Tell | Finished | Failed
