"""The driver: ask, run, record, tell, over any number of slots, until the budget is spent and the best confirmed.

Several drivers may share a study: each decides on what the store holds, and the store starts a trial only where no
other has been started since. What a driver that dies leaves behind, the others try again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from bssearch.analysis.objective import measure_of
from bssearch.curves import Envelope, envelope
from bssearch.errors import BSSearchError, DatabaseError, InterruptedRunError, LaunchError, SpecError
from bssearch.executors.base import Ended, Executor, Observed
from bssearch.records import (
    Environment,
    Objective,
    Observation,
    Phase,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search import confirm, pruners
from bssearch.search.answers import save_finding
from bssearch.search.calibration import (
    measure_step_times,
    missing_step_times,
    refuse_cap_beyond_memory,
    refuse_where_nothing_fits,
)
from bssearch.search.heartbeat import HEARTBEAT_SECONDS, LEASE_SECONDS, Heartbeat
from bssearch.search.history import FAILURES, History, measured_seconds
from bssearch.search.interrupts import Interrupts
from bssearch.search.job import Job
from bssearch.search.listener import Listener
from bssearch.search.owner import is_alive, this_driver
from bssearch.search.planner import Planner
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
    """A trial in a slot, with what it has reported; ``step_seconds`` as measured in isolation."""

    job: Job
    step_seconds: float | None
    observations: list[Observation] = field(default_factory=list)
    stopping: bool = False


class Driver:
    """Runs one study to its end. The store holds everything; the driver keeps what runs and what is not yet written."""

    def __init__(
        self, spec: StudySpec, store: Store, executor: Executor, environment: Environment, listener: Listener
    ) -> None:
        self.spec = spec
        self.store = store
        self.executor = executor
        self.environment = environment
        self.listener = listener
        self.owner = this_driver()
        self.planner = Planner(spec, self._curve)
        self._running: dict[int, Running] = {}
        self._unwritten: list[tuple[int, Observation]] = []
        self._curves: dict[int, Envelope] = {}
        self._incumbent: pruners.Incumbent | None = None
        self._failures = 0
        self._any_ran = False
        self._looked = self._flushed = self._next_look = self._next_finding = time.monotonic()
        self._interrupts = Interrupts(on_second=executor.kill, at_once=lambda: store.is_waiting)

    def run(self) -> None:
        """Search, then confirm. Raises `InterruptedRunError` on Ctrl-C, with every trial stored."""
        with self._ready():
            while True:
                self._run(self.planner.search_job, Phase.SEARCH, self.executor.slots)
                if self.planner.confirmation_job(self._history()) is not None:
                    self._time_steps()  # Again where others used the device meanwhile: the runs are compared by them.
                with self._claimed(f"confirm on {self.environment.host}"):
                    self._run(self.planner.confirmation_job, Phase.CONFIRM, 1)
                    self._tell_how_confirmation_ended()
                # What was enqueued, or lost by another driver, meanwhile is run too.
                history = self._history()
                if not history.untimed and self.planner.search_job(history) is None:
                    return

    def _tell_how_confirmation_ended(self) -> None:
        told = confirm.ending(self._history()) if self.spec.confirm.max_runs is not None else None
        if told:
            self.listener.note(told)

    def run_planned(self, next_job: Callable[[History], Job | None], phase: Phase) -> None:
        """Run what a plan asks for, one trial at a time, and nothing else; raises what `run` raises.

        The plan is asked again after each trial, until it has none.
        """
        with self._ready(), self._claimed(f"confirm on {self.environment.host}"):
            self._run(next_job, phase, 1)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Run trials inside: what dead drivers left is marked, every batch size is timed, an interrupt is obeyed."""
        try:
            with self._interrupts, Heartbeat(self.store, self.spec.name, self.owner):
                self._take_over()
                for trial in self.store.trials(self.spec.name):
                    self._refuse_target_met_at_once(trial)
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
        best = history.incumbent
        if best is not None and (self._incumbent is None or best.number != self._incumbent.number):
            self._incumbent = pruners.Incumbent(best.number, measured_seconds(best), self._curve(best.number))
        return history

    def _curve(self, number: int) -> Envelope:
        if number not in self._curves:
            observations = self.store.observations(self.spec.name, number)
            self._curves[number] = envelope(observations, self.spec.record_target)
        return self._curves[number]

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
            return
        self._running[number] = Running(job, probe.step_seconds)
        full = job.train_seconds_limit >= self.spec.budget.trial_train_seconds
        self.executor.submit(
            TrialRequest(
                number=number,
                configuration=job.configuration,
                seed=job.seed,
                target=self.spec.record_target,
                train_seconds_limit=job.train_seconds_limit,
                stop_at_target=job.stop_at_target and self.spec.objective is not Objective.METRIC_IN_BUDGET,
                limit_state=TrialState.EXHAUSTED if full else TrialState.CAPPED,
                eval_every_steps=cadence,
                evaluate_test=job.phase is not Phase.SEARCH,
                threads=self.spec.executor.threads,
            )
        )
        self.listener.started(self.store.trial(self.spec.name, number), self._history())

    def _store_start(self, job: Job, after: int, cadence: int) -> int | None:
        threads = self.spec.executor.threads
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
            evidence=job.evidence,
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
        running.observations.append(observation)
        self._unwritten.append((number, observation))
        free = running.job.phase is not Phase.SEARCH or running.job.evidence or running.stopping
        if free or self._incumbent is None or self.spec.objective not in pruners.BY_SECONDS:
            return
        stop = pruners.verdict(self.spec.pruner, running.observations, self.spec.record_target, self._incumbent)
        if stop is not None:
            running.stopping = True
            self.executor.stop(number, *stop)

    def _end(self, number: int, outcome: TrialOutcome, log: str) -> None:
        self._flush()
        running = self._running.pop(number)
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
        self.listener.ended(trial, self._history())
        self._keep_finding()
        self._refuse_target_met_at_once(trial)
        self._refuse_energy_that_is_not_measured(trial)
        self._count_failures(number, outcome)

    def _keep_finding(self, at_once: bool = False) -> None:
        """Store the answer as it is now, for those who ask."""
        started = time.monotonic()
        if not at_once and started < self._next_finding:
            return
        save_finding(self.store, self.spec.name)
        ended = time.monotonic()
        self._next_finding = ended + (ended - started) / FINDING_SHARE

    def _refuse_target_met_at_once(self, trial: TrialRecord) -> None:
        if self.spec.objective is Objective.METRIC_IN_BUDGET:
            return
        if trial.outcome is not None and trial.outcome.steps_to_target == 0:
            raise SpecError(
                f"target.value = {self.spec.target.value:g} is met before the first step: "
                f"trial {trial.number} starts with {self.spec.target.metric} = {trial.outcome.best_metric:.4g}",
                hint="ask for a harder target, under a new name; this one takes no training",
            )

    def _refuse_energy_that_is_not_measured(self, trial: TrialRecord) -> None:
        has_ended = trial.state is TrialState.REACHED and trial.outcome is not None
        if self.spec.objective is not Objective.ENERGY_TO_TARGET or not has_ended:
            return
        if measure_of(self.spec).of(trial) is None:
            raise LaunchError(
                f"objective = energy_to_target: {self.environment.device_name} does not report its power, so that "
                f"nothing is known of what trial {trial.number} took",
                hint="a CUDA device and the extra gpu report it; time_to_target and cost_to_target take seconds alone",
            )

    def _count_failures(self, number: int, outcome: TrialOutcome) -> None:
        """Give up where nothing works: after a few failures without a success, after many even so."""
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
        for number in self._running:
            self.executor.stop(number, TrialState.CANCELLED, "stopped by the user")
        while self._running:
            self._wait()
        raise InterruptedRunError("stopped; every trial is stored", hint=CONTINUE)

    def _abandon(self) -> None:
        """Where the run ends by an error, leave no trial behind as running."""
        if not self._running:
            return
        self.executor.kill()
        for number, running in self._running.items():
            last = running.observations[-1] if running.observations else None
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
