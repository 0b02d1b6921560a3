"""Trials submitted to an executor with their checkpoints, which a store elsewhere may keep: sent there, brought here.

Nothing waits for a transfer but the slot of its trial: one that is to go on is submitted once its file is here, and the
end of one that was paused is told once its file is there. Where that fails the trial ends as one that could not be
paused, or that could not go on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bssearch.errors import CheckpointError
from bssearch.executors.base import Ended, Event, Executor
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.pruners.transfer import Transfer
from bssearch.records import COULD_NOT_PAUSE, TrialOutcome, TrialRequest, TrialState

TICK_SECONDS = 0.05
"""How often it is looked whether a transfer is over, while there is one: a choice."""


@dataclass(slots=True)
class _Arriving:
    """A trial that goes on once its file is here, and how it is to end where that has been asked for meanwhile.

    ``paused`` is how it was paused; where it is to be paused again before it has gone on, that is its end.
    """

    request: TrialRequest
    transfer: Transfer[None]
    paused: TrialOutcome | None
    stop: tuple[TrialState, str] | None = None


@dataclass(slots=True)
class _Leaving:
    """The end of a paused trial whose file is on its way."""

    end: Ended
    transfer: Transfer[int]


class Carrier:
    """Has an executor run trials whose checkpoints are kept wherever they are; to be used as the executor is."""

    def __init__(self, executor: Executor, checkpoints: Checkpoints) -> None:
        self._executor = executor
        self._checkpoints = checkpoints
        self._arriving: dict[int, _Arriving] = {}
        self._leaving: dict[int, _Leaving] = {}

    def submit(self, request: TrialRequest, paused: TrialOutcome | None = None) -> None:
        """Start a trial in a free slot, as `Executor.submit` does, or have its file brought first.

        One that goes on was ``paused`` with that outcome, where it is known.
        """
        if request.resumes and self._checkpoints.are_elsewhere:
            self._arriving[request.number] = _Arriving(request, self._checkpoints.bring(request.number), paused)
        else:
            self._executor.submit(request)

    def stop(self, number: int, state: TrialState, reason: str) -> None:
        """Ask a running trial to end, as `Executor.stop` does.

        One that has not gone on yet is paused at once, as it was; in any other state it ends once it has gone on.
        """
        if number in self._arriving:
            self._arriving[number].stop = state, reason
        else:
            self._executor.stop(number, state, reason)

    def events(self, timeout: float) -> list[Event]:
        """Return what has happened since the last call, as `Executor.events` does."""
        found = self._arrived()
        waits_less = found or self._arriving or self._leaving
        for event in self._executor.events(min(timeout, TICK_SECONDS) if waits_less else timeout):
            if isinstance(event, Ended) and self._is_to_be_sent(event):
                self._leaving[event.number] = _Leaving(event, self._checkpoints.send(event.number))
            else:
                found.append(event)
        return [*found, *self._left()]

    def _is_to_be_sent(self, end: Ended) -> bool:
        return end.outcome.state is TrialState.PAUSED and self._checkpoints.are_elsewhere

    def _arrived(self) -> list[Event]:
        """Submit the trials whose files are here; return the ends of those whose files cannot be had."""
        ended: list[Event] = []
        for number, one in list(self._arriving.items()):
            if one.paused is not None and one.stop is not None and one.stop[0] is TrialState.PAUSED:
                del self._arriving[number]
                one.transfer.abandon()
                self._checkpoints.leave_there(number)
                ended.append(Ended(number, replace(one.paused, reason=one.stop[1])))
                continue
            if not one.transfer.is_over:
                continue
            del self._arriving[number]
            try:
                one.transfer.result()
            except CheckpointError as error:
                ended.append(Ended(number, TrialOutcome(state=TrialState.FAILED, reason=str(error))))
                continue
            self._executor.submit(one.request)
            if one.stop is not None:
                self._executor.stop(number, *one.stop)
        return ended

    def _left(self) -> list[Event]:
        """Return the ends of paused trials whose files are in the store, or cannot be."""
        ended: list[Event] = []
        for number, one in list(self._leaving.items()):
            if not one.transfer.is_over:
                continue
            del self._leaving[number]
            outcome = one.end.outcome
            try:
                self._checkpoints.note_sent(number, one.transfer)
            except CheckpointError as error:
                reason = f"{outcome.reason}; {COULD_NOT_PAUSE}: {error}"
                outcome = replace(outcome, state=TrialState.PRUNED, reason=reason)
            ended.append(replace(one.end, outcome=outcome))
        return ended
