"""Actions that the engine returns; a driver or simulation executes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.errors import BSSearchError
from bssearch.records import TrialPlan, TrialState, TrialStop


@dataclass(frozen=True, slots=True)
class Start:
    """Start a trial. `Engine.started` follows, unless another driver started one first."""

    plan: TrialPlan


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Time untimed batch sizes while no trial runs here. `Engine.timed` follows.

    ``to_compare``: use the visits that comparing runs needs.
    """

    to_compare: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Request the exclusive right to confirm on this host. `Engine.claimed` follows."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release the right to confirm."""


@dataclass(frozen=True, slots=True)
class Settle:
    """End paused trials in a state.

    Spares trials of other living drivers, unless ``for_disk``: the shared disk is full.
    """

    numbers: Sequence[int]
    state: TrialState
    for_disk: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again when a trial ends or after a while.

    ``for_others``: trials of other drivers, if none runs here; ``for_claim``: another driver confirms.
    """

    for_others: tuple[int, ...] = ()
    for_claim: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """The search ended for this reason."""

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
    """The run ends with this error."""

    error: BSSearchError


Action = Start | TimeSteps | Claim | Release | TrialStop | Settle | Wait | SearchEnded | Tell | Finished | Failed
