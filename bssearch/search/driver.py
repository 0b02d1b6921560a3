"""A study's driver reports events of the store and the executor to the engine, and executes the engine's actions.

The store rejects a new trial if another driver started a trial since the engine's decision. After a rejection, a driver
locks the study before each decision.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Self, assert_never

from bssearch.errors import BSSearchError, DatabaseError, InterruptedRunError, UsageError, require
from bssearch.executors import base as executors
from bssearch.records import (
    REFUSED,
    Environment,
    Lease,
    Observation,
    Phase,
    ProbeRecord,
    StudyRecord,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
    TrialStop,
)
from bssearch.search.calibration import (
    COMPARING_VISITS,
    FIRST_VISITS,
    measure_step_times,
    missing_step_times,
    refuse_where_nothing_fits,
    time_on_devices,
)
from bssearch.search.engine import (
    CONTINUE,
    STOPPED,
    Action,
    ClaimConfirmation,
    Engine,
    Finished,
    NextRun,
    Release,
    SearchEnded,
    SettlePaused,
    Tell,
    TimeSteps,
    Wait,
)
from bssearch.search.finding import quick_prior, save_finding
from bssearch.search.history import History
from bssearch.search.leases import HEARTBEAT_SECONDS, LEASE_SECONDS, ClaimLostError, Leases
from bssearch.search.pruners.checkpoints import WaitingTrials
from bssearch.search.stored_finding import SearchEnd
from bssearch.settings import user_name
from bssearch.spec import StudySpec, admitted
from bssearch.storage.repository import Store


class Listener:
    """Receives a driver's events."""

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """The study is open. ``database`` is the URL without the password."""

    def note(self, message: str) -> None:
        """The driver has a message for the user."""

    def started(self, trial: TrialRecord, history: History) -> None:
        """A trial started."""

    def observed(self, observed: TrialObserved) -> None:
        """A trial has a new evaluation."""

    def ended(self, trial: TrialRecord, history: History) -> None:
        """A trial ended, and ``history`` includes the trial."""

    def search_ended(self, reason: str, history: History) -> None:
        """The search ended."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts SIGINT and SIGTERM in the main thread.

    The second signal calls ``on_second`` and raises KeyboardInterrupt. The first signal raises KeyboardInterrupt if
    ``at_once()`` is true.
    """

    def __init__(self, on_second: Callable[[], None], at_once: Callable[[], bool] = lambda: False) -> None:
        self.count = 0
        self._on_second = on_second
        self._at_once = at_once
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self) -> None:
        """Count an interrupt from any thread."""
        self.count += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._on_second()
        if self.count > 1 or self._at_once():
            raise KeyboardInterrupt


class Shift:
    """A driver's turn at a study, which a supervisor in another thread can end.

    While the shift is ending, the driver starts no trial. The driver ends when no trial runs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.is_ending = False
        self._is_interrupted = False
        self._drivers: list[tuple[Interrupts, Callable[[], None]]] = []
        self._end_loading: Callable[[], None] | None = None
        self._waiting_since: float | None = None

    @property
    def seconds_waited(self) -> float:
        """The seconds for which the driver has only waited for other drivers; 0 while the driver works."""
        since = self._waiting_since
        return 0.0 if since is None else self._clock() - since

    def end(self) -> None:
        self.is_ending = True

    def interrupt(self) -> None:
        """Pause or cancel running trials, stop loading a workload and end the driver. Repeat until the driver ends."""
        # ending the executor does not prevent a process that does not exist yet
        with self._lock:
            self.is_ending = True
            if not self._is_interrupted:
                self._is_interrupted = True
                for interrupts, _ in self._drivers:
                    interrupts.ask()
            if self._end_loading is not None:
                self._end_loading()

    def kill(self) -> None:
        with self._lock:
            for _, kill in self._drivers:
                kill()

    def raise_if_over(self, running: Collection[int] = ()) -> None:
        require(
            running or not self.is_ending,
            "the run paused, because the shift ended; all trials are stored",
            hint=CONTINUE,
            error=InterruptedRunError,
        )

    @contextmanager
    def loading(self, end: Callable[[], None]) -> Iterator[None]:
        """Load a workload in this context. ``end`` stops loading. Raises `InterruptedRunError` if the shift ends."""
        with self._lock:
            self._end_loading = end
        try:
            self.raise_if_over()
            yield
        except Exception:  # `end` may have killed the executor's process
            self.raise_if_over()
            raise
        finally:
            with self._lock:
                self._end_loading = None

    def join(self, interrupts: Interrupts, kill: Callable[[], None]) -> None:
        with self._lock:
            self._drivers.append((interrupts, kill))
            if self._is_interrupted:
                interrupts.ask()

    def wait(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def work(self) -> None:
        self._waiting_since = None


NOTHING_SAVED = frozenset[int](), 0

TIMING = "time steps"  # name of the claim to time steps

POLL_SECONDS = 0.2  # longest wait for the executor's events, and thus for Ctrl-C

LOOK_SECONDS = 1.0  # a waiting driver reads the store at this interval


FLUSH_SECONDS = 1.0  # a crash loses at most this many seconds of evaluations

FINDING_SHARE = 0.02  # maximum share of drivers' time for computing the answer

FINDING_SECONDS_PER_TRIAL = 0.0002  # first estimate: 0.9 s of CPU at 4,000 trials


class Recorder:
    """Stores observations, outcomes and answers of driver ``owner``, except for trials with a lost lease."""

    def __init__(self, store: Store, study: str, owner: str) -> None:
        self._store, self._study, self._owner = store, study, owner
        self._unwritten: list[TrialObserved] = []
        self._flushed = self._next_finding = self._began = time.monotonic()
        self._finding_seconds: float | None = None

    def observe(self, observed: TrialObserved) -> None:
        self._unwritten.append(observed)

    def flush(self) -> frozenset[int]:
        """Write the buffered evaluations, and return the numbers of trials with a lost lease."""
        rows = [(one.number, one.observation) for one in self._unwritten]
        refused = self._store.trials.append_observations(self._study, rows, owner=self._owner)
        self._unwritten, self._flushed = [], time.monotonic()
        return refused

    def flush_if_due(self) -> frozenset[int]:
        return self.flush() if time.monotonic() - self._flushed > FLUSH_SECONDS else frozenset()

    def finish(self, ended: TrialEnded, step_seconds: float | None) -> TrialRecord:
        """Store an outcome, unless the lease is lost. Returns the stored trial."""
        number, outcome, steps = ended.number, ended.outcome, ended.outcome.steps_to_target
        product = None if steps is None or step_seconds is None else steps * step_seconds
        if ended.log.strip():
            self._store.trials.save_log(self._study, number, ended.log, owner=self._owner)
        try:
            return self._store.trials.finish(
                self._study, number, outcome, steps_x_step_time_s=product, owner=self._owner
            )
        except DatabaseError:
            trial = self._store.trials.get(self._study, number)
            if self.holds(trial):
                raise
            return trial

    def holds(self, trial: TrialRecord) -> bool:
        """False if the trial is lost, or if another driver or an import has replaced the row."""
        return trial.lease_owner == self._owner and trial.state is not TrialState.LOST

    def cancel(self, number: int, last: Observation | None) -> None:
        with suppress(DatabaseError):
            self.flush()
        outcome = TrialOutcome(
            state=TrialState.CANCELLED,
            reason="the run ended before the trial ended",
            steps=last.step if last else 0,
            samples=last.samples if last else 0,
            train_seconds=last.train_seconds if last else 0.0,
            final_metric=last.metric if last else None,
        )
        self._store.trials.finish(self._study, number, outcome, steps_x_step_time_s=None, owner=self._owner)

    def keep_finding(self, trials: int) -> None:
        """Store the answer of ``trials`` trials, unless answers take more than `FINDING_SHARE` of drivers' time."""
        started = time.monotonic()
        seconds = self._finding_seconds
        apart = (trials * FINDING_SECONDS_PER_TRIAL if seconds is None else seconds) / FINDING_SHARE
        if started < self._next_finding or started < self._began + apart:
            return
        left = apart - self._store.findings.age_seconds(self._study)
        if 0 < left <= apart:  # `left` is longer only if a clock was reset
            self._next_finding = started + left
            return
        save_finding(self._store, self._study)
        ended = time.monotonic()
        self._finding_seconds = ended - started
        self._next_finding = ended + self._finding_seconds / FINDING_SHARE


class Driver:
    """Runs a study. The store has all results, except evaluations of about the last `FLUSH_SECONDS`."""

    def __init__(
        self,
        spec: StudySpec,
        store: Store,
        executor: executors.Executor,
        environment: Environment,
        listener: Listener,
        *,
        shift: Shift | None = None,
    ) -> None:
        self.spec = spec
        self.store = store
        self.executor = executor
        self.environment = environment
        self.listener = listener
        self._leases = Leases(store, spec.name)
        digest = store.studies.keep_spec(spec.name, spec.model_dump(mode="json"))
        self._lease = Lease(owner=self._leases.owner, seconds=LEASE_SECONDS, user=user_name(), spec=digest)
        self._checkpoints = WaitingTrials(spec, store, self._leases, listener.note)
        self._recorder = Recorder(store, spec.name, self._leases.owner)
        self._dropped: set[int] = set()  # trials that still run here, but without a lease
        self.engine = self._engine()
        self._revision = 0
        self._probes: dict[int, ProbeRecord] = {}
        self._saved = NOTHING_SAVED
        self._is_done = False
        self._error: BSSearchError | None = None
        self._is_stopping = False
        self._is_contended = False  # True locks the study before each decision
        self._noted: set[str] = set()
        # Trials use the database's clock. A reset may move this clock, so the driver reads the clock once and adds
        # monotonic seconds.
        self._began = store.time().timestamp() - time.monotonic()
        self._looked, self._next_look = -math.inf, time.monotonic()
        self.interrupts = Interrupts(on_second=executor.kill, at_once=lambda: store.patience.is_waiting)
        self._shift = shift or Shift()
        self._shift.join(self.interrupts, executor.kill)

    def run(self) -> None:
        """Search, then confirm. Raises the engine's error, or `InterruptedRunError` on Ctrl-C or the shift's end."""
        with self._ready():
            while not self._is_done:
                if self.interrupts.count and not self._is_stopping:  # the first Ctrl-C stops gracefully
                    self._is_stopping = True
                    self.listener.note("stopping; press Ctrl-C again to kill the running trials")
                    self._do(self.engine.interrupted())
                self._raise_if_failed()
                self._shift.raise_if_over(self.engine.running)
                while self._offers_slot:
                    self._checkpoints.held()  # before the lock, because a remote store may be slow
                    with self.store.turn(self.spec.name) if self._is_contended else nullcontext():
                        self._refresh()
                        self._do(self.engine.slot_free(self._began + time.monotonic()))
                if not self._is_done:
                    self._wait()

    def time_on_devices(self) -> None:
        with self._ready(), self._leases.held(TIMING, self._wait_to_time):
            time_on_devices(self.spec, self.store, self.executor, self.environment, self._check_timing)

    def run_planned(self, next_run: NextRun, phase: Phase) -> None:
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
        try:
            with self.interrupts, self._leases.beating():
                self._take_over()
                self._raise_if_failed()
                if self._checkpoints.are_saved and not self._checkpoints.is_writable():
                    self._do(self.engine.cannot_save(self._checkpoints.refusal))
                yield
                save_finding(self.store, self.spec.name)
        except KeyboardInterrupt:
            raise InterruptedRunError("the run was killed; all ended trials are stored", hint=CONTINUE) from None
        finally:
            self._abandon()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case TrialPlan():
                    self._start(action)
                case TrialStop():
                    # after a second stop, the executor would save a checkpoint that no driver may store
                    if action.number not in self._dropped:
                        self.executor.stop(action)
                case Wait():
                    self._note_wait(action)
                    self._next_look = time.monotonic() + LOOK_SECONDS
                case TimeSteps(compared):
                    self._time_steps(FIRST_VISITS if compared is None else COMPARING_VISITS, compared)
                case ClaimConfirmation():
                    self._do(self.engine.claimed(self._leases.take(self._confirming)))
                case Release():
                    self._leases.give_back(self._confirming)
                case SettlePaused():
                    trials = [trial for one in action.numbers if (trial := self.engine.history.trial(one)) is not None]
                    self._checkpoints.settle(trials, action.state, for_disk=action.for_disk)
                    self._refresh()
                case SearchEnded(reason):
                    self._search_ended(reason)
                case Tell(message):
                    self.listener.note(message)
                case Finished():
                    self._is_done = True
                case BSSearchError():
                    self._error = action
                case _:
                    assert_never(action)

    @property
    def _offers_slot(self) -> bool:
        is_over = self._is_done or self._error is not None or self.interrupts.count or self._shift.is_ending
        return len(self.engine.running) < self.executor.slots and not is_over and time.monotonic() >= self._next_look

    def _refresh(self) -> None:
        changes = self.store.trials.changes(self.spec.name, since=self._revision)
        if changes.revision != self._revision or changes.is_rewritten or self._revision == 0:
            self._revision = changes.revision
            ended = [
                trial.number
                for trial in changes.trials
                if trial.phase is Phase.SEARCH
                and (changes.is_rewritten or (trial.state.is_finished and trial.lease_owner != self._leases.owner))
            ]
            actions = self.engine.changed(
                changes.trials,
                self.store.trials.evaluations(self.spec.name, ended) if ended else {},
                self.store.probes.by_batch_size(self.spec.name, self.environment) if changes.has_new_probes else None,
                is_rewritten=changes.is_rewritten,
                quick=quick_prior(self.store, self.spec) if changes.has_new_probes else None,
            )
            self._do(actions)
            self._drop(one.number for one in changes.trials if not self._recorder.holds(one))
            if changes.is_rewritten:
                self._saved = NOTHING_SAVED  # the engine has forgotten the saved trials
            self._checkpoints.forget_ended(changes.trials, self.engine.running)
        self._find_saved()

    def _find_saved(self) -> None:
        found = self._checkpoints.found()
        if found != self._saved:
            self._saved = found
            self._do(self.engine.found_saved(*found))

    def _time_steps(self, visits: int, compared: frozenset[int] | None) -> None:
        asked, trials = (self.spec, self.store, self.environment), self.engine.history.all_trials
        missing_sizes = partial(missing_step_times, *asked, visits, trials=trials, compared=compared)
        while missing_sizes():
            refuse_where_nothing_fits(*asked)
            with suppress(ClaimLostError), self._leases.held(TIMING, self._wait_to_time):
                missing = missing_sizes()
                if missing:
                    self._shift.work()
                    self.listener.note(f"timing steps at batch sizes: {', '.join(map(str, missing))}")
                measure_step_times(
                    self.spec,
                    self.store,
                    self.executor,
                    self.environment,
                    self._check_timing,
                    visits,
                    trials=trials,
                    compared=compared,
                    tell=self.listener.note,
                )
                break
        self._do(self.engine.timed(self.store.probes.by_batch_size(self.spec.name, self.environment)))

    def _wait_to_time(self) -> None:
        self._note_once(f"waiting for another driver to {TIMING}")
        self._shift.wait()
        self._raise_if_interrupted()
        self._shift.raise_if_over()
        self._take_over()
        time.sleep(LOOK_SECONDS)

    def _check_timing(self) -> None:
        self._raise_if_interrupted()
        self._leases.check(TIMING)

    @property
    def _confirming(self) -> str:
        return f"confirm on {self.environment.host}"

    def _take_over(self) -> None:
        if time.monotonic() - self._looked <= HEARTBEAT_SECONDS:
            return
        if lost := ", ".join(map(str, self._leases.mark_lost())):
            self.listener.note(f"another driver seems dead; retrying lost trials: {lost}")
        self._looked = time.monotonic()
        self._refresh()

    def _note_wait(self, wait: Wait) -> None:
        if wait.for_others or wait.for_claim:
            self._shift.wait()
        if wait.for_others:
            self._note_once(f"waiting for trials of other drivers: {', '.join(map(str, wait.for_others))}")
        if wait.for_claim:
            self._note_once(f"waiting for another driver to {self._confirming}")

    def _search_ended(self, reason: str) -> None:
        self._note_once(f"the search has ended: {reason}")
        end = SearchEnd(reason=reason, spent=self.engine.history.spent, budget=self.spec.budget)
        save_finding(self.store, self.spec.name, end)
        self.listener.search_ended(reason, self.engine.history)

    def _note_once(self, message: str) -> None:
        if message not in self._noted:
            self._noted.add(message)
            self.listener.note(message)

    def _wait(self) -> None:
        events = self.executor.events(timeout=POLL_SECONDS)
        self._take_over()  # first, because after a suspension lost trials of this driver have events
        for event in events:
            match event:
                case TrialObserved(number) if number in self._dropped:
                    pass
                case TrialObserved():
                    self._recorder.observe(event)
                    self.listener.observed(event)
                    self._do(self.engine.evaluated(event))
                case TrialEnded(number, outcome):
                    outcome = self.engine.as_stored(number, self._checkpoints.stored(number, outcome))
                    self._end(replace(event, outcome=outcome))
                    self._next_look = time.monotonic()
        self._drop(self._recorder.flush_if_due())

    def _drop(self, numbers: Iterable[int]) -> None:
        # Stop trials with a lost lease, and discard the results
        for number in {*self.engine.running} & {*numbers} - self._dropped:
            self._dropped.add(number)
            self.executor.stop(TrialStop(number, TrialState.CANCELLED, "the driver lost the trial's lease"))

    def _start(self, plan: TrialPlan) -> None:
        claim = None if plan.phase is Phase.SEARCH else self._confirming
        lease = replace(self._lease, claim=claim)
        trial = self.store.trials.start(self.spec.name, plan, environment=self.environment, lease=lease)
        if trial is None:
            self._is_contended = True
            if claim is not None:
                self._do(self.engine.claimed(self._leases.take(claim)))
            return
        self._shift.work()
        waited = None if plan.resumed is None else self.engine.history.trial(plan.resumed)
        saves = self._checkpoints.saves(plan)
        checkpoint = self._checkpoints.file_for(trial.number) if saves else None
        if saves and checkpoint is None:
            self._do(self.engine.cannot_save(self._checkpoints.refusal))
        self._do(self.engine.started(plan, trial, is_savable=checkpoint is not None))
        self.listener.started(trial, self.engine.history)
        try:
            request = admitted(self.spec, plan, trial.number, checkpoint=checkpoint)
        except UsageError as error:
            refused = TrialOutcome(state=TrialState.FAILED, reason=f"{REFUSED}{error.message}")
            self._end(TrialEnded(trial.number, refused))
            return
        failed = None if waited is None else self._checkpoints.bring_back(waited, lambda: not self.interrupts.count)
        if failed is None:
            self.executor.submit(request)
        else:
            self._end(TrialEnded(trial.number, self.engine.as_stored(trial.number, failed)))

    def _end(self, ended: TrialEnded) -> None:
        refused = self._recorder.flush()
        trial = self._recorder.finish(ended, self.engine.running[ended.number].step_seconds)
        is_lost = not self._recorder.holds(trial) and ended.outcome.state is not TrialState.LOST
        if trial.lease_owner == self._leases.owner:
            self._checkpoints.ended(trial)  # else another driver owns the checkpoint
        self._do(self.engine.ended(trial))
        self._dropped.discard(trial.number)
        self._drop(refused)
        self.listener.ended(trial, self.engine.history)
        if is_lost:
            self.listener.note(
                f"this driver lost the lease of trial {trial.number}; discarded this driver's results of the trial"
            )
            return
        self._find_saved()
        self._recorder.keep_finding(self.engine.history.length)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise_if_interrupted(self) -> None:
        require(not self.interrupts.count, STOPPED, hint=CONTINUE, error=InterruptedRunError)

    def _abandon(self) -> None:
        if self.engine.running:
            self.executor.kill()
        for number, running in self.engine.running.items():
            try:
                self._recorder.cancel(number, running.last)
                self._checkpoints.forget(number)
            except BSSearchError as error:
                self.listener.note(
                    f"cannot store trial {number} as cancelled; the next run retries this trial: {error}"
                )
        for leave in (self._checkpoints.leave, partial(self._leases.give_back, self._confirming)):
            with suppress(BSSearchError):
                leave()
