"""The paused trials of a study and their checkpoints, for one driver: which it can resume, and which end."""

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
    """The paused trials of one study and their checkpoints. Drivers with the checkpoint may resume a trial; one does.

    While trials of this driver wait it holds a claim of its own, by which drivers in other processes know that it is
    there.
    """

    def __init__(self, spec: StudySpec, store: Store, leases: Leases, note: Callable[[str], None]) -> None:
        super().__init__(store.study(spec.name))
        self._spec, self._study_store, self._leases, self._note = spec, store, leases, note
        self._told = ""
        self._has_claim = False

    @property
    def are_saved(self) -> bool:
        """Return whether trials of this study are to be saved."""
        return self._spec.pruner.checkpoint_gib > 0

    def found(self) -> tuple[frozenset[int], int]:
        """Return which checkpoints this driver can have, and their bytes; say if their place is away."""
        held = self.held()
        if self.away and self.away != self._told:
            self._told = self.away
            self._note(f"what waits cannot go on for now: {self.away}")
        return held.saved, held.bytes

    def saves(self, plan: TrialPlan) -> bool:
        """Return whether a planned trial is to be saved when it is paused."""
        return plan.phase is Phase.SEARCH and self.are_saved

    def stored(self, number: int, outcome: TrialOutcome) -> TrialOutcome:
        """Store the checkpoint of a trial that was paused here; return its outcome: pruned if that fails."""
        if outcome.state is TrialState.PAUSED:
            try:
                self.send(number)
            except CheckpointError as error:
                reason = f"{outcome.reason}; {COULD_NOT_PAUSE}: {error}"
                return replace(outcome, state=TrialState.PRUNED, reason=reason)
        return outcome

    def bring_back(self, resumed: TrialRecord, is_wanted: Callable[[], bool]) -> TrialOutcome | None:
        """Bring the checkpoint of a paused trial that is to resume; if that fails return the trial's outcome.

        Once the trial is not wanted any more it stays paused.
        """
        try:
            self.bring(resumed.number, is_wanted)
        except CheckpointError as error:
            if is_wanted() or resumed.outcome is None:
                return TrialOutcome(state=TrialState.FAILED, reason=str(error))
            return replace(resumed.outcome, reason=INTERRUPTED)
        return None

    def ended(self, trial: TrialRecord) -> None:
        """Take note of the end of a trial that ran here: its checkpoint goes, unless it waits."""
        if trial.state is TrialState.PAUSED:
            if not self._has_claim:
                self._has_claim = self._leases.take(_claim_of(self._leases.owner))
        else:
            self.forget(trial.number)

    def forget_ended(self, trials: Sequence[TrialRecord], running: Collection[int]) -> None:
        """Delete the checkpoints of trials that have ended for good, whoever ended them; not of those running here."""
        over = {one.number for one in trials if one.state.is_finished and one.state is not TrialState.PAUSED}
        for number in over & self.present() - {*running}:
            self.forget(number)

    def settle(self, trials: Sequence[TrialRecord], state: TrialState, *, for_disk: bool) -> None:
        """End those of some waiting trials that are of this driver, or of one that is gone; all where ``for_disk``."""
        if not for_disk:
            self._leases.look()
        ours = [trial.number for trial in trials if for_disk or self._is_ours(trial)]
        gone = [str(number) for number in ours if not self.has(number)]
        if gone:
            self._note(f"what was saved of them is gone, so they do not go on: trial {', '.join(gone)}")
        for number in self._study_store.settle_paused(self._spec.name, ours, state):
            self.forget(number)
        self.close()

    def leave(self) -> None:
        """End here: what waits is left to whoever comes."""
        self._leases.give_back(_claim_of(self._leases.owner))

    def _is_ours(self, trial: TrialRecord) -> bool:
        """Return whether a paused trial is this driver's, or was left behind by one that is gone.

        Unless its process has ended its claim tells, for a process may serve other studies by now; of a trial whose
        checkpoint is not to be had, nobody here can.
        """
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
    """Return the name of the claim of a driver of which trials wait: the mark at the end of the driver's own."""
    return f"waiting trials {owner.rpartition('/')[2]}"
