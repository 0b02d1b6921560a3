"""An executor that plays recorded trials, without processes and on a virtual clock.

Equal decisions give equal events, at any time of day.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bssearch.executors.base import Event
from bssearch.executors.failures import failed
from bssearch.records import (
    GradientNoise,
    MemoryRequest,
    MemoryUse,
    MetricInfo,
    ModelDescription,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)
from bssearch.records.curves import Crossing, crossing, with_crossing
from tests.factories import make_environment

Play = Callable[[TrialRequest], Iterator[Observation | TrialOutcome]]

TESTED_STATES = frozenset({TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED})
DESCRIPTION = WorkloadDescription(
    train_samples=64,
    validation_samples=16,
    test_samples=16,
    metrics={"score": MetricInfo(low=0.0, high=1.0, chance=0.0)},
    environment=make_environment(),
    model=ModelDescription(parameters=5, batch_norm_layers=0, initial_metrics={"score": 0.0}),
)


@dataclass
class _Playing:
    """A trial that is played: its next item and its progress."""

    request: TrialRequest
    items: Iterator[Observation | TrialOutcome]
    began: float
    """The virtual time at which the whole trial would have begun, had it never been paused."""
    next: Observation | TrialOutcome | None = None
    last: Observation | None = None
    best: float | None = None
    crossing: Crossing | None = None
    asked: tuple[TrialState, str] | None = None
    log: io.StringIO = field(default_factory=io.StringIO)

    @property
    def train_seconds(self) -> float:
        return 0.0 if self.last is None else self.last.train_seconds

    @property
    def due(self) -> float:
        """Return the virtual time of its next event; a stop is due at once."""
        if self.asked is not None or not isinstance(self.next, Observation):
            return self.began + self.train_seconds
        return self.began + min(self.next.train_seconds, max(self.request.plan.train_seconds_limit, self.train_seconds))

    def outcome(self, state: TrialState, reason: str, *, train_seconds: float | None = None) -> TrialOutcome:
        seconds = self.train_seconds if train_seconds is None else train_seconds
        last = self.last
        missed = last if self.crossing is None else None
        outcome = TrialOutcome(
            state=state,
            reason=reason,
            steps=last.step if last else 0,
            samples=last.samples if last else 0,
            train_seconds=seconds,
            wall_seconds=seconds,
            final_metric=last.metric if last else None,
            best_metric=self.best,
            test_metric=last.metric if last and self.request.plan.is_tested and state in TESTED_STATES else None,
            last_miss_step=missed.step if missed else None,
            last_miss_seconds=missed.train_seconds if missed else None,
        )
        return with_crossing(outcome, self.crossing) if self.crossing and state is TrialState.REACHED else outcome


class FakeExecutor:
    """Plays the observations and the outcome that ``play`` yields for a request.

    Each call of `events` returns the event that is due first on a virtual clock. Train seconds count from the start of
    the trial. For a request that resumes, ``play`` yields all observations again; the executor skips the earlier ones.
    The log holds the output of ``play``; an exception fails the trial, and an end without an outcome exhausts it.

    ``step_times``: seconds of a step by batch size, by default `STEP_SECONDS`.
    """

    slots_apart = False
    STEP_SECONDS = 0.01
    EVALUATION_SECONDS = 0.001

    def __init__(
        self,
        play: Play,
        slots: int = 1,
        step_times: Mapping[int, float] | None = None,
        *,
        description: WorkloadDescription = DESCRIPTION,
    ) -> None:
        self.slots = slots
        self.seconds = 0.0
        """The virtual time."""
        self.requests: list[TrialRequest] = []
        """All that was submitted."""
        self._play = play
        self._step_times = step_times or {}
        self._description = description
        self._playing: dict[int, _Playing] = {}
        self._events: list[Event] = []

    def describe(self) -> WorkloadDescription:
        return self._description

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        self._refuse_while_a_trial_runs()
        configuration = request.configuration
        seconds = self._step_times.get(configuration.batch_size, self.STEP_SECONDS)
        return StepTime(
            batch_size=configuration.batch_size,
            micro_batch_size=configuration.micro_batch_size,
            step_seconds=seconds,
            step_seconds_low=seconds,
            step_seconds_high=seconds,
            update_seconds=seconds / 10,
            evaluation_seconds=self.EVALUATION_SECONDS,
            steps_timed=100,
            settled=True,
            peak_memory_bytes=None,
        )

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        self._refuse_while_a_trial_runs()
        micro = request.configuration.micro_batch_size
        return MemoryUse(micro_batch_size=micro, fits=True, peak_memory_bytes=micro * 2**20)

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        self._refuse_while_a_trial_runs()
        return NoiseMeasurement(
            batch_size=request.configuration.batch_size,
            micro_batch_size=request.configuration.micro_batch_size,
            step=0,
            metric=request.target.value,
            noise=GradientNoise(),
        )

    def submit(self, request: TrialRequest) -> None:
        if len(self._playing) == self.slots:
            raise ValueError(f"no slot is free for trial {request.number}: {sorted(self._playing)} are running")
        if request.number in self._playing:
            raise ValueError(f"trial {request.number} is running already")
        self.requests.append(request)
        playing = self._playing[request.number] = _Playing(request, self._play(request), self.seconds)
        if request.resumes:
            try:
                _restore(playing)
            except Exception as error:
                reason = f"the trial cannot resume from the checkpoint {request.checkpoint}: {error}"
                playing.next = TrialOutcome(state=TrialState.FAILED, reason=reason)
                return
        self._draw(playing)

    def stop(self, stop: TrialStop) -> None:
        if stop.number in self._playing:
            self._playing[stop.number].asked = stop.state, stop.reason

    def events(self, timeout: float) -> list[Event]:
        if not self._events and self._playing:
            number, playing = min(self._playing.items(), key=lambda item: (item[1].due, item[0]))
            self.seconds = max(self.seconds, playing.due)
            self._advance(number, playing)
        events, self._events = self._events, []
        return events

    def kill(self) -> None:
        for number, playing in list(self._playing.items()):
            self._end(number, playing.outcome(TrialState.CANCELLED, "killed: the run ended"))

    close = kill

    def _advance(self, number: int, playing: _Playing) -> None:
        """Give the next event of a trial."""
        limit, item = playing.request.plan.train_seconds_limit, playing.next
        if playing.asked is not None:
            self._end(number, _stopped(playing, *playing.asked))
        elif item is None:
            self._end(number, _reached_before(playing, TrialState.EXHAUSTED, "the recording ends"))
        elif isinstance(item, TrialOutcome):
            self._end(number, _scripted(playing, item))
        elif item.train_seconds > limit:
            reason, seconds = f"the limit of {limit:.4g} train seconds passed", max(limit, playing.train_seconds)
            self._end(number, _reached_before(playing, playing.request.plan.limit_state, reason, train_seconds=seconds))
        else:
            self._observe(number, playing, item)

    def _observe(self, number: int, playing: _Playing, observation: Observation) -> None:
        target, previous = playing.request.target, playing.last
        self._events.append(TrialObserved(number, observation))
        playing.last = observation
        if playing.best is None or target.gain(observation.metric) > target.gain(playing.best):
            playing.best = observation.metric
        if playing.crossing is None and target.is_met_by(observation.metric):
            playing.crossing = crossing(previous, observation, target)
            if playing.request.plan.stop_at_target:
                reason = f"{target.metric} = {observation.metric:.6g} at step {observation.step}"
                playing.next = playing.outcome(TrialState.REACHED, reason)
                return
        self._draw(playing)

    def _draw(self, playing: _Playing) -> None:
        """Take the next item that the trial has not had yet."""
        had = -1 if playing.last is None else playing.last.step
        try:
            with redirect_stdout(playing.log), redirect_stderr(playing.log):
                new = (one for one in playing.items if isinstance(one, TrialOutcome) or one.step > had)
                playing.next = next(new, None)
        except Exception as error:
            with redirect_stderr(playing.log):
                playing.next = failed(error)

    def _end(self, number: int, outcome: TrialOutcome) -> None:
        self._events.append(TrialEnded(number, outcome, self._playing.pop(number).log.getvalue()))

    def _refuse_while_a_trial_runs(self) -> None:
        if self._playing:
            raise ValueError("nothing is measured while a trial runs")


def _reached_before(
    playing: _Playing, state: TrialState, reason: str, train_seconds: float | None = None
) -> TrialOutcome:
    """Return how a trial ended that may have met its target on the way and trained on."""
    if playing.crossing is not None:
        state, reason = TrialState.REACHED, f"the target was met, then trained on: {reason}"
    return playing.outcome(state, reason, train_seconds=train_seconds)


def _scripted(playing: _Playing, outcome: TrialOutcome) -> TrialOutcome:
    """Return an outcome of ``play``; fill in the trial's progress if missing."""
    if outcome.final_metric is not None or outcome.steps:
        return outcome
    reached = playing.outcome(outcome.state, outcome.reason)
    return replace(reached, traceback=outcome.traceback, warnings=outcome.warnings, contended=outcome.contended)


def _stopped(playing: _Playing, state: TrialState, reason: str) -> TrialOutcome:
    if state is TrialState.PAUSED:
        checkpoint = playing.request.checkpoint
        try:
            if checkpoint is None:
                state = TrialState.PRUNED
            else:
                _save(playing, Path(checkpoint))
        except OSError as error:
            state, reason = TrialState.PRUNED, f"{reason}; could not be paused: {type(error).__name__}: {error}"
    return playing.outcome(state, reason)


def _save(playing: _Playing, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"last": playing.last, "crossing": playing.crossing}
    saved = {name: None if one is None else asdict(one) for name, one in parts.items()}
    path.write_text(json.dumps({**saved, "best": playing.best}))


def _restore(playing: _Playing) -> None:
    assert playing.request.checkpoint is not None, "a request that resumes names its checkpoint"
    saved = json.loads(Path(playing.request.checkpoint).read_text())
    playing.last = None if saved["last"] is None else Observation(**saved["last"])
    playing.best = saved["best"]
    playing.crossing = None if saved["crossing"] is None else Crossing(**saved["crossing"])
    playing.began -= playing.train_seconds
