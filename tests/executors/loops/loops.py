"""Users' loops on a fake clock, and a line that keeps its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bssearch.executors.base import Assign, Program, Reply, Work
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.trial_run import HostClock, TrialRun
from bssearch.records import (
    Configuration,
    MemoryRequest,
    Observation,
    ParameterValue,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from bssearch.training.trainer import seed_everything
from tests.training.toys import FakeTime, configuration, request

CPU = torch.device("cpu")
ROWS = 50
FORMS = ["batches", "body", "while"]


@dataclass
class FakeLine:
    """Keeps the messages of a loop; ``stop`` answers for the search."""

    stop: Callable[[], tuple[TrialState, str] | None] = lambda: None
    observations: list[Observation] = field(default_factory=list)
    outcomes: list[TrialOutcome] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def progressed(self) -> None:
        pass

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        return self.stop()

    def send(self, reply: Reply) -> None:
        match reply:
            case TrialObserved():
                self.observations.append(reply.observation)
            case TrialEnded():
                self.outcomes.append(reply.outcome)
            case _:
                self.replies.append(reply)

    @property
    def outcome(self) -> TrialOutcome:
        (outcome,) = self.outcomes
        return outcome


def clock_of(fake: FakeTime) -> HostClock:
    """Return a loop's clock that goes by a fake time."""
    return HostClock(CPU, lambda: fake.seconds, lambda: fake.cpu_seconds, lambda: fake.waited_seconds)


def asked(folder: Path | None = None, **changes: Any) -> TrialRequest:
    """Return a request with batches of 20 samples, evaluated every second step, whose target is out of reach."""
    settings = {"target": 2.0, "train_seconds_limit": 1e9, "eval_every_steps": 2, **changes}
    return request(
        settings.pop("configuration", None), **settings, checkpoint=str(folder / "trial") if folder else None
    )


@dataclass
class Started:
    """A trial of a loop, with all that it talks to."""

    request: TrialRequest
    line: FakeLine = field(default_factory=FakeLine)
    time: FakeTime = field(default_factory=FakeTime)

    def __post_init__(self) -> None:
        self.run = TrialRun(self.request, assign(self.request), self.line, clock=clock_of(self.time))
        self.trial = Trial(self.run, now=lambda: self.time.seconds)
        seed_everything(self.trial.seed)

    def stop_at(self, step: int | None, state: TrialState = TrialState.PAUSED) -> Started:
        """Let the search stop the trial at a step, if given."""
        self.line.stop = lambda: None if step is None or self.run._steps < step else (state, "as the test says")
        return self


def optimizer_of(*, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two weights."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    return kind([parameter], lr=0.02, **settings)  # type: ignore[call-arg]


def cycled(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of pass after pass."""
    return chain.from_iterable(repeat(loader))


class Training:
    """A small network with dropout; a step takes a second, an evaluation a hundred, and draws random numbers."""

    def __init__(
        self,
        trial: Trial,
        time: FakeTime,
        *,
        sampler: bool = False,
        own_generator: bool = False,
        step_seconds: Callable[[int], float] = lambda step: 1.0,
        metric: Callable[[int], Any] = lambda step: step / 1000,
        keeps_state: bool = True,
        step_fails: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.trial, self.time, self.step_seconds, self.metric = trial, time, step_seconds, metric
        self.step_fails = step_fails
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=trial.learning_rate, momentum=0.9)
        self.taken = 0
        self.evaluated: list[int] = []
        if keeps_state:
            trial.state(model=self.model, optimizer=self.optimizer)
        inputs = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        order: dict[str, Any] = {"sampler": trial.sampler(data)} if sampler else {"shuffle": True}
        if own_generator:
            order["generator"] = torch.Generator().manual_seed(trial.seed)
        self.loader = DataLoader(data, batch_size=trial.micro_batch_size, drop_last=True, **order)

    def step(self, batch: Iterable[torch.Tensor]) -> None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets) / self.trial.accumulation_steps
        loss.backward()  # type: ignore[no-untyped-call]
        self.taken += 1
        self.time.pass_by(self.step_seconds(self.taken))
        self.step_fails(self.taken)
        if self.taken % self.trial.accumulation_steps == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> Mapping[str, Any]:
        torch.randn(5)
        self.time.pass_by(100.0)
        step = self.trial._step_at_hand
        assert step is not None, "nothing is evaluated within a step"
        self.evaluated.append(step)
        return {"accuracy": self.metric(step)}

    def go(self, form: str, epochs: int = 1) -> list[torch.Tensor]:
        """Train in one of the three forms; return the weights at the end."""
        trial = self.trial
        if form == "batches":
            for batch in trial.batches(self.loader, self.evaluate, test=self.evaluate, epochs=epochs):
                self.step(batch)
        elif form == "body":
            if trial.evaluation_due:
                trial.report(**self.evaluate())
            for batch in trial.batches(self.loader, epochs=epochs):
                self.step(batch)
                if trial.evaluation_due:
                    trial.report(**self.evaluate())
        else:
            batches = cycled(self.loader)
            while not trial.should_stop:
                if trial.evaluation_due:
                    trial.report(**self.evaluate())
                    continue
                for batch in islice(batches, trial.accumulation_steps):
                    self.step(batch)
                trial.step()
            trial.test(self.evaluate)
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def trained(form: str, request: TrialRequest, stop_at: int | None = None, **settings: Any) -> tuple[Started, Training]:
    """Run a trial of a loop to its end."""
    started = Started(request).stop_at(stop_at)
    training = Training(started.trial, started.time, **settings)
    training.go(form)
    started.run.finish()
    return started, training


def assign(
    work: Work,
    at: Configuration | None = None,
    metric: str = "accuracy",
    given: Mapping[str, ParameterValue] | None = None,
) -> Assign:
    """Return the assignment of work to a program whose default is `at`."""
    program = Program(default=at or configuration(), metric=metric)
    return Assign(work=work, program=program, device="cpu", revision="abc", given=given or {})


def step_time_request(**changes: Any) -> StepTimeRequest:
    """Return a request to time steps."""
    return StepTimeRequest(**{"configuration": configuration(), **changes})


def memory_request() -> MemoryRequest:
    """Return a request to see whether a micro-batch fits."""
    return MemoryRequest(configuration=configuration())
