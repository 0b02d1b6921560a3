"""What the engine of a search is told, and what it asks for.

A host, the driver of a study or a simulation, tells the engine what has happened, one event at a time, and carries out
the actions that it answers with. Both are plain values: a list of events tells a whole search, and can be played again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bssearch.analysis.law.quick import QuickPrior
from bssearch.errors import BSSearchError
from bssearch.records import Observation, ProbeRecord, TrialPlan, TrialRecord, TrialState

Evaluations = Sequence[tuple[float, float]]
"""Those of a trial in the order of time: train seconds and metric."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The store holds something new: trials that have changed, the evaluations of those that ended, the step times.

    ``probes`` holds, by batch size, the step time of the split into micro-batches that its trials run in; None where
    none has changed. ``is_rewritten``: what was known before counts no more. ``quick`` is the quick answer
    that is stored of the study; None where there is none, or it has been told.
    """

    trials: Sequence[TrialRecord] = ()
    evaluations: Mapping[int, Evaluations] = field(default_factory=dict)
    probes: Mapping[int, ProbeRecord] | None = None
    is_rewritten: bool = False
    quick: QuickPrior | None = None


@dataclass(frozen=True, slots=True)
class SlotFree:
    """A slot is free, at a moment in seconds since 1970."""

    now: float


@dataclass(frozen=True, slots=True)
class Started:
    """The store has started the trial of a plan, and it runs here. ``is_savable``: it has a file to be saved to."""

    plan: TrialPlan
    trial: TrialRecord
    is_savable: bool = False


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A trial that runs here was evaluated."""

    number: int
    observation: Observation


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial that ran here has ended and is stored; LOST: another driver had taken it over."""

    trial: TrialRecord


@dataclass(frozen=True, slots=True)
class Timed:
    """The steps of every batch size have been timed that was asked for: the step times as they are now."""

    probes: Mapping[int, ProbeRecord]


@dataclass(frozen=True, slots=True)
class SavedTrials:
    """The paused trials whose checkpoints lie here, and how many bytes those take."""

    saved: frozenset[int]
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class CanSave:
    """Trials can be saved here again, though some could not before this run began."""


@dataclass(frozen=True, slots=True)
class CannotSave:
    """No trial can be saved here, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a `Claim`: this driver alone confirms here now, or another does."""

    granted: bool


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Somebody wants the search to stop in good order."""


Event = (
    Evaluated
    | SlotFree
    | Started
    | Ended
    | Changed
    | SavedTrials
    | Timed
    | Claimed
    | CanSave
    | CannotSave
    | Interrupted
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start the trial of a plan: `Started` follows, or nothing if another driver was faster."""

    plan: TrialPlan


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Have each batch size timed that is not, while nothing runs here: `Timed` follows.

    ``to_compare``: in as many visits as it takes before runs are compared.
    """

    to_compare: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask for the right to confirm alone on this host: `Claimed` follows."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give the right to confirm back."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Have a running trial end in a state: paused, pruned, capped or cancelled. Its `Ended` follows."""

    number: int
    state: TrialState
    reason: str


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


Action = Start | TimeSteps | Claim | Release | Stop | Settle | Wait | SearchEnded | Tell | Finished | Failed
