"""One trial: train, evaluate at a fixed cadence, and stop at the target or for another reason.

* target met at an evaluation                     → `REACHED`
* train seconds past the request's limit          → the request's ``limit_state``
* ``stop`` returned a state                       → this state; `PRUNED` if a pause cannot be saved
* schedule's horizon or branch ended              → another evaluation, then `EXHAUSTED`
* loss not finite; metric not finite or too large → `DIVERGED`
* metric at chance for half of the full limit     → `DIVERGED`
* out of memory                                   → `OOM`

A trial that trains past the target ends as `REACHED`, unless the caller stops the trial. A resumed trial has the
steps, evaluations and random numbers of a trial that never paused. On the CPU, equal requests give equal steps, bit for
bit.
"""

import math
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bssearch.errors import CheckpointError, WorkloadError, require
from bssearch.records import (
    TRAINING,
    GradientNoise,
    ModelDescription,
    Observation,
    ParameterValue,
    TrialOutcome,
    TrialRequest,
    TrialState,
    is_metric,
)
from bssearch.spec.space.micro_batches import batch_norm_caveats
from bssearch.training.batches import tokens_trained
from bssearch.training.clock import Clock
from bssearch.training.computation import NO_PARAMETERS, Computation
from bssearch.training.contention import Contention, ContentionMeter, ReferenceKernel
from bssearch.training.course import Course, Ending, first_line, non_finite_figure, paused, where
from bssearch.training.gradient_noise import NoiseBudget, NoiseGrowth, NoiseMeter, RankNoise, noise_growth, noise_meter
from bssearch.training.memory import is_out_of_memory, peak_memory_meter, unused_memory
from bssearch.training.nvml import DeviceMeter
from bssearch.training.trainer import Trainer, seed_everything, warm_up
from bssearch.training.trial_checkpoint import (
    Checkpoint,
    RandomState,
    Saved,
    SavedPart,
    continue_from,
    identity_with_workload,
)
from bssearch.workloads.base import Workload, measure, metric_value
from bssearch.workloads.data import BatchStream, Data, TokenPart

# a trial in these states may evaluate the test part
TESTED_STATES = frozenset({TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED})

Stop = Callable[[], tuple[TrialState, str] | None]


class TrialLoop:
    """One run of a trial request. Iterate over `observations()` to train.

    Every step calls ``stop`` and ``on_progress``.
    """

    def __init__(
        self,
        request: TrialRequest,
        workload: Workload,
        data: Data,
        computation: Computation,
        *,
        clock: Clock,
        stop: Stop = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
        noise_budget: NoiseBudget | None = None,
    ) -> None:
        self._request, self._plan = request, request.plan
        self._workload = workload
        self._data = data
        self._computation = computation
        self._tokens_per_sample = tokens_per_sample(workload)
        self._clock = clock
        self._stop = stop
        self._on_progress = on_progress
        self._threads = request.plan.threads * request.plan.configuration.world_size
        others = computation.other_devices
        self._contention = ContentionMeter(computation.device, self._threads, computation.core, others=others)
        self._device_meter = DeviceMeter(computation.device, others=others)
        clock.meter = self._device_meter if computation.device.type == "cuda" else None
        self._reference = ReferenceKernel(computation.device, self._threads)
        self._trainer: Trainer | None = None
        self._noise: NoiseMeter | RankNoise | None = None
        self._noise_growth: NoiseGrowth | None = None
        self._noise_budget = noise_budget
        self._memory = peak_memory_meter(computation.device)
        self._course = Course(request, workload.metrics.get(request.target.metric))
        self._progress = self._course.progress
        self._test_metric: float | None = None
        self._further_test_metrics: Mapping[str, float] | None = None

    def observations(self) -> Generator[Observation, None, TrialOutcome]:
        """Train, yield each finite evaluation, and return the outcome.

        The workload's exceptions pass through, except out-of-memory errors. Raises `CheckpointError` if a paused trial
        cannot resume.
        """
        self._clock.start()
        with self._clock.ledger("other"):
            self._device_meter.start()
            self._contention.start()
        try:
            trainer = self.prepare()
            if self._request.resumes:
                self._restore()
            # An evaluation is due, but missing: at step 0, or right after a pause.
            last = self._progress.last
            is_unseen = last is None or (last.step != trainer.steps and self._evaluation_is_due(trainer))
            ending = (yield from self._evaluate(trainer)) if is_unseen else None
            while ending is None:
                ending = self.train_segment(trainer) or (yield from self._evaluate(trainer))
            if self._plan.is_tested and ending.state in TESTED_STATES:
                with self._clock.ledger("evaluation"):
                    self._test(trainer)
            ending = paused(self._course.reached_before(ending), self._request.checkpoint, self._save)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ending = self._course.reached_before(self._out_of_memory(error))
        finally:
            with self._clock.ledger("other"):
                self._progress.note_peak(self._memory.peak_bytes())
                self._memory.close()
                if self._trainer is not None:
                    self._trainer.close()
        return self._outcome(ending)

    def _test(self, trainer: Trainer) -> None:
        target, known = self._request.target.metric, self._workload.metrics
        names = [target, *(name for name, info in known.items() if info.reported and name != target)]
        found = {name: value for name, value in trainer.metrics(self._data.test, names).items() if is_metric(value)}
        self._test_metric = found.pop(target, None)
        if not isinstance(self._data.train, BatchStream):
            found |= self._on_training_samples(trainer, target)
        self._further_test_metrics = found or None

    def _on_training_samples(self, trainer: Trainer, metric: str) -> dict[str, float]:
        part = self._data.train.thinned(len(self._data.test)).to(self._computation.device)
        try:
            value = trainer.evaluate(part, metric)
        except Exception as error:  # evaluate() need not take samples of the form of the training part
            self._progress.warnings.append(
                f"evaluate() failed on training samples: {first_line(error)}; let evaluate() accept training samples"
            )
            return {}
        return {f"{TRAINING}{metric}": value} if is_metric(value) else {}

    def prepare(self) -> Trainer:
        request, plan = self._request, self._plan
        workload, computation = self._workload, self._computation
        with self._clock.ledger("warmup"):
            warm_up(workload, plan.configuration, self._data, computation, request.target.metric, plan.seed)
        self._on_progress()
        with self._clock.ledger("other"):
            self._memory.start()
            self._trainer = Trainer(workload, plan.configuration, self._data.train, computation, plan.seed)
            if request.branch is not None:
                with self._trainer.together("branch", request.branch, plan.configuration.batch_size):
                    continue_from(self._trainer, request.branch, plan.configuration.batch_size)
            self._noise = noise_meter(request, self._trainer, self._noise_budget)
            self._noise_growth = noise_growth(request, self._trainer)
        return self._trainer

    def _save(self, path: str) -> None:
        self._progress.note_peak(self._memory.peak_bytes())
        self._progress.warnings = self._standing_warnings()
        checkpoint = self._checkpoint(path)
        checkpoint.save(*self._parts(checkpoint))

    def _restore(self) -> None:
        if self._request.checkpoint is None:
            raise CheckpointError(f"trial {self._request.number} cannot resume: the request names no checkpoint")
        checkpoint = self._checkpoint(self._request.checkpoint)
        checkpoint.restore(*self._parts(checkpoint))
        self._memory.restart()

    def _checkpoint(self, path: str) -> Checkpoint:
        with self._clock.ledger("other"):
            identity = identity_with_workload(self._request, self._workload, len(self._data.train), self._computation)
        return Checkpoint(Path(path), identity, self._clock, self._on_progress)

    def _parts(self, checkpoint: Checkpoint) -> tuple[dict[str, Saved], dict[str, Saved]]:
        assert self._trainer is not None, "only a trial that trains is paused"
        training: dict[str, Saved] = {"trainer": self._trainer}
        meters = {"noise": self._noise, "noise_growth": self._noise_growth}
        training |= {name: meter for name, meter in meters.items() if meter is not None}
        training["random"] = RandomState(self._computation.device)
        if (ranks := self._computation.ranks) is not None:
            training["ranks"] = SavedPart(ranks.states, partial(ranks.restore, checkpoint.path, checkpoint.identity))
        measured: dict[str, Saved] = {
            "clock": self._clock,
            "contention": self._contention,
            "device_use": self._device_meter,
            "progress": self._progress,
            "reference": self._reference,
        }
        return training, measured

    def train_segment(self, trainer: Trainer) -> Ending | None:
        """Train until the next evaluation. Return the ending if the trial ends first."""
        if (ranks := self._computation.ranks) is not None:
            with self._clock.ledger("other"):
                ranks.ask("ready")
        # A due evaluation precedes the time limit, so that microseconds do not decide about a crossing.
        with self._clock.ledger("train"):
            while True:
                ending = self._stopped() or self._limited()
                if ending is not None:
                    return ending
                trainer.step()
                self._clock.pace(trainer.now.accumulation_steps)
                self._on_progress()
                if trainer.steps == 1:
                    with self._clock.waiting():
                        problem = trainer.first_step_problem()
                    if problem is not None:
                        return Ending(TrialState.DIVERGED, problem)
                if self._evaluation_is_due(trainer):
                    return self._stopped()

    def _evaluation_is_due(self, trainer: Trainer) -> bool:
        every = self._plan.eval_every_steps * self._plan.configuration.batch_size
        return trainer.has_seen_again(every) or trainer.is_over

    def _stopped(self) -> Ending | None:
        asked = self._stop()
        return None if asked is None else Ending(*asked, asked=True)

    def _limited(self) -> Ending | None:
        if self._clock.train_seconds_so_far <= self._plan.train_seconds_limit:
            return None
        return self._course.limited(self._counted_seconds)

    @property
    def _counted_seconds(self) -> float:
        return self._clock.counted_train_seconds(self._threads)

    def _evaluate(self, trainer: Trainer) -> Generator[Observation, None, Ending | None]:
        with self._clock.ledger("evaluation"):
            loss = trainer.take_mean_loss()
            metric = trainer.evaluate(self._data.validation, self._request.target.metric)
        self._on_progress()
        figure = non_finite_figure(self._request.target.metric, metric, "the training loss", loss)
        if figure is not None:
            first = trainer.first_non_finite()
            reason = f"{figure}: {where(trainer.now, trainer.steps)}"
            return Ending(TrialState.DIVERGED, reason + ("" if first is None else f"; {first}"))
        observation = Observation(
            step=trainer.steps,
            samples=trainer.growth.samples,
            train_seconds=self._counted_seconds,
            metric=metric,
            loss=loss,
            learning_rate=trainer.learning_rate,
        )
        ending = self._course.observe(observation, is_over=trainer.is_over)
        with self._clock.ledger("other"):
            self._device_meter.sample()
            self._contention.look()
            self._reference.look()
            yield observation
            if self._noise is not None:
                self._progress.note_peak(self._memory.peak_bytes())
                self._noise.after_evaluation(metric, observation.train_seconds)
                self._memory.restart()
            if ending is None and trainer.growth.position > trainer.schedule.warmup_steps:
                ending = self._course.stuck_at_chance(self._counted_seconds, where(trainer.now, trainer.steps))
        if ending is None and self._noise_growth is not None:
            with self._clock.ledger("train"), self._clock.waiting():
                self._noise_growth.after_evaluation()
        return ending

    def _out_of_memory(self, error: Exception) -> Ending:
        when = "before the first step" if self._trainer is None else where(self._trainer.now, self._trainer.steps)
        now = self._plan.configuration if self._trainer is None else self._trainer.now
        return Ending(TrialState.OOM, f"out of memory, micro-batch {now.micro_batch_size}, {when}: {first_line(error)}")

    def _tokens(self, trainer: Trainer | None) -> int | None:
        if trainer is not None and isinstance(trainer.train, TokenPart):
            return tokens_trained(trainer.train, self._plan.seed, trainer.growth)
        samples = 0 if trainer is None else trainer.growth.samples
        return None if self._tokens_per_sample is None else samples * self._tokens_per_sample

    def _warnings(self, contention: Contention, wall: float) -> tuple[str, ...]:
        configuration, settings = self._plan.configuration, self._computation.settings
        normalised = configuration.micro_batch_size * (configuration.world_size if settings.sync_batch_norm else 1)
        caveats = batch_norm_caveats(
            0 if self._trainer is None else batch_norm_layers(self._trainer.model),
            normalised,
            accumulates=normalised < configuration.batch_size,
            ghost_batch_size=settings.ghost_batch_size,
        )
        found = [*self._standing_warnings(), *(sentence for _, sentence in caveats), *contention.warnings]
        unused = unused_memory(self._computation.device, self._progress.peak)
        return (*found, *([] if unused is None else [unused]), *self._clock.warnings(wall))

    def _standing_warnings(self) -> list[str]:
        return list(dict.fromkeys([*self._progress.warnings, *self._computation.warnings]))

    def _outcome(self, ending: Ending) -> TrialOutcome:
        trainer, clock = self._trainer, self._clock
        with clock.ledger("other"):
            contention = self._contention.stop()
            device_use = self._device_meter.stop()
        wall = clock.wall_seconds
        samples, last = 0 if trainer is None else trainer.growth.samples, self._progress.last
        return self._course.with_target(
            TrialOutcome(
                state=ending.state,
                reason=ending.reason,
                steps=0 if trainer is None else trainer.steps,
                samples=samples,
                tokens=self._tokens(trainer),
                train_seconds=clock.seconds("train"),
                undelayed_train_seconds=clock.undelayed_train_seconds(self._threads),
                reference_seconds=self._reference.seconds,
                host_bound_share=clock.host_bound_share,
                evaluation_seconds=clock.seconds("evaluation"),
                warmup_seconds=clock.seconds("warmup"),
                other_seconds=clock.seconds("other"),
                wall_seconds=wall,
                final_metric=None if last is None else last.metric,
                best_metric=self._progress.best,
                test_metric=self._test_metric,
                further_test_metrics=self._further_test_metrics,
                peak_memory_bytes=self._progress.peak,
                peak_memory_basis=None if self._progress.peak is None else self._memory.basis,
                dropped_samples_per_epoch=None if trainer is None else trainer.dropped_samples,
                contended=contention.contended or clock.is_contended(self._threads),
                warnings=self._warnings(contention, wall),
                skipped_steps=None if trainer is None else trainer.skipped_steps,
                data_placement=None if trainer is None else trainer.data_placement,
                device_use=device_use,
                noise=GradientNoise() if self._noise is None else self._noise.result(),
            )
        )


def describe_model(
    workload: Workload,
    data: Data,
    computation: Computation,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    own: Mapping[str, ParameterValue] = NO_PARAMETERS,
) -> ModelDescription:
    """Build, evaluate and describe a model from a seed. The call changes the global random state."""
    seed_everything(seed)
    model = computation.build_model(workload, dropout, own)
    with computation.evaluating():
        metrics = measure(workload, model, data.validation)
    values = {name: metric_value(workload, metrics, name) for name in workload.metrics}
    return ModelDescription(
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        batch_norm_layers=batch_norm_layers(model),
        initial_metrics={name: value if math.isfinite(value) else None for name, value in values.items()},
    )


def tokens_per_sample(workload: Workload) -> int | None:
    tokens = getattr(workload, "tokens_per_sample", None)
    require(
        tokens is None or (type(tokens) is int and tokens >= 1),
        f"tokens_per_sample = {tokens!r} must be an integer >= 1, or left out",
        error=WorkloadError,
    )
    return tokens


def batch_norm_layers(model: nn.Module) -> int:
    """Return the number of batch norm layers that use batch statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return sum(norm.training or norm.running_mean is None for norm in norms)
