"""The driver: ask, run, record, tell, over any number of slots, until the budget is spent and the best confirmed.

Several drivers may share a study: each decides on what the store holds, and the store starts a trial only where no
other has been started since. What a driver that dies leaves behind, the others try again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bssearch.analysis.objectives.base import objective_of
from bssearch.errors import BSSearchError, DatabaseError, InterruptedRunError, LaunchError
from bssearch.executors.base import Ended, Executor, Observed
from bssearch.history import FAILURES, History
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.pruners.controller import INTERRUPTED, Watch, is_interrupted
from bssearch.records import (
    Environment,
    Observation,
    Phase,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search import confirmation as confirm
from bssearch.search.calibration import (
    measure_step_times,
    missing_step_times,
    refuse_cap_beyond_memory,
    refuse_where_nothing_fits,
)
from bssearch.search.finding import save_finding
from bssearch.search.heartbeat import HEARTBEAT_SECONDS, LEASE_SECONDS, Heartbeat
from bssearch.search.interrupts import Interrupts
from bssearch.search.listener import Listener
from bssearch.search.owner import is_alive, of_one_process, this_driver
from bssearch.search.planner import Planner
from bssearch.search.trial_plan import Job
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

FLUSH_SECONDS = 1.0
POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
"""How long after it found nothing to do a driver looks again at what the others have done."""

FAILURES_IN_A_ROW = 5

FINDING_SHARE = 0.02
"""The answer is made anew when a trial ends, unless that would take more than this share of the time."""


@dataclass(slots=True)
class Running:
    """A trial in a slot; ``step_seconds`` as measured in isolation, ``stopping`` the state that a verdict asked for."""

    job: Job
    step_seconds: float | None
    can_pause: bool
    last: Observation | None = None
    stopping: TrialState | None = None


class Driver:
    """Runs one study to its end. The store holds everything; the driver keeps what runs and what is not yet written."""

    def __init__(
        self, spec: StudySpec, store: Store, executor: Executor, environment: Environment, listener: Listener
    ) -> None:
        self.spec = spec
        self.objective = objective_of(spec)
        self.store = store
        self.executor = executor
        self.environment = environment
        self.listener = listener
        self.owner = this_driver()
        self.checkpoints = Checkpoints(store.study(spec.name))
        self.watch = Watch(spec, lambda number: store.observations(spec.name, number), self.checkpoints)
        self.planner = Planner(spec, self.watch)
        self._running: dict[int, Running] = {}
        self._unwritten: list[tuple[int, Observation]] = []
        self._failures = 0
        self._told: str | None = None
        self._any_ran = False
        self._looked = self._flushed = self._next_look = self._next_finding = time.monotonic()
        self._interrupts = Interrupts(on_second=executor.kill, at_once=lambda: store.is_waiting)

    def run(self) -> None:
        """Search, then confirm. Raises `InterruptedRunError` on Ctrl-C, with every trial stored."""
        with self._ready():
            while True:
                self._run(self.planner.search_job, Phase.SEARCH, self.executor.slots)
                self._settle()
                if self.planner.confirmation_job(self._history()) is not None:
                    self._time_steps()  # Again where others used the device meanwhile: the runs are compared by them.
                with self._claimed(self._confirming):
                    self._run(self.planner.confirmation_job, Phase.CONFIRM, self._slots_to_confirm)
                    self._tell_how_confirmation_ended()
                # What was enqueued, or lost by another driver, meanwhile is run too.
                history = self._history()
                if not history.untimed:
                    job = self.planner.search_job(history)
                    if job is None:
                        return
                    self._start(job, history)

    def _tell_how_confirmation_ended(self) -> None:
        told = confirm.ending(self._history()) if self.spec.confirm.max_runs is not None else None
        if told:
            self.listener.note(told)

    def run_planned(self, next_job: Callable[[History], Job | None], phase: Phase) -> None:
        """Run what a plan asks for, one trial at a time, and nothing else; raises what `run` raises.

        The plan is asked again after each trial, until it has none.
        """
        with self._ready(), self._claimed(self._confirming):
            self._run(next_job, phase, 1)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Run trials inside: what dead drivers left is marked, every batch size is timed, an interrupt is obeyed."""
        try:
            with self._interrupts, Heartbeat(self.store, self.spec.name, self.owner):
                self._take_over()
                for trial in self.store.trials(self.spec.name):
                    self.objective.check_target(trial)
                refuse_cap_beyond_memory(self.spec, self.store, self.environment)
                self._time_steps()
                yield
                self._keep_finding(at_once=True)
        except KeyboardInterrupt:
            raise InterruptedRunError("killed; every trial that had ended is stored", hint=CONTINUE) from None
        finally:
            self._abandon()

    def _time_steps(self) -> None:
        """Have every batch size timed, by this driver or another, while nothing runs here."""
        if missing_step_times(self.spec, self.store, self.environment):
            refuse_where_nothing_fits(self.spec, self.store, self.environment)
            with self._claimed("time steps"):
                missing = missing_step_times(self.spec, self.store, self.environment)
                if missing:
                    self.listener.note(f"timing steps at batch sizes {', '.join(map(str, missing))}")
                measure_step_times(self.spec, self.store, self.executor, self.environment, self._stop_if_interrupted)

    @contextmanager
    def _claimed(self, name: str) -> Iterator[None]:
        """Do what one driver at a time may do; wait for another that does it."""
        told = False
        while not self.store.claim(
            self.spec.name, name, owner=self.owner, lease_seconds=LEASE_SECONDS, is_alive=is_alive
        ):
            if not told:
                self.listener.note(f"waiting for another driver ({name})")
                told = True
            self._stop_if_interrupted()
            time.sleep(LOOK_SECONDS)
        try:
            yield
        except BaseException:
            with suppress(DatabaseError):
                self.store.release(self.spec.name, name, owner=self.owner)
            raise
        self.store.release(self.spec.name, name, owner=self.owner)

    def _take_over(self) -> None:
        """Mark the trials of drivers that died as lost; the search tries them again."""
        lost = self.store.mark_lost(self.spec.name, is_alive=is_alive)
        if lost:
            numbers = ", ".join(map(str, lost))
            self.listener.note(f"lost with their driver, to be tried again: trial {numbers}")
        self._looked = time.monotonic()

    def _history(self) -> History:
        trials = self.store.trials(self.spec.name)
        history = History(self.spec, trials, self.store.probes(self.spec.name, self.environment))
        self.watch.update(history)
        return history

    def _run(self, next_job: Callable[[History], Job | None], phase: Phase, slots: int) -> None:
        """Start jobs while there are any and slots are free; return when all have ended, other drivers' too.

        Where there is none, it is asked for again when a trial has ended, here or elsewhere: only then can there be
        one. After an out-of-memory none is started before the smaller micro-batches have been timed, alone.
        """
        self._next_look = time.monotonic()
        told = False
        while True:
            self._stop_if_interrupted()
            if len(self._running) < slots and time.monotonic() >= self._next_look:
                history = self._history()
                if history.untimed and not self._running:
                    self._time_steps()
                    continue
                job = None if history.untimed else next_job(history)
                if job is None and phase is Phase.SEARCH and not history.untimed:
                    job = self._filler(history)
                if job is not None:
                    self._start(job, history)
                    continue
                running = [str(trial.number) for trial in history.all_trials if is_running(trial, phase)]
                if not self._running and not running:
                    return
                if not self._running and not told:
                    self.listener.note(f"waiting for other drivers: trial {', '.join(running)}")
                    told = True
                self._next_look = time.monotonic() + LOOK_SECONDS
            self._wait()

    @property
    def _confirming(self) -> str:
        """Return the name of the claim under which runs are confirmed: by one driver of a host at a time."""
        return f"confirm on {self.environment.host}"

    @property
    def _slots_to_confirm(self) -> int:
        """Return how many confirmation runs may run at once: none shares its device."""
        return self.executor.slots if self.executor.slots_apart else 1

    def _filler(self, history: History) -> Job | None:
        """Return a confirmation run for a slot that the last search trials leave idle, on a device of its own."""
        if not self._running or not self.executor.slots_apart:
            return None
        job = self.planner.confirmation_job(history)
        if job is None:
            return None
        claimed = self.store.claim(
            self.spec.name, self._confirming, owner=self.owner, lease_seconds=LEASE_SECONDS, is_alive=is_alive
        )
        return job if claimed else None

    def _wait(self) -> None:
        """Take in what has happened, and keep the store up to date."""
        for event in self.executor.events(timeout=POLL_SECONDS):
            match event:
                case Observed(number, observation):
                    self._observe(number, observation)
                case Ended(number, outcome, log):
                    self._end(number, outcome, log)
                    self._next_look = time.monotonic()
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._flush()
        if now - self._looked > HEARTBEAT_SECONDS:
            self._take_over()

    def _start(self, job: Job, history: History) -> None:
        """Start a trial, unless another driver has been faster: then the history tells something new."""
        probe = history.probes[job.configuration.batch_size]
        cadence = probe.eval_every_steps or 1
        number = self._store_start(job, history.length, cadence)
        if number is None:
            if job.resumed is not None:
                self.watch.forget(job.resumed)
            return
        if job.phase is Phase.SEARCH:
            self.watch.started(number)
        checkpoint = self._checkpoint(job, number)
        self._running[number] = Running(job, probe.step_seconds, can_pause=checkpoint is not None)
        full = job.train_seconds_limit >= self.spec.budget.trial_train_seconds
        self.executor.submit(
            TrialRequest(
                number=number,
                configuration=job.configuration,
                seed=job.seed,
                target=self.spec.record_target,
                train_seconds_limit=job.train_seconds_limit,
                stop_at_target=job.stop_at_target and self.objective.stops_at_target,
                limit_state=TrialState.EXHAUSTED if full else TrialState.CAPPED,
                eval_every_steps=cadence,
                evaluate_test=job.phase is not Phase.SEARCH,
                threads=self.spec.executor.threads,
                checkpoint=None if checkpoint is None else str(checkpoint),
                resumes=job.resumed is not None,
            )
        )
        self.listener.started(self.store.trial(self.spec.name, number), self._history())

    def _checkpoint(self, job: Job, number: int) -> Path | None:
        """Return the file that a search trial is saved to where it is paused or interrupted; None where none can be."""
        if job.phase is not Phase.SEARCH or self.spec.pruner.checkpoint_gib == 0:
            return None
        file = self.checkpoints.file_for(number)
        if file is None:
            self._pause_no_more(f"{self.checkpoints.folder} cannot be made")
        return file

    def _store_start(self, job: Job, after: int, cadence: int) -> int | None:
        threads = self.spec.executor.threads
        if job.resumed is not None:
            resumed = self.store.resume_trial(
                self.spec.name,
                job.resumed,
                train_seconds_limit=job.train_seconds_limit,
                lease_owner=self.owner,
                lease_seconds=LEASE_SECONDS,
            )
            return job.resumed if resumed else None
        if job.queued is not None:
            started = self.store.start_queued(
                self.spec.name,
                job.queued,
                configuration=job.configuration,
                train_seconds_limit=job.train_seconds_limit,
                eval_every_steps=cadence,
                threads=threads,
                environment=self.environment,
                lease_owner=self.owner,
                lease_seconds=LEASE_SECONDS,
            )
            return job.queued if started else None
        return self.store.start_trial(
            self.spec.name,
            configuration=job.configuration,
            sampled=job.sampled,
            phase=job.phase,
            uncapped=job.uncapped,
            seed=job.seed,
            train_seconds_limit=job.train_seconds_limit,
            eval_every_steps=cadence,
            threads=threads,
            retry_of=job.retry_of,
            environment=self.environment,
            lease_owner=self.owner,
            lease_seconds=LEASE_SECONDS,
            after=after,
        )

    def _observe(self, number: int, observation: Observation) -> None:
        running = self._running[number]
        running.last = observation
        self._unwritten.append((number, observation))
        if running.job.phase is not Phase.SEARCH:
            return
        may_stop = self._may_stop(running.job) and running.stopping is None
        stop = self.watch.observe(number, observation, may_stop=may_stop)
        if stop is not None:
            running.stopping = stop[0]
            self.executor.stop(number, *stop)

    @staticmethod
    def _may_stop(job: Job) -> bool:
        """Return whether a trial may be stopped for what others did: what the answer needs may not."""
        return job.phase is Phase.SEARCH and not job.uncapped

    def _end(self, number: int, outcome: TrialOutcome, log: str) -> None:
        self._flush()
        running = self._running.pop(number)
        outcome = self._as_stored(running, outcome)
        product = None
        if outcome.steps_to_target is not None and running.step_seconds is not None:
            product = outcome.steps_to_target * running.step_seconds
        if log.strip():
            self.store.save_log(self.spec.name, number, log)
        try:
            self.store.finish_trial(self.spec.name, number, outcome, steps_x_step_time_s=product)
        except DatabaseError:
            if self.store.trial(self.spec.name, number).state is not TrialState.LOST:
                raise
            self.listener.note(f"trial {number} was taken over by another driver; what it measured here is left out")
            return
        trial = self.store.trial(self.spec.name, number)
        if running.stopping is TrialState.PAUSED and outcome.state is TrialState.PRUNED:
            self._pause_no_more(outcome.reason)
        self.listener.ended(trial, self._history())
        self._give_up_excess()
        self._keep_finding()
        self.objective.check_target(trial)
        self.objective.check_measured(trial, self.environment.device_name)
        self._count_failures(number, outcome)

    @staticmethod
    def _as_stored(running: Running, outcome: TrialOutcome) -> TrialOutcome:
        """Return an outcome as it counts: what could not go on from its checkpoint is no fault of the configuration."""
        if running.job.resumed is not None and outcome.state is TrialState.FAILED and running.last is None:
            return replace(outcome, state=TrialState.LOST)
        if running.stopping is None and outcome.state is TrialState.PRUNED:
            return replace(outcome, state=TrialState.CANCELLED)  # Interrupted, and not saved.
        return outcome

    def _pause_no_more(self, reason: str) -> None:
        """Take note that trials cannot be saved here: those that would have waited are stopped from now on."""
        if self.watch.cannot_wait():
            self.listener.note(f"trials are stopped for good from now on where they would have waited: {reason}")

    def _give_up_excess(self) -> None:
        """Prune of the waiting trials those that would be missed least, until the others take no more than they may."""
        while (number := self.watch.excess()) is not None:
            self._give_up([number])

    def _give_up(self, numbers: Collection[int], state: TrialState = TrialState.PRUNED) -> None:
        """End trials that wait; those that others go on with are theirs."""
        for number in self.store.settle_paused(self.spec.name, numbers, state):
            self.checkpoints.forget(number)

    def _settle(self) -> None:
        """End the search: what waits now will not go on."""
        told = self.planner.ending(self._history())
        if told is not None and self._told != told:
            self.listener.note(f"the search has ended: {told}")
            self._told = told
        paused = self.store.trials(self.spec.name, states=[TrialState.PAUSED])
        ours = [trial for trial in paused if self._is_ours(trial)]
        gone = [str(trial.number) for trial in ours if not self.checkpoints.has(trial.number)]
        if gone:
            self.listener.note(f"what was saved of them is gone, so they do not go on: trial {', '.join(gone)}")
        cut_short = [trial.number for trial in ours if trial.uncapped or is_interrupted(trial)]
        self._give_up(cut_short, TrialState.CANCELLED)
        self._give_up([trial.number for trial in ours])
        self.checkpoints.close()

    def _is_ours(self, trial: TrialRecord) -> bool:
        """Return whether a paused trial is of this process, or was left behind on this machine by one that died."""
        if trial.lease_owner is None or of_one_process(trial.lease_owner, self.owner):
            return True
        alive = is_alive(trial.lease_owner)
        return alive is False or (alive is None and self.checkpoints.has(trial.number))

    def _keep_finding(self, at_once: bool = False) -> None:
        """Store the answer as it is now, for those who ask."""
        started = time.monotonic()
        if not at_once and started < self._next_finding:
            return
        save_finding(self.store, self.spec.name)
        ended = time.monotonic()
        self._next_finding = ended + (ended - started) / FINDING_SHARE

    def _count_failures(self, number: int, outcome: TrialOutcome) -> None:
        """Give up where nothing works: after a few failures without a success, after many even so."""
        if outcome.state is TrialState.LOST:
            return
        self._failures = self._failures + 1 if outcome.state is TrialState.FAILED else 0
        self._any_ran |= outcome.state is not TrialState.FAILED
        allowed = FAILURES * len(self.spec.batch_sizes) if self._any_ran else FAILURES_IN_A_ROW
        if self._failures >= allowed:
            raise LaunchError(
                f"{self._failures} trials in a row failed, the last one ({number}) with: {outcome.reason}",
                hint=f"bssearch trial {self.spec.name} {number} shows the traceback",
            )

    def _flush(self) -> None:
        if self._unwritten:
            self.store.append_observations(self.spec.name, self._unwritten)
            self._unwritten = []
        self._flushed = time.monotonic()

    def _stop_if_interrupted(self) -> None:
        """End in good order after Ctrl-C: stop what runs, store how far it came, raise."""
        if not self._interrupts.count:
            return
        self.listener.note("stopping; press Ctrl-C again to kill")
        for number, running in self._running.items():
            if running.stopping is None:
                state = TrialState.PAUSED if running.can_pause else TrialState.CANCELLED
                self.executor.stop(number, state, INTERRUPTED)
        while self._running:
            self._wait()
        raise InterruptedRunError("stopped; every trial is stored", hint=CONTINUE)

    def _abandon(self) -> None:
        """Where the run ends by an error, leave no trial behind as running."""
        if not self._running:
            return
        self.executor.kill()
        for number, running in self._running.items():
            last = running.last
            outcome = TrialOutcome(
                state=TrialState.CANCELLED,
                reason="the run ended before the trial did",
                steps=last.step if last else 0,
                samples=last.samples if last else 0,
                train_seconds=last.train_seconds if last else 0.0,
                final_metric=last.metric if last else None,
            )
            try:
                self._flush()
                self.store.finish_trial(self.spec.name, number, outcome, steps_x_step_time_s=None)
            except BSSearchError as error:
                self.listener.note(f"trial {number} could not be stored as cancelled: {error}")
        self._running.clear()


CONTINUE = "the same command goes on where this one stopped"


def is_running(trial: TrialRecord, phase: Phase) -> bool:
    """Return whether a trial of a phase runs, here or elsewhere."""
    return trial.state is TrialState.RUNNING and trial.phase is phase
