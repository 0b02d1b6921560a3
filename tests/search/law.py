"""An executor that computes its results from a law of steps and step times."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from bssearch import WorkloadError, open_store
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    MetricInfo,
    ModelDescription,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    Phase,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)
from tests.factories import make_environment

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # evaluations, as shares of a trial


def step_seconds(batch_size: int) -> float:
    return 0.001 + 0.0001 * batch_size


def steps_needed(configuration: Configuration) -> float:
    """Return S_min (1 + B_crit / B), times how far the learning rate is from its best."""
    best = 0.1 * math.sqrt(configuration.batch_size / 32)
    return 100 * (1 + 30 / configuration.batch_size) * (1 + math.log(configuration.learning_rate / best) ** 2)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@dataclass
class LawExecutor:
    """Ends each trial with the law's outcome; trials at the batch sizes ``fails`` fail.

    Micro-batches above ``fits_up_to`` run out of memory; those above ``trains_up_to`` only in trials; those above
    ``leaves_reserve_up_to`` only with a memory reserve. The workload rejects the batch sizes ``refuses``. ``place``
    changes the environment. ``on_submit`` is called before a trial starts, ``on_look`` before its events. ``ended_as``
    changes a trial's outcome, and ``timed`` a step time.
    """

    slots: int = 1
    slots_apart: bool = False
    fails: frozenset[int] = frozenset()
    refuses: frozenset[int] = frozenset()
    fits_up_to: int = 10**9
    trains_up_to: int = 10**9
    leaves_reserve_up_to: int = 10**9
    reachable: bool = True
    untrained: float = 0.1
    train_samples: int = 1000
    place: dict[str, Any] = field(default_factory=dict)
    on_submit: Callable[[Any], object] = lambda executor: None
    on_look: Callable[[Any], object] = lambda executor: None
    ended_as: Callable[[TrialRequest, TrialOutcome], TrialOutcome] = lambda request, outcome: outcome
    timed: Callable[[StepTime], StepTime] = lambda found: found
    batch_norm_layers: int = 0
    requests: list[TrialRequest] = field(default_factory=list)
    splits_timed: list[Configuration] = field(default_factory=list)
    sizes_run: list[int] = field(default_factory=list)
    running: list[TrialRequest] = field(default_factory=list)
    most_at_once: int = 0
    stopped: dict[int, tuple[TrialState, str]] = field(default_factory=dict)

    def describe(self) -> WorkloadDescription:
        return WorkloadDescription(
            train_samples=self.train_samples,
            validation_samples=100,
            test_samples=100,
            metrics={"accuracy": MetricInfo(low=0.0, high=1.0, chance=0.1)},
            environment=make_environment(**self.place),
            model=ModelDescription(
                parameters=10, batch_norm_layers=self.batch_norm_layers, initial_metrics={"accuracy": self.untrained}
            ),
        )

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        assert not self.running, "step times are measured alone"
        self.splits_timed.append(request.configuration)
        size = request.configuration.batch_size
        if size in self.refuses:
            raise WorkloadError(f"no batch of {size}")
        micro = request.configuration.micro_batch_size
        fits = micro <= self.fits_up_to
        found = StepTime(
            batch_size=size,
            micro_batch_size=micro,
            world_size=request.configuration.world_size,
            step_seconds=self.step_seconds_of(request.configuration) if fits else None,
            evaluation_seconds=0.001 if fits else None,
            steps_timed=5,
            peak_memory_bytes=None,
            out_of_memory=not fits,
        )
        return self.timed(found)

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        assert not self.running, "memory is measured alone"
        size = request.configuration.micro_batch_size
        assert request.configuration.accumulation_steps <= 2, "more take no more memory"
        if size not in self.sizes_run[-1:]:
            self.sizes_run.append(size)
        fits = size <= min(self.fits_up_to, self.trains_up_to, self.leaves_reserve_up_to if request.reserve else size)
        peak = 10**6 + 1000 * size if fits else None
        reason = None if fits else "no memory left, by the law"
        return MemoryUse(micro_batch_size=size, fits=fits, peak_memory_bytes=peak, reason=reason)

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        raise NotImplementedError

    def submit(self, request: TrialRequest) -> None:
        self.on_submit(self)
        self.requests.append(request)
        self.running.append(request)
        self.most_at_once = max(self.most_at_once, len(self.running))

    def stop(self, stop: TrialStop) -> None:
        self.stopped[stop.number] = (stop.state, stop.reason)

    def events(self, timeout: float) -> list[Event]:
        self.on_look(self)
        if not self.running:
            return []
        request = self.running.pop(0)
        if request.plan.configuration.batch_size in self.fails:
            return [TrialEnded(request.number, TrialOutcome(state=TrialState.FAILED, reason="broken"))]
        if request.plan.configuration.micro_batch_size > min(self.fits_up_to, self.trains_up_to):
            return [TrialEnded(request.number, TrialOutcome(state=TrialState.OOM, reason="no memory left, by the law"))]
        per_step = self.step_seconds_of(request.plan.configuration)
        seconds = self.seconds_of(request)
        reached = self.reachable and seconds <= request.plan.train_seconds_limit
        end = self.end_of(request, seconds)
        events: list[Event] = [TrialObserved(request.number, self.observe(request, share, seconds)) for share in SHARES]
        outcome = TrialOutcome(
            state=TrialState.REACHED if reached else request.plan.limit_state,
            reason="by the law",
            steps=round(end / per_step),
            train_seconds=end,
            wall_seconds=end,
            time_to_target_s=seconds if reached else None,
            steps_to_target=math.ceil(seconds / per_step) if reached else None,
            best_metric=0.9 if reached else 0.9 * end / seconds,
            final_metric=0.9,
            test_metric=0.89 if request.plan.is_tested else None,
        )
        return [*events, TrialEnded(request.number, self.ended_as(request, outcome))]

    def seconds_of(self, request: TrialRequest) -> float:
        configuration = request.plan.configuration
        return steps_needed(configuration) * self.step_seconds_of(configuration)

    def step_seconds_of(self, configuration: Configuration) -> float:
        return step_seconds(configuration.batch_size)

    def end_of(self, request: TrialRequest, seconds: float) -> float:
        """Train seconds of a trial: to the target, or to the limit if it trains past the target."""
        return (
            min(seconds, request.plan.train_seconds_limit)
            if request.plan.stop_at_target
            else request.plan.train_seconds_limit
        )

    def observe(self, request: TrialRequest, share: float, seconds: float) -> Observation:
        end = self.end_of(request, seconds)
        return Observation(
            step=round(share * 100),
            samples=round(share * 100) * request.plan.configuration.batch_size,
            train_seconds=share * end,
            metric=0.9 * min(1.0, share * end / seconds),
            loss=None,
            learning_rate=request.plan.configuration.learning_rate,
        )

    def kill(self) -> None:
        self.running.clear()

    def close(self) -> None:
        self.kill()


# Studies --------------------------------------------------------------------------------------------------------------


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def trials_in(
    folder: Path, phase: Phase | None = None, name: str = "toy", *, states: Sequence[TrialState] | None = None
) -> list[TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return store.trials.of(name, phase=phase, states=states)
