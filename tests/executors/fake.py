"""An executor that plays recorded trials, without processes and on a virtual clock.

Equal decisions give equal events, at any time of day.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
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
from bssearch.training.course import Course, Ending, paused
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
    asked: tuple[TrialState, str] | None = None
    log: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        self.course = Course(self.request, None)

    @property
    def last(self) -> Observation | None:
        return self.course.progress.last

    @property
    def train_seconds(self) -> float:
        return 0.0 if self.last is None else self.last.train_seconds

    @property
    def due(self) -> float:
        """Return the virtual time of its next event; a stop is due at once."""
        if self.asked is not None or not isinstance(self.next, Observation):
            return self.began + self.train_seconds
        return self.began + min(self.next.train_seconds, max(self.request.plan.train_seconds_limit, self.train_seconds))

    def outcome(self, ending: Ending, train_seconds: float | None = None) -> TrialOutcome:
        ending, last = self.course.reached_before(ending), self.last
        seconds = self.train_seconds if train_seconds is None else train_seconds
        is_tested = last and self.request.plan.is_tested and ending.state in TESTED_STATES
        return self.course.with_target(
            TrialOutcome(
                state=ending.state,
                reason=ending.reason,
                steps=last.step if last else 0,
                samples=last.samples if last else 0,
                train_seconds=seconds,
                wall_seconds=seconds,
                final_metric=last.metric if last else None,
                best_metric=self.course.progress.best,
                test_metric=last.metric if last and is_tested else None,
            )
        )

    def save(self, checkpoint: str) -> None:
        Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
        Path(checkpoint).write_text(json.dumps(self.course.progress.state()))

    def restore(self, checkpoint: str) -> None:
        self.course.progress.restore(json.loads(Path(checkpoint).read_text()))
        self.began -= self.train_seconds


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
        self.requests.append(request)
        playing = self._playing[request.number] = _Playing(request, self._play(request), self.seconds)
        if request.resumes:
            try:
                playing.restore(str(request.checkpoint))
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
            self._end(number, playing.outcome(Ending(TrialState.CANCELLED, "killed: the run ended", asked=True)))

    close = kill

    def _advance(self, number: int, playing: _Playing) -> None:
        """Give the next event of a trial."""
        item = playing.next
        if playing.asked is not None:
            ending = paused(Ending(*playing.asked, asked=True), playing.request.checkpoint, playing.save)
            self._end(number, playing.outcome(ending))
        elif item is None:
            self._end(number, playing.outcome(Ending(TrialState.EXHAUSTED, "the recording ends")))
        elif isinstance(item, TrialOutcome):
            self._end(number, _scripted(playing, item))
        elif (late := playing.course.limited(item.train_seconds)) is not None:
            limit = playing.request.plan.train_seconds_limit
            self._end(number, playing.outcome(late, max(limit, playing.train_seconds)))
        else:
            self._events.append(TrialObserved(number, item))
            if (ending_now := playing.course.observe(item)) is None:
                self._draw(playing)
            else:
                playing.next = playing.outcome(ending_now)

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
            raise ValueError("cannot measure while trials run; wait for their end")


def _scripted(playing: _Playing, outcome: TrialOutcome) -> TrialOutcome:
    """Return an outcome of ``play``; fill in the trial's progress if missing."""
    if outcome.final_metric is not None or outcome.steps:
        return outcome
    reached = playing.outcome(Ending(outcome.state, outcome.reason, asked=True))
    return replace(reached, traceback=outcome.traceback, warnings=outcome.warnings, contended=outcome.contended)
