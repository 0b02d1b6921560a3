"""The driver: ask, run, record, tell, over any number of slots, until the budget is spent and the best confirmed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bssearch.curves import Envelope, envelope
from bssearch.errors import BSSearchError, InterruptedRunError, LaunchError, SpecError
from bssearch.executors.base import Ended, Executor, Observed
from bssearch.records import (
    Configuration,
    Environment,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    StepTime,
    StepTimeRequest,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search import allocation, confirm, pruners
from bssearch.search.cadence import probe_record
from bssearch.search.history import FAILURES, History, measured_seconds
from bssearch.search.interrupts import Interrupts
from bssearch.search.listener import Listener
from bssearch.search.owner import is_alive, this_driver
from bssearch.search.sampler import Sampler
from bssearch.search.seeds import trial_seed
from bssearch.space import split_batch
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = 15.0
FLUSH_SECONDS = 1.0
POLL_SECONDS = 0.2
FAILURES_IN_A_ROW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial to start."""

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    phase: Phase
    seed: int
    train_seconds_limit: float
    evidence: bool = False
    retry_of: int | None = None


@dataclass(slots=True)
class Running:
    """A trial in a slot, with what it has reported."""

    job: Job
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
        self.sampler = Sampler(
            spec.sampler.name,
            spec.space.dimensions(),
            seed=spec.seed,
            startup_trials=spec.sampler.startup_trials,
        )
        self._running: dict[int, Running] = {}
        self._unwritten: list[tuple[int, Observation]] = []
        self._curves: dict[int, Envelope] = {}
        self._incumbent: pruners.Incumbent | None = None
        self._failures = 0
        self._any_ran = False
        self._beat = self._flushed = time.monotonic()
        self._interrupts = Interrupts(on_second=executor.kill)

    def run(self) -> None:
        """Search, then confirm. Raises `InterruptedRunError` on Ctrl-C, with every trial stored."""
        try:
            with self._interrupts:
                self._take_over()
                for trial in self.store.trials(self.spec.name):
                    self._refuse_target_met_at_once(trial)
                self._probe_step_times()
                self._run(self._next_search_job, self.executor.slots)
                self._run(self._next_confirmation_job, 1)
        except KeyboardInterrupt:
            raise InterruptedRunError("killed; every trial that had ended is stored", hint=CONTINUE) from None
        finally:
            self._abandon()

    def _take_over(self) -> None:
        """Mark the trials of drivers that died as lost; the search tries them again."""
        lost = self.store.mark_lost(self.spec.name, is_alive=is_alive)
        if lost:
            self.listener.note(f"trials {', '.join(map(str, lost))} were lost with their driver; trying them again")

    def _history(self) -> History:
        trials = self.store.trials(self.spec.name)
        history = History(self.spec, trials, self.store.probes(self.spec.name))
        best = history.incumbent
        if best is not None and (self._incumbent is None or best.number != self._incumbent.number):
            self._incumbent = pruners.Incumbent(best.number, measured_seconds(best), self._curve(best.number))
        return history

    def _curve(self, number: int) -> Envelope:
        if number not in self._curves:
            observations = self.store.observations(self.spec.name, number)
            self._curves[number] = envelope(observations, self.spec.record_target)
        return self._curves[number]

    # Before the search: step times, one batch size at a time, alone on the device.

    def _probe_step_times(self) -> None:
        known = self.store.probes(self.spec.name)
        missing = [size for size in self.spec.batch_sizes if size not in known]
        if missing:
            self.listener.note(f"timing steps at batch sizes {', '.join(map(str, missing))}")
        for size in missing:
            self._stop_if_interrupted()
            known = self.store.probes(self.spec.name)
            if size not in known:
                self.store.save_probe(self.spec.name, self.environment, self._probe(size, known))
        if all(probe.out_of_memory for probe in self.store.probes(self.spec.name).values()):
            raise LaunchError(
                f"no batch size of the study fits into the memory of {self.environment.device_name}, "
                f"not even {min(self.spec.batch_sizes)}",
                hint="set space.max_micro_batch_size, or a smaller model",
            )

    def _probe(self, batch_size: int, known: Mapping[int, ProbeRecord]) -> ProbeRecord:
        micro, accumulation = split_batch(batch_size, self.spec.space.max_micro_batch_size)
        configuration = replace(
            self.spec.default_configuration,
            batch_size=batch_size,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
        )
        full_limit = self.spec.budget.trial_train_seconds
        if any(probe.out_of_memory and probe.micro_batch_size <= micro for probe in known.values()):
            return probe_record(StepTime.where_memory_ran_out(configuration), full_limit)
        request = StepTimeRequest(configuration=configuration, threads=self.spec.executor.threads)
        return probe_record(self.executor.measure_step_time(request), full_limit)

    # What runs next.

    def _next_search_job(self) -> Job | None:
        history = self._history()
        budget = self.spec.budget
        if history.spent >= budget.trials:
            return None
        if budget.wall_seconds is not None and busy_seconds(history.trials, time.time()) >= budget.wall_seconds:
            return None
        retry = history.to_retry()
        if retry is not None:
            return self._search_job(history, retry.configuration, retry.sampled, retry.evidence, retry)
        proposal = allocation.propose(history)
        if proposal is None:
            return None
        if proposal.source == "default":
            default = self.spec.default_configuration
            return self._search_job(history, default, self.spec.space.encode(default), evidence=True)
        sampled = history.coordinates_near(proposal.batch_size) if proposal.source == "transfer" else None
        if sampled is None:
            reference = self._curve(history.reference.number) if history.reference else None
            sampled = self.sampler.ask(history, proposal.batch_size, reference)
        configuration = self.spec.space.decode(proposal.batch_size, sampled)
        return self._search_job(history, configuration, sampled, proposal.evidence)

    def _search_job(
        self,
        history: History,
        configuration: Configuration,
        sampled: Mapping[str, ParameterValue] | None,
        evidence: bool,
        retry: TrialRecord | None = None,
    ) -> Job:
        limit = full = self.spec.budget.trial_train_seconds
        if not evidence:
            sweeps = history.spent // len(history.feasible)
            limit = pruners.train_seconds_limit(self.spec.pruner, full, measured_seconds(history.incumbent), sweeps)
            limit = min(full, max(limit, _seconds_to_look_twice(history.probes[configuration.batch_size])))
        return Job(
            configuration=configuration,
            sampled=sampled,
            phase=Phase.SEARCH,
            seed=retry.seed if retry else trial_seed(self.spec.seed, Phase.SEARCH, history.length),
            train_seconds_limit=limit,
            evidence=evidence,
            retry_of=retry.number if retry else None,
        )

    def _next_confirmation_job(self) -> Job | None:
        history = self._history()
        runs = confirm.remaining(history, self.store.trials(self.spec.name, phase=Phase.CONFIRM))
        if not runs:
            return None
        return Job(
            configuration=runs[0].configuration,
            sampled=self.spec.space.encode(runs[0].configuration),
            phase=Phase.CONFIRM,
            seed=runs[0].seed,
            train_seconds_limit=self.spec.budget.trial_train_seconds,
            retry_of=runs[0].retry_of,
        )

    # Running trials.

    def _run(self, next_job: Callable[[], Job | None], slots: int) -> None:
        """Start jobs while there are any and slots are free; return when all have ended.

        Where there is none, it is asked for again when a trial has ended: only then can there be one.
        """
        ask = True
        while True:
            self._stop_if_interrupted()
            while ask and len(self._running) < slots:
                job = next_job()
                if job is None:
                    ask = False
                else:
                    self._start(job)
            if not self._running:
                return
            ask = self._wait() or ask

    def _wait(self) -> bool:
        """Take in what has happened, and keep the store and the leases up to date; return whether a trial ended."""
        running = len(self._running)
        for event in self.executor.events(timeout=POLL_SECONDS):
            match event:
                case Observed(number, observation):
                    self._observe(number, observation)
                case Ended(number, outcome):
                    self._end(number, outcome)
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._flush()
        if now - self._beat > HEARTBEAT_SECONDS:
            self.store.heartbeat(self.spec.name, self.owner, LEASE_SECONDS)
            self._take_over()
            self._beat = now
        return len(self._running) < running

    def _start(self, job: Job) -> None:
        cadence = self.store.probes(self.spec.name)[job.configuration.batch_size].eval_every_steps
        assert cadence is not None, "only feasible batch sizes are run, and those have a cadence"
        threads = self.spec.executor.threads
        number = self.store.start_trial(
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
        )
        self._running[number] = Running(job)
        full = job.train_seconds_limit >= self.spec.budget.trial_train_seconds
        self.executor.submit(
            TrialRequest(
                number=number,
                configuration=job.configuration,
                seed=job.seed,
                target=self.spec.record_target,
                train_seconds_limit=job.train_seconds_limit,
                limit_state=TrialState.EXHAUSTED if full else TrialState.CAPPED,
                eval_every_steps=cadence,
                evaluate_test=job.phase is Phase.CONFIRM,
                threads=threads,
            )
        )
        self.listener.started(self.store.trial(self.spec.name, number), self._history())

    def _observe(self, number: int, observation: Observation) -> None:
        running = self._running[number]
        running.observations.append(observation)
        self._unwritten.append((number, observation))
        free = running.job.phase is not Phase.SEARCH or running.job.evidence or running.stopping
        if free or self._incumbent is None:
            return
        stop = pruners.verdict(self.spec.pruner, running.observations, self.spec.record_target, self._incumbent)
        if stop is not None:
            running.stopping = True
            self.executor.stop(number, *stop)

    def _end(self, number: int, outcome: TrialOutcome) -> None:
        self._flush()
        running = self._running.pop(number)
        step_seconds = self.store.probes(self.spec.name)[running.job.configuration.batch_size].step_seconds
        product = None
        if outcome.steps_to_target is not None and step_seconds is not None:
            product = outcome.steps_to_target * step_seconds
        if self.store.trial(self.spec.name, number).state is not TrialState.RUNNING:
            self.listener.note(f"trial {number} was taken over by another driver; what it measured here is left out")
            return
        self.store.finish_trial(self.spec.name, number, outcome, steps_x_step_time_s=product)
        trial = self.store.trial(self.spec.name, number)
        self.listener.ended(trial, self._history())
        self._refuse_target_met_at_once(trial)
        self._count_failures(number, outcome)

    def _refuse_target_met_at_once(self, trial: TrialRecord) -> None:
        if trial.outcome is not None and trial.outcome.steps_to_target == 0:
            raise SpecError(
                f"target.value = {self.spec.target.value:g} is met before the first step: "
                f"trial {trial.number} starts with {self.spec.target.metric} = {trial.outcome.best_metric:.4g}",
                hint="ask for a harder target, under a new name; this one takes no training",
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


def _seconds_to_look_twice(probe: ProbeRecord) -> float:
    """Return the train seconds until the second evaluation after step 0: before it, nothing is known of a trial."""
    assert probe.eval_every_steps is not None and probe.step_seconds is not None, "the batch size is feasible"
    return 2 * probe.eval_every_steps * probe.step_seconds


def busy_seconds(trials: Sequence[TrialRecord], now: float) -> float:
    """Return how long at least one of the trials was running, in seconds, overlaps counted once."""
    spans = sorted(
        (trial.created_at.timestamp(), trial.ended_at.timestamp() if trial.ended_at else now)
        for trial in trials
        if not trial.state.is_missing
    )
    total, end = 0.0, -math.inf
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
