"""What a worker is asked to do, and what it says of the workload that it has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bssearch.records.measured import Environment
from bssearch.records.question import Configuration, Target, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trial that goes on from a checkpoint of a longer run, for ``samples`` samples: whole steps of its batch size.

    ``start_samples`` are those that the run had seen there, None where nobody says. Over the first ``rise_samples`` the
    learning rate rises, for an optimizer that begins anew.
    """

    checkpoint: str
    samples: int
    start_samples: int | None = None
    rise_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """All that a worker needs to run one trial.

    ``train_seconds_limit`` ends the trial in the state ``limit_state``: `CAPPED` where the incumbent set the limit,
    `EXHAUSTED` where it is the whole budget of a trial. Without ``stop_at_target`` the trial goes on to its limit after
    it has reached the target, and its time-to-target is that of the first crossing.

    ``checkpoint`` is the file to which the trial is saved where it is stopped as `PAUSED`; without one it ends as
    `PRUNED` then. With ``resumes`` it goes on from that file. A ``branch`` goes on from somebody's own file, and ends
    with its samples.
    """

    number: int
    configuration: Configuration
    seed: int
    target: Target
    train_seconds_limit: float
    limit_state: TrialState
    eval_every_steps: int
    evaluate_test: bool = False
    stop_at_target: bool = True
    threads: int = 1
    checkpoint: str | None = None
    resumes: bool = False
    branch: Branch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRequest:
    """Ask a worker to time optimizer steps and one evaluation of a configuration, alone on its device.

    Steps are timed until the 95 % interval of their median is within ``precision`` of it (half its width), or until
    ``seconds_limit`` of them have been timed. With ``trial_train_seconds``, the longest that a trial trains, they are
    timed between evaluations, as often as such a trial is evaluated; without, back to back.
    """

    configuration: Configuration
    threads: int = 1
    trial_train_seconds: float | None = None
    precision: float = 0.02
    seconds_limit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Ask a fresh worker for three whole optimizer steps and an evaluation at a configuration's micro-batch size.

    With ``reserve`` the size must leave a little of the memory free, so that it fits into other processes, too.
    """

    configuration: Configuration
    threads: int = 1
    reserve: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """Ask a worker to train a configuration toward a target and to measure the gradient noise scale near it.

    The training ends at ``train_seconds_limit`` at the latest, wherever it is then; the measurement at
    ``noise_seconds_limit``.
    """

    configuration: Configuration
    seed: int
    target: Target
    train_seconds_limit: float
    noise_seconds_limit: float
    eval_every_steps: int
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What is known of a metric: its bounds (None = unbounded) and the value that guessing gives.

    One that is ``reported`` is told beside the target's metric: of the recommended configuration, on the test part.
    """

    low: float | None = None
    high: float | None = None
    chance: float | None = None
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a worker found in a freshly initialised model.

    ``parameters`` counts the trainable ones, ``batch_norm_layers`` the layers that normalise over the batch;
    ``initial_metrics`` are those of the validation part before the first step, None where one is not finite. A program
    of the user's own keeps its model to itself: ``parameters`` is None, and metrics that it does not tell are missing.
    """

    parameters: int | None
    batch_norm_layers: int
    initial_metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDescription:
    """What a worker found when it loaded the workload; ``tokens_per_sample`` where the workload counts tokens.

    A program of the user's own keeps the numbers of its samples to itself: None. ``notice`` is a sentence on how its
    trials run, where there is something to know.
    """

    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    metrics: Mapping[str, MetricInfo]
    environment: Environment
    model: ModelDescription
    tokens_per_sample: int | None = None
    notice: str | None = None
