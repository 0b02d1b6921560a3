"""A workload small enough for a test, with hooks to make it misbehave."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from bssearch.records import (
    Configuration,
    MetricInfo,
    Observation,
    Target,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from bssearch.spec import TrainingSpec
from bssearch.training.batches import Growth, micro_batches
from bssearch.training.clock import Clock
from bssearch.training.computation import Computation
from bssearch.training.contention import SPINS, CorePace
from bssearch.training.loop import TrialLoop
from bssearch.workloads.data import Batch, Data, Part
from tests.factories import make_request

CPU = torch.device("cpu")


def on_cpu(**settings: Any) -> Computation:
    """Return the computation of training settings on the CPU, without looks at the core's pace."""
    computation = Computation(CPU, TrainingSpec(**settings))
    computation.core = None
    return computation


def core_of_pace(*spins: float) -> CorePace:
    """Return a core whose looks take the given seconds in turn, again and again."""
    looks = (spin for look in itertools.cycle(spins) for spin in [look] * SPINS)
    return CorePace(spin=lambda: next(looks))


def _part(samples: int, seed: int, dtype: torch.dtype) -> Part:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Part(inputs.to(dtype), (0.5 * inputs[:, 0] * inputs[:, 1] + inputs[:, 2] + inputs[:, 3] > 0).long())


def toy_data(train_samples: int = 100, dtype: torch.dtype = torch.float32) -> Data:
    """Return a two-class problem in six dimensions; a small network learns it in a few hundred steps."""
    return Data(train=_part(train_samples, 1, dtype), validation=_part(60, 2, dtype), test=_part(50, 3, dtype))


def two_layers(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))


class Toy:
    """A two-layer network, or another ``network``; ``on_loss`` and ``on_evaluate`` run at each call.

    ``members`` are further attributes, such as ``training_step``.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        on_loss: Callable[[], object] = lambda: None,
        on_evaluate: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda metrics: metrics,
        network: Callable[[float], nn.Module] = two_layers,
        **members: Any,
    ) -> None:
        self.network = network
        self.metrics: Mapping[str, MetricInfo] = {
            "accuracy": MetricInfo(low=0.0, high=1.0, chance=0.5),
            "loss": MetricInfo(low=0.0),
        }
        self.dtype = dtype
        self.on_loss = on_loss
        self.on_evaluate = on_evaluate
        vars(self).update(members)

    def load(self, device: torch.device) -> Data:
        return toy_data(dtype=self.dtype)

    def build_model(self, *, dropout: float) -> nn.Module:
        return self.network(dropout).to(self.dtype)

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        self.on_loss()
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        assert not model.training and not torch.is_grad_enabled()
        scores = model(part.inputs)
        return self.on_evaluate(
            {
                "accuracy": (scores.argmax(1) == part.targets).double().mean().item(),
                "loss": functional.cross_entropy(scores, part.targets).item(),
            }
        )


class FakeTime:
    """A time that only a test advances."""

    seconds = cpu_seconds = waited_seconds = 0.0

    def pass_by(self, seconds: float, cpu_share: float = 1.0) -> None:
        self.seconds += seconds
        self.cpu_seconds += seconds * cpu_share

    def wait_for_a_cpu(self, seconds: float) -> None:
        self.pass_by(seconds, cpu_share=0.0)
        self.waited_seconds += seconds

    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, cpu_now=lambda: self.cpu_seconds, delay_now=lambda: self.waited_seconds)


class CallClock(Clock):
    """Counts function calls within its context, a measure of work that does not depend on the machine's load."""

    def __init__(self) -> None:
        self._calls = 0
        super().__init__(now=self._count, cpu_now=self._count, delay_now=lambda: 0.0)

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(self._before)

    def _count(self) -> float:
        return float(self._calls)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event in {"call", "c_call"}


def configuration(batch_size: int = 20, **changes: Any) -> Configuration:
    settings: dict[str, Any] = {"learning_rate": 0.02, "micro_batch_size": batch_size, **changes}
    return Configuration(batch_size=batch_size, **settings)


def request(
    changed_configuration: Configuration | None = None, *, target: float = 0.9, metric: str = "accuracy", **changes: Any
) -> TrialRequest:
    settings: dict[str, Any] = {
        "number": 7,
        "seed": 3,
        "target": Target(metric=metric, value=target),
        "train_seconds_limit": 5.0,
        "limit_state": TrialState.EXHAUSTED,
        "eval_every_steps": 5,
        **changes,
    }
    return make_request(configuration=changed_configuration or configuration(), **settings)


def growth_after(steps: int, wanted: Configuration, train: Part) -> Growth:
    """Return a trial's position in the data after some steps."""
    growth = Growth(wanted, len(train) if train.has_rows else None)
    for _ in range(steps):
        growth.stepped()
    return growth


def batches_of(
    train: Part, wanted: Configuration, computation: Computation, seed: int, *, after_steps: int = 0
) -> Generator[Batch, None, None]:
    """Yield a trial's micro-batches, and count the steps as a trainer does."""
    growth = growth_after(after_steps, wanted, train)
    with closing(micro_batches(train, computation, seed, growth)) as batches:
        while True:
            yield from itertools.islice(batches, growth.stage.accumulation_steps)
            growth.stepped()


def run_trial(trial: TrialLoop, on_observation: Callable[[Observation], object]) -> TrialOutcome:
    """Run a trial to its end."""
    with closing(trial.observations()) as observations:
        while True:
            try:
                on_observation(next(observations))
            except StopIteration as end:
                outcome: TrialOutcome = end.value
                return outcome


class Run:
    """Runs a request on the toy workload and keeps its observations."""

    def __init__(
        self,
        trial_request: TrialRequest,
        workload: Any = None,
        data: Data | None = None,
        *,
        clock: Clock | None = None,
        stop: Callable[[], tuple[TrialState, str] | None] = lambda: None,
        on_observation: Callable[[], object] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
        computation: Computation | None = None,
        keep: list[Observation] | None = None,
    ) -> None:
        self.observations: list[Observation] = [] if keep is None else keep

        def observed(observation: Observation) -> None:
            self.observations.append(observation)
            on_observation()

        trial = TrialLoop(
            trial_request,
            workload or Toy(),
            data or toy_data(),
            computation or on_cpu(),
            clock=clock or Clock(),
            stop=stop,
            on_progress=on_progress,
        )
        self.outcome = run_trial(trial, observed)


def curve(run: Run) -> list[tuple[int, float, float | None]]:
    """Return the observations of a run without their seconds."""
    return [(seen.step, seen.metric, seen.loss) for seen in run.observations]


def metric_by_evaluation(values: list[float], metric: str = "accuracy") -> Callable[[Any], Mapping[str, float]]:
    """Return a function that replaces the metric of each evaluation; the warm-up makes the first evaluation."""
    scripted = itertools.chain([values[0]], values, itertools.repeat(values[-1]))
    return lambda metrics: {**metrics, metric: next(scripted)}


def ticking(
    trial_request: TrialRequest, metrics: list[float] | None = None, step_seconds: float = 1.0, **more: Any
) -> Run:
    """Run a request with steps of ``step_seconds`` and a given metric at each evaluation."""
    time = FakeTime()
    on_evaluate = metric_by_evaluation(metrics) if metrics else lambda found: found
    toy = Toy(on_loss=lambda: time.pass_by(step_seconds), on_evaluate=on_evaluate)
    return Run(trial_request, toy, clock=time.clock(), **more)


class Frozen(nn.BatchNorm1d):
    """A batch norm that stays in evaluation mode, as in a pretrained backbone."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self
