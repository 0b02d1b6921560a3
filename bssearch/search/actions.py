"""The actions with which the engine of a search answers an event: its driver, or a simulation, carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.errors import BSSearchError
from bssearch.records import TrialPlan, TrialState, TrialStop


@dataclass(frozen=True, slots=True)
class Start:
    """Start the trial of a plan: `Engine.started` follows, or nothing if another driver was faster."""

    plan: TrialPlan


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Have each batch size timed that is not, while nothing runs here: `Engine.timed` follows.

    ``to_compare``: in as many visits as it takes before runs are compared.
    """

    to_compare: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask for the right to confirm alone on this host: `Engine.claimed` follows."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give the right to confirm back."""


@dataclass(frozen=True, slots=True)
class Settle:
    """End paused trials in a state.

    Those of other living drivers are theirs to end, but where the disk that all share asks for it: ``for_disk``.
    """

    numbers: Sequence[int]
    state: TrialState
    for_disk: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be started now; ask again when a trial has ended, or after a while.

    ``for_others`` are the trials of other drivers that are waited for, where nothing runs here; ``for_claim``: another
    driver's confirmation is.
    """

    for_others: tuple[int, ...] = ()
    for_claim: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """The search is at its end, and why; what follows is confirmation, unless a trial is enqueued."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Say a line to whoever watches."""

    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """All is done."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The run cannot go on."""

    error: BSSearchError


Action = Start | TimeSteps | Claim | Release | TrialStop | Settle | Wait | SearchEnded | Tell | Finished | Failed
