"""Paused trials of a study, as one driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from bssearch.errors import CheckpointError
from bssearch.records import COULD_NOT_PAUSE, Phase, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.search.history import INTERRUPTED
from bssearch.search.leases import Leases, is_alive
from bssearch.search.pruners.checkpoints import Checkpoints
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store


class WaitingTrials(Checkpoints):
    """Paused trials of a study; any driver with the checkpoint may resume one.

    While its trials are paused, this driver holds a claim that shows that it is alive.
    """

    def __init__(self, spec: StudySpec, store: Store, leases: Leases, note: Callable[[str], None]) -> None:
        super().__init__(store.study(spec.name))
        self._spec, self._study_store, self._leases, self._note = spec, store, leases, note
        self._told = ""
        self._has_claim = False

    @property
    def are_saved(self) -> bool:
        """Whether trials are checkpointed."""
        return self._spec.pruner.checkpoint_gib > 0

    def found(self) -> tuple[frozenset[int], int]:
        """Accessible checkpoints and their bytes; report an unreachable store."""
        held = self.held()
        if self.away and self.away != self._told:
            self._told = self.away
            self._note(f"paused trials cannot be resumed for now: {self.away}")
        return held.saved, held.bytes

    def saves(self, plan: TrialPlan) -> bool:
        """True if a planned trial is checkpointed."""
        return plan.phase is Phase.SEARCH and self.are_saved

    def stored(self, number: int, outcome: TrialOutcome) -> TrialOutcome:
        """Store a paused trial's checkpoint; return its outcome, pruned on failure."""
        if outcome.state is TrialState.PAUSED:
            try:
                self.send(number)
            except CheckpointError as error:
                reason = f"{outcome.reason}; {COULD_NOT_PAUSE}: {error}"
                return replace(outcome, state=TrialState.PRUNED, reason=reason)
        return outcome

    def bring_back(self, resumed: TrialRecord, is_wanted: Callable[[], bool]) -> TrialOutcome | None:
        """Fetch a checkpoint; return the trial's outcome on failure. An unwanted trial stays paused."""
        try:
            self.bring(resumed.number, is_wanted)
        except CheckpointError as error:
            if is_wanted() or resumed.outcome is None:
                return TrialOutcome(state=TrialState.FAILED, reason=str(error))
            return replace(resumed.outcome, reason=INTERRUPTED)
        return None

    def ended(self, trial: TrialRecord) -> None:
        """Delete an ended trial's checkpoint unless paused."""
        if trial.state is TrialState.PAUSED:
            if not self._has_claim:
                self._has_claim = self._leases.take(_claim_of(self._leases.owner))
        else:
            self.forget(trial.number)

    def forget_ended(self, trials: Sequence[TrialRecord], running: Collection[int]) -> None:
        """Delete checkpoints of trials that ended for good elsewhere."""
        over = {one.number for one in trials if one.state.is_finished and one.state is not TrialState.PAUSED}
        for number in over & self.present() - {*running}:
            self.forget(number)

    def settle(self, trials: Sequence[TrialRecord], state: TrialState, *, for_disk: bool) -> None:
        """End paused trials of this driver or of dead drivers; all if ``for_disk``."""
        if not for_disk:
            self._leases.look()
        ours = [trial.number for trial in trials if for_disk or self._is_ours(trial)]
        gone = [str(number) for number in ours if not self.has(number)]
        if gone:
            self._note(f"checkpoint missing; cannot resume trials {', '.join(gone)}")
        for number in self._study_store.settle_paused(self._spec.name, ours, state):
            self.forget(number)
        self.close()

    def leave(self) -> None:
        """Release the paused trials to other drivers."""
        self._leases.give_back(_claim_of(self._leases.owner))

    def _is_ours(self, trial: TrialRecord) -> bool:
        """Claims decide, because a live process may serve other studies."""
        owner = trial.lease_owner
        if owner is None or owner == self._leases.owner:
            return True
        alive = is_alive(owner) is not False
        if alive:
            alive = self._leases.has_lease(owner) or not self.has(trial.number)
        if not alive:
            self._study_store.release(self._spec.name, _claim_of(owner), owner=owner)
        return not alive


def _claim_of(owner: str) -> str:
    return f"waiting trials {owner.rpartition('/')[2]}"
