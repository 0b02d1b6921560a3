"""The driver of a study: it tells the engine what happens in the store and in the executor, and does what it asks for.

Several drivers may share a study: each decides on what the store holds, and the store starts a trial only where no
other has been started since. A driver that was refused locks the study from then on while it chooses. What a driver
that dies leaves behind, the others try again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import assert_never

from bssearch.errors import BSSearchError, InterruptedRunError, UsageError
from bssearch.executors import base as executors
from bssearch.records import (
    REFUSED,
    Environment,
    Lease,
    Phase,
    ProbeRecord,
    TrialOutcome,
    TrialPlan,
    TrialState,
)
from bssearch.search import events
from bssearch.search.calibration import (
    COMPARING_VISITS,
    FIRST_VISITS,
    measure_step_times,
    missing_step_times,
    refuse_cap_beyond_memory,
    refuse_where_nothing_fits,
)
from bssearch.search.engine import CONTINUE, Engine, Host, NextRun
from bssearch.search.finding import SearchEnd, quick_prior
from bssearch.search.interrupts import Interrupts
from bssearch.search.leases.claims import Claims
from bssearch.search.leases.heartbeat import HEARTBEAT_SECONDS, LEASE_SECONDS, Heartbeat
from bssearch.search.leases.owner import living, this_driver
from bssearch.search.listener import Listener
from bssearch.search.recorder import Recorder
from bssearch.search.shift import Shift
from bssearch.search.waiting import WaitingTrials
from bssearch.settings import user_name
from bssearch.spec import StudySpec
from bssearch.spec.admission import admitted
from bssearch.storage.repository import Store
from bssearch.storage.revisions import Changes

TIMING = "time steps"
"""The name of the claim under which step times are measured: by one driver of a study at a time."""

POLL_SECONDS = 0.2
"""How long the executor is waited for at a time: how soon Ctrl-C is seen. A choice."""

LOOK_SECONDS = 1.0
"""How long after it found nothing to do a driver looks again at what the others have done. A choice."""


class Driver(Host):
    """Runs one study to its end. The store holds everything; the driver keeps what runs and is not yet written.

    With a list as ``journal`` every event that the engine is told is kept there. With a ``shift`` it may have to make
    room for other studies before it has done.
    """

    def __init__(
        self,
        spec: StudySpec,
        store: Store,
        executor: executors.Executor,
        environment: Environment,
        listener: Listener,
        *,
        journal: list[events.Event] | None = None,
        shift: Shift | None = None,
    ) -> None:
        self.spec = spec
        self.store = store
        self.executor = executor
        self.environment = environment
        self.listener = listener
        self.owner = this_driver()
        digest = store.keep_spec(spec.name, spec.model_dump(mode="json"))
        self._lease = Lease(owner=self.owner, seconds=LEASE_SECONDS, user=user_name(), spec=digest)
        self._claims = Claims(store, spec.name, self.owner)
        self._waiting = WaitingTrials(spec, store, self._claims, listener.note)
        self._recorder = Recorder(store, spec.name)
        super().__init__(self._engine(), journal)
        self._revision = 0
        self._probes: dict[int, ProbeRecord] = {}
        self._saved = events.SavedTrials(frozenset())
        self._is_done = False
        self._error: BSSearchError | None = None
        self._is_stopping = False
        self._is_contended = False  # Once a trial was refused, the study is locked before each choice.
        self._told: set[str] = set()
        # Trials begin by the database's clock; from here on this machine's own counts, which nobody sets.
        self._began = store.time().timestamp() - time.monotonic()
        self._looked = self._next_look = time.monotonic()
        self._first_visits = FIRST_VISITS
        self.interrupts = Interrupts(on_second=executor.kill, at_once=lambda: store.is_waiting)
        self._shift = shift or Shift()
        self._shift.join(self.interrupts, executor.kill)

    def run(self) -> None:
        """Search, then confirm. Raises `InterruptedRunError` on Ctrl-C or at a shift's end, with every trial stored."""
        with self._ready():
            while not self._is_done:
                if self.interrupts.count and not self._is_stopping:  # Ctrl-C: the engine ends in good order
                    self._is_stopping = True
                    self.listener.note("stopping; press Ctrl-C again to kill")
                    self._feed(events.Interrupted())
                self._raise_if_failed()
                self._shift.raise_if_over(self.engine.running)
                self._offer_slots()
                if not self._is_done:
                    self._wait()
                self._raise_if_failed()

    def run_planned(self, next_run: NextRun, phase: Phase, *, visits: int = FIRST_VISITS) -> None:
        """Make the runs of a plan, one trial at a time, and nothing else; raises what `run` raises.

        The plan is asked again after each trial, until it has none. Steps of each batch size have had so many
        ``visits`` before.
        """
        self._first_visits = visits
        self.engine = self._engine(next_run, phase)
        self.run()

    def _engine(self, next_run: NextRun | None = None, phase: Phase = Phase.CONFIRM) -> Engine:
        return Engine(
            self.spec,
            slots=self.executor.slots,
            slots_apart=self.executor.slots_apart,
            next_run=next_run,
            phase=phase,
            device_name=self.environment.device_name,
        )

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Run trials inside: what dead drivers left is marked, interrupts are obeyed, the answer is kept at the end."""
        try:
            renew = partial(self.store.heartbeat, self.spec.name, self.owner, LEASE_SECONDS)
            with self.interrupts, living(self.owner), Heartbeat(renew):
                self._take_over()
                refuse_cap_beyond_memory(self.spec, self.store, self.environment)
                self._refresh()
                self._raise_if_failed()
                self._try_to_save()
                yield
                self._recorder.keep_last_finding()
        except KeyboardInterrupt:
            raise InterruptedRunError("killed; every trial that had ended is stored", hint=CONTINUE) from None
        finally:
            self._abandon()

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Start(plan):
                self._start(plan)
            case events.Stop(number, state, reason):
                self.executor.stop(number, state, reason)
            case events.Wait():
                self._note_wait(action)
                self._next_look = time.monotonic() + LOOK_SECONDS
            case events.TimeSteps(to_compare):
                self._time_steps(COMPARING_VISITS if to_compare else self._first_visits)
            case events.Claim():
                self._feed(events.Claimed(self._claims.take(self._confirming)))
            case events.Release():
                self._claims.give_back(self._confirming)
            case events.Settle():
                trials = [trial for one in action.numbers if (trial := self.engine.history.trial(one)) is not None]
                self._waiting.settle(trials, action.state, for_disk=action.for_disk)
                self._refresh()
            case events.SearchEnded(reason):
                self._search_ended(reason)
            case events.Tell(message):
                self.listener.note(message)
            case events.Finished():
                self._is_done = True
            case events.Failed(error):
                self._error = error
            case _:
                assert_never(action)

    def _offer_slots(self) -> None:
        """Ask the engine what each free slot is for, where something may have changed since it had nothing to do."""
        while not self._is_done and self._error is None and len(self.engine.running) < self.executor.slots:
            if time.monotonic() < self._next_look or self.interrupts.count or self._shift.is_ending:
                break
            self._waiting.checkpoints.held()  # Known before the turn: a store elsewhere may be slow.
            with self.store.turn(self.spec.name) if self._is_contended else nullcontext():
                self._refresh()
                self._feed(events.SlotFree(self._began + time.monotonic()))

    def _refresh(self) -> None:
        """Tell the engine what the store and the folder of checkpoints hold that it does not know."""
        changes = self.store.changes(self.spec.name, since=self._revision)
        if changes.revision != self._revision or changes.is_rewritten or self._revision == 0:
            self._revision = changes.revision
            self._feed(self._changed(changes))
            if changes.is_rewritten:
                self._saved = events.SavedTrials(frozenset())  # The engine has forgotten which there are.
            self._waiting.forget_ended(changes.trials, self.engine.running)
        self._find_saved()

    def _changed(self, changes: Changes) -> events.Changed:
        """Return the event of trials that have changed, with the evaluations of those that ended elsewhere."""
        ended = [
            trial.number
            for trial in changes.trials
            if trial.phase is Phase.SEARCH
            and (changes.is_rewritten or (trial.state.is_finished and trial.lease_owner != self.owner))
        ]
        return events.Changed(
            changes.trials,
            self.store.evaluations(self.spec.name, ended) if ended else {},
            self.store.probes(self.spec.name, self.environment) if changes.has_new_probes else None,
            changes.is_rewritten,
            quick_prior(self.store, self.spec) if changes.has_new_probes else None,
        )

    def _find_saved(self) -> None:
        """Tell the engine which checkpoints can be had here, where those are others than before."""
        found = self._waiting.found()
        if found != self._saved:
            self._saved = found
            self._feed(found)

    def _try_to_save(self) -> None:
        """Tell the engine whether trials can be saved here, where that is not as it takes it to be."""
        if self._waiting.are_saved and self._waiting.checkpoints.is_writable() is not self.engine.pruning.can_wait:
            can_wait = self.engine.pruning.can_wait
            self._feed(events.CannotSave(self._waiting.checkpoints.refusal) if can_wait else events.CanSave())

    def _time_steps(self, visits: int) -> None:
        """Have every batch size visited so many times, by this driver or another, while nothing runs here."""
        asked, trials = (self.spec, self.store, self.environment), self.engine.history.all_trials
        if missing_step_times(*asked, visits, trials=trials):
            refuse_where_nothing_fits(*asked)
            with self._claims.held(TIMING, partial(self._wait_for_claim, TIMING)):
                missing = missing_step_times(*asked, visits, trials=trials)
                if missing:
                    self._shift.work()
                    self.listener.note(f"timing steps at batch sizes {', '.join(map(str, missing))}")
                measure_step_times(
                    self.spec,
                    self.store,
                    self.executor,
                    self.environment,
                    self._raise_if_interrupted,
                    visits,
                    trials=trials,
                    tell=self.listener.note,
                )
        self._feed(events.Timed(self.store.probes(self.spec.name, self.environment)))

    def _wait_for_claim(self, name: str) -> None:
        """Wait while another driver holds a claim; raise `InterruptedRunError` on Ctrl-C or at the end of the shift."""
        self._note_once(f"waiting for another driver ({name})")
        self._shift.wait()
        self._raise_if_interrupted()
        self._shift.raise_if_over()
        time.sleep(LOOK_SECONDS)

    @property
    def _confirming(self) -> str:
        """Return the name of the claim under which runs are confirmed: by one driver of a host at a time."""
        return f"confirm on {self.environment.host}"

    def _take_over(self) -> None:
        """Mark the trials of drivers that died as lost; the search tries them again."""
        self._claims.watch.look()
        lost = self.store.mark_lost(self.spec.name, is_alive=self._claims.watch.is_alive)
        if lost:
            numbers = ", ".join(map(str, lost))
            self.listener.note(f"lost with their driver, to be tried again: trial {numbers}")
        self._looked = time.monotonic()

    def _note_wait(self, wait: events.Wait) -> None:
        if wait.for_others or wait.for_claim:
            self._shift.wait()
        if wait.for_others:
            self._note_once(f"waiting for other drivers: trial {', '.join(map(str, wait.for_others))}")
        if wait.for_claim:
            self._note_once(f"waiting for another driver ({self._confirming})")

    def _search_ended(self, reason: str) -> None:
        """Say why the search has ended, and store it for `study show`."""
        self._note_once(f"the search has ended: {reason}")
        end = SearchEnd(reason=reason, spent=self.engine.history.spent, budget=self.spec.budget)
        self._recorder.keep_last_finding(end)
        self.listener.search_ended(reason, self.engine.history)

    def _note_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.listener.note(message)

    def _wait(self) -> None:
        """Take in what has happened, and keep the store up to date."""
        for event in self.executor.events(timeout=POLL_SECONDS):
            match event:
                case executors.Observed(number, observation):
                    self._recorder.observe(number, observation)
                    self.listener.observed(number, observation)
                    self._feed(events.Evaluated(number, observation))
                case executors.Ended(number, outcome, log):
                    self._end(number, self.engine.as_stored(number, self._waiting.stored(number, outcome)), log)
                    self._next_look = time.monotonic()
        self._recorder.flush_if_due()
        if time.monotonic() - self._looked > HEARTBEAT_SECONDS:
            self._take_over()

    def _start(self, plan: TrialPlan) -> None:
        """Start a trial, unless another driver has been faster: then the store tells something new."""
        trial = self.store.start(self.spec.name, plan, environment=self.environment, lease=self._lease)
        if trial is None:
            self._is_contended = True
            return
        self._shift.work()
        waited = None if plan.resumed is None else self.engine.history.trial(plan.resumed)
        checkpoint = self._waiting.file_for(plan, trial.number)
        if checkpoint is None and self._waiting.is_to_be_saved(plan):
            self._feed(events.CannotSave(self._waiting.checkpoints.refusal))
        self._feed(events.Started(plan, trial, is_savable=checkpoint is not None))
        self.listener.started(trial, self.engine.history)
        try:
            request = admitted(self.spec, plan, trial.number, checkpoint=checkpoint)
        except UsageError as error:
            self._end(trial.number, TrialOutcome(state=TrialState.FAILED, reason=f"{REFUSED}{error.message}"), "")
            return
        not_brought = None if waited is None else self._waiting.bring(waited, lambda: not self.interrupts.count)
        if not_brought is None:
            self.executor.submit(request)
        else:
            self._end(trial.number, self.engine.as_stored(trial.number, not_brought), "")

    def _end(self, number: int, outcome: TrialOutcome, log: str) -> None:
        """Store how a trial ended, and tell the engine and the listener."""
        self._recorder.flush()
        trial = self._recorder.finish(number, outcome, log, self.engine.step_seconds(number))
        self._waiting.ended(trial)
        self._feed(events.Ended(trial))
        if trial.state is TrialState.LOST and outcome.state is not TrialState.LOST:
            self.listener.note(f"trial {number} was taken over by another driver; what it measured here is left out")
            return
        self.listener.ended(trial, self.engine.history)
        self._find_saved()
        self._recorder.keep_finding()

    def _raise_if_failed(self) -> None:
        """Raise the error with which the engine has ended the run, once all that has happened is taken in."""
        if self._error is not None:
            raise self._error

    def _raise_if_interrupted(self) -> None:
        """Raise where somebody interrupted while nothing runs here."""
        if self.interrupts.count:
            raise InterruptedRunError("stopped; every trial is stored", hint=CONTINUE)

    def _abandon(self) -> None:
        """Where the run ends by an error, leave no trial behind as running, and no claim."""
        if self.engine.running:
            self.executor.kill()
        for number in self.engine.running:
            try:
                self._recorder.cancel(number, self.engine.last_observation(number))
            except BSSearchError as error:
                self.listener.note(f"trial {number} could not be stored as cancelled: {error}")
            self._waiting.checkpoints.forget(number)
        for leave in (self._waiting.leave, partial(self._claims.give_back, self._confirming)):
            with suppress(BSSearchError):
                leave()
