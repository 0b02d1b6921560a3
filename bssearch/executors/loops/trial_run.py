"""A user's loop that trains a study's trial."""

import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bssearch.errors import CheckpointError, require
from bssearch.executors.base import Assign
from bssearch.executors.loops.assignment import (
    HOW_TO_EVALUATE,
    Assignment,
    Evaluate,
    Line,
    Metrics,
    ended_by,
    number_of,
)
from bssearch.records import (
    Configuration,
    GradientNoise,
    Observation,
    Target,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    is_metric,
)
from bssearch.training.advisor import SHARE, BatchAdvisor, Weights
from bssearch.training.clock import Clock, Ledger
from bssearch.training.contention import ContentionMeter, CorePace, ReferenceKernel, cpu_use
from bssearch.training.course import Approach, Course, Ending, first_line, non_finite_figure, paused, where
from bssearch.training.loop import TESTED_STATES
from bssearch.training.memory import peak_memory_meter
from bssearch.training.nvml import DeviceMeter
from bssearch.training.trial_checkpoint import Checkpoint, RandomState, Saved, SavedPart, identity_of


class NoiseNearTarget:
    """Measures the gradient noise scale of a loop's steps near the target; see `BatchAdvisor`.

    If ``holds`` is set, these steps leave the weights unchanged, and measurements may take half of the loop's time.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        now: Configuration,
        target: Target,
        tokens: Weights,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        holds: bool = False,
    ) -> None:
        self.advisor = BatchAdvisor(
            nn.ModuleList(modules),
            now.batch_size,
            micro_batches=now.accumulation_steps * now.world_size,
            weights=tokens,
            aside=aside,
            share=1.0 if holds else SHARE,
        )
        self._held: list[torch.Tensor] = (
            [parameter for one in modules for parameter in one.parameters()] if holds else []
        )
        self._weights: list[torch.Tensor] = []  # copies of the held parameters
        self._approach = Approach(target)
        self.is_near = False

    def evaluated(self, metric: float) -> None:
        self.measure(self._approach.is_near(metric))

    def measure(self, is_near: bool) -> None:
        """Measure the next steps if ``is_near``, else stop measuring."""
        if is_near and not self.is_near:
            self._weights = [one.detach().clone() for one in self._held]
        self.is_near = is_near
        if not is_near:
            self.advisor.close()

    def stepped(self) -> None:
        if self.is_near:
            self.advisor.step()
        if self.is_near and self._held:
            with torch.no_grad():
                torch._foreach_copy_(self._held, self._weights)

    def result(self) -> GradientNoise:
        self.advisor.close()
        return self.advisor.noise


WARM_UP_STEPS = 3  # number of first steps, whose excess time over later steps is not training time

TIMED_STEPS = WARM_UP_STEPS + 20  # the most steps to time one by one, because each timed step synchronises a GPU

RUN_PROCESSES = 3  # a script's ancestors: server, worker, driver


def contention_meter(
    device: torch.device, threads: int, core: CorePace | None, others: Sequence[torch.device]
) -> ContentionMeter:
    above = [one.pid for one in psutil.Process().parents()[:RUN_PROCESSES]]
    return ContentionMeter(device, threads, core, partial(cpu_use, parents=above), others=others)


def other_devices(assign: Assign) -> list[torch.device]:
    """Return the CUDA devices of all ranks except rank 0."""
    ranks = assign.configuration.world_size if torch.device(assign.device).type == "cuda" else 1
    return [torch.device("cuda", index) for index in range(1, ranks)]


class HostClock(Clock):
    """A clock of the host, because CUDA events would miss the user's other streams."""

    def __init__(
        self,
        device: torch.device,
        now: Callable[[], float] = time.perf_counter,
        cpu_now: Callable[[], float] = time.thread_time,
        delay_now: Callable[[], float | None] | None = None,
    ) -> None:
        self._device = device
        # on a GPU the thread's waits for a CPU do not delay the steps
        super().__init__(now, cpu_now, delay_now if device.type == "cpu" else lambda: None)

    @property
    def cpu_share(self) -> float | None:
        return super().cpu_share if self._device.type == "cpu" else None

    def book_rest(self, name: Ledger) -> None:
        self._seconds[name] += max(0.0, self.wall_seconds - sum(self._seconds.values()))

    def synchronize(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()


@dataclass(slots=True)
class LoopClock:
    """Books a loop's time as training, evaluation, warm-up or other time.

    In the first `WARM_UP_STEPS` steps after a start or resume, step time above the later steps' median counts as
    warm-up.
    """

    clock: HostClock
    threads: int
    excess: float = 0.0
    _excess_before: float = 0.0
    _opened: ExitStack = field(default_factory=ExitStack)
    _name: Ledger | None = None
    _steps: list[float] = field(default_factory=list)
    _step_began: float = 0.0
    _told: float = 0.0

    def train(self) -> None:
        if self._name != "train":
            self.enter("train")
            self._step_began = self._counted

    def enter(self, name: Ledger) -> None:
        self.pause()
        self._opened.enter_context(self.clock.ledger(name))
        self._name = name

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Book time within a training step as other time."""
        began = self._step_began
        self.enter("other")
        try:
            yield
        finally:
            self.train()
            self._step_began = began

    def pause(self) -> None:
        """Synchronise the device and stop timing."""
        self._name = None
        self._opened.close()

    def stepped(self) -> None:
        if len(self._steps) >= TIMED_STEPS:
            return
        if self._name == "train":
            self.clock.synchronize()
        now = self._counted
        self._steps.append(now - self._step_began)
        self._step_began = now
        self.excess = self._excess_before + _excess(self._steps)

    def state(self) -> dict[str, Any]:
        return {"excess": self.excess, "told": self._told}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's state. The next steps warm up again."""
        self.excess = self._excess_before = state["excess"]
        self._told = state["told"]

    @property
    def _counted(self) -> float:
        return self.clock.counted_train_seconds(self.threads)

    def train_seconds(self, *, is_hit: bool = False) -> float:
        """Return the counted train seconds without warm-up. The value never decreases.

        During the warm-up, the value is a constant lower bound, unless the metric meets the target (``is_hit``).
        """
        if len(self._steps) <= WARM_UP_STEPS and not is_hit:
            return self._told
        self._told = max(self._told, self._counted - self.excess)
        return self._told


def _excess(steps: list[float]) -> float:
    later = steps[WARM_UP_STEPS:] or steps[1:]
    if not later:
        return 0.0
    typical = statistics.median(later)
    return sum(max(0.0, seconds - typical) for seconds in steps[:WARM_UP_STEPS])


@dataclass(slots=True)
class DataPass:
    """The current pass over the data: its initial random state and number of drawn micro-batches.

    ``own`` holds the loader's random generators. After a pause between two passes, the next pass restores only these
    generators, and skips no micro-batches.
    """

    at_start: dict[str, Any] = field(default_factory=dict)
    own_at_start: list[torch.Tensor] = field(default_factory=list)
    own: Sequence[torch.Generator] = ()
    micro_batches: int = 0
    restored: bool = False

    def begin(self, at_start: dict[str, Any]) -> None:
        """Begin a pass. Between two passes, the random state ``at_start`` is empty."""
        self.at_start, self.micro_batches, self.restored = at_start, 0, False
        self.own_at_start = [generator.get_state() for generator in self.own]

    def state(self) -> dict[str, Any]:
        return {"at_start": self.at_start, "own_at_start": self.own_at_start, "micro_batches": self.micro_batches}

    def restore(self, state: dict[str, Any]) -> None:
        self.at_start, self.micro_batches = state["at_start"], state["micro_batches"]
        self.own_at_start = state["own_at_start"]
        self.restored = bool(self.at_start or self.own_at_start)


def generators_of(loader: object) -> list[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def refuse_unreadable(state: dict[str, Any]) -> None:
    """Raise the error of `torch.load` for values that ``weights_only`` refuses. Copies no tensors."""
    file = io.BytesIO()
    torch.save(tree_map_only(torch.Tensor, lambda tensor: None, state), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def first_non_finite(objects: Mapping[str, Any]) -> str | None:
    """Return a message about the first non-finite parameter, if any. Synchronises the device."""
    found = (
        f"the parameter {name} of {owner} is not finite"
        for owner, model in objects.items()
        if isinstance(model, nn.Module)
        for name, parameter in model.named_parameters()
        if not parameter.isfinite().all()
    )
    return next(found, None)


def unmoved(evaluate: Evaluate) -> Metrics:
    """Evaluate without advancing the random state."""
    with ExitStack() as stack:
        stack.callback(kept_random_numbers())
        return evaluate()


def kept_random_numbers() -> Callable[[], None]:
    """Return a function that restores the current random state."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = RandomState(torch.device("cuda", torch.cuda.current_device()) if initialized else torch.device("cpu"))
    return partial(states.restore, states.state())


class TrialRun(Assignment):
    """A trial of a user's loop."""

    def __init__(
        self,
        request: TrialRequest,
        assign: Assign,
        line: Line,
        *,
        clock: HostClock | None = None,
    ) -> None:
        super().__init__(request.plan.configuration, assign)
        self.seed = request.plan.seed
        self._request, self._plan = request, request.plan
        self._has_read_checkpoint = False
        self._line = line
        self._revision = assign.revision
        self._torch_device = torch.device(assign.device)
        self._threads = request.plan.threads * self.configuration.world_size
        self._clock = LoopClock(clock or HostClock(self._torch_device), self._threads)
        self._course = Course(request, None)
        core = CorePace() if self._torch_device.type == "cpu" else None
        others = other_devices(assign)
        self.contention = contention_meter(self._torch_device, self._threads, core, others)
        self._clock.clock.meter = self._device_meter = DeviceMeter(self._torch_device, others=others)
        self._reference = ReferenceKernel(self._torch_device, self._threads)
        self._memory = peak_memory_meter(self._torch_device)
        self._objects: dict[str, Any] = {}
        self._ending: Ending | None = None
        self._has_ended = False
        self._steps = self._samples = 0
        self._data_seconds: float | None = None
        self._random = RandomState(self._torch_device)
        self._saved_random: dict[str, Any] | None = None
        self._pass = DataPass()
        self._test_metric: float | None = None
        self.noise: NoiseNearTarget | None = None
        self._memory.start()

    def modelled(self, modules: Sequence[nn.Module], tokens: Weights) -> None:
        """Measure the gradient noise near the target, unless the batch grows or no parameter is trainable."""
        trained = any(one.requires_grad for each in modules for one in each.parameters())
        if trained and not self.configuration.grows:
            self.noise = NoiseNearTarget(modules, self.configuration, self._request.target, tokens, self._aside)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self._clock.aside():
            self._course.progress.note_peak(self._memory.peak_bytes())
            yield
            self._memory.restart()

    def checkpoint(self) -> str | None:
        """Note that the script asks for the branch's checkpoint, and return the path, if any."""
        self._has_read_checkpoint = True
        return None if self._request.branch is None else self._request.branch.checkpoint

    def begin(self) -> None:
        """Start the clock. Raises an error if the script ignores the trial's checkpoint."""
        if (branch := self._request.branch) is not None:
            self.stages.refuse("a branch of a longer run", "all its steps have one size")
            require(
                self._has_read_checkpoint,
                f"the script must continue from {branch.checkpoint}, but did not read trial.checkpoint",
                hint="if trial.checkpoint is not None, load the model, and the optimizer by trial.load_optimizer()",
            )
        clock = self._clock.clock
        clock.book_rest("other")
        with clock.ledger("other"):
            self._device_meter.start()
            self.contention.start()
        require(
            self._objects or not self._request.resumes,
            f"trial {self._request.number} cannot resume: the script did not call trial.state(...)",
            hint="call trial.state(model=model, optimizer=optimizer) before the loop, as before the pause",
            error=CheckpointError,
        )
        self.skipped()
        self._clock.train()

    def passes(self, loader: object, in_order: bool) -> int | None:
        now = self._pass
        now.own, was_within = generators_of(loader), now.restored and bool(now.at_start)
        for generator, state in zip(now.own, now.own_at_start, strict=True) if now.restored else ():
            generator.set_state(state)
        if was_within and not in_order:
            self._random.restore(now.at_start)
            now.restored = False
            return now.micro_batches
        if self._request.checkpoint is not None:
            now.begin(self._random.state())
        return 0 if was_within else None

    def skipped(self) -> None:
        """Restore the random state saved at the pause."""
        if self._saved_random is not None:
            self._random.restore(self._saved_random)

    def pass_ended(self) -> None:
        self._pass.begin({})

    def is_due(self, step: int) -> bool:
        """True if an evaluation is due after ``step`` and not yet made."""
        last = self._course.progress.last
        every = self._plan.eval_every_steps * self.configuration.batch_size
        is_made = last is not None and last.step == step
        return not is_made and (self._is_at_last(step) or self.stages.has_seen_again(every, step))

    def pause(self) -> None:
        self._clock.enter("evaluation")

    def resume(self) -> None:
        self._clock.train()

    def stepped(self, step: int, samples: int | None) -> None:
        """Count steps and samples. Unknown samples count as full batches."""
        full = self.stages.samples(step) - self.stages.samples(self._steps)
        self._samples += full if samples is None else samples
        self._steps = step
        self._clock.stepped()
        if self.noise is not None:
            self.noise.stepped()
        self._line.progressed()

    def diverged(self, reason: str) -> bool:
        self._end(Ending(TrialState.DIVERGED, reason))
        return True

    def settle(self) -> None:
        if self.is_over or self.is_due(self._steps):  # a resumed loop could not repeat a due evaluation
            return
        asked = self._line.asked_to_stop()
        if asked is not None:
            self._end(Ending(*asked, asked=True))
        elif self._clock.clock.train_seconds_so_far > self._plan.train_seconds_limit and (
            late := self._course.limited(self._clock.train_seconds())
        ):
            self._end(late)

    def waited(self, seconds: float) -> None:
        self._data_seconds = (self._data_seconds or 0.0) + seconds
        self._pass.micro_batches += 1

    def warned(self, sentence: str) -> None:
        if sentence not in self._course.progress.warnings:
            self._course.progress.warnings.append(sentence)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        self._clock.pause()
        self._steps = step
        self._line.progressed()
        target = self._request.target
        metric = number_of(metrics, target.metric)
        loss = None if loss is None else float(loss)
        with self._clock.clock.ledger("other"):
            broken = non_finite_figure(target.metric, metric, "the loss", loss) or first_non_finite(self._objects)
            if broken is not None:
                self._end(Ending(TrialState.DIVERGED, f"{broken}: {where(self.stages.last(step), step)}"))
                return
            observation = Observation(
                step=step,
                samples=self._samples,
                train_seconds=self._clock.train_seconds(is_hit=target.is_met_by(metric)),
                metric=metric,
                loss=loss,
                learning_rate=self.stages.last(step).learning_rate,
            )
            ending = self._course.observe(observation, is_over=self._is_at_last(step))
            if self.noise is not None:
                self.noise.evaluated(metric)
            self._device_meter.sample()
            self.contention.look()
            self._reference.look()
            self._line.send(TrialObserved(self._request.number, observation))
        if ending is not None:
            self._end(ending)

    def test(self, evaluate: Evaluate) -> None:
        if self._has_ended or not self._is_tested:
            return
        self._clock.enter("evaluation")
        metric = number_of(evaluate(), self._request.target.metric)
        self._test_metric = metric if is_metric(metric) else None
        self.finish()

    def looped(self, step: int, because: str = "") -> None:
        require(
            step,
            f"the loop ended before its first step{ended_by(because)}",
            hint="loop over trial.batches(loader), or while not trial.should_stop",
        )
        require(
            self._course.progress.last is not None,
            f"the loop ended after step {step} without an evaluation",
            hint=HOW_TO_EVALUATE,
        )
        self._end(Ending(TrialState.EXHAUSTED, f"the script ended its loop at step {step}{ended_by(because)}"))

    def ran_out_of_memory(self, error: BaseException) -> bool:
        micro = self.stages.at(self._steps).micro_batch_size
        self._end(
            Ending(TrialState.OOM, f"out of memory, micro-batch {micro}, step {self._steps}: {first_line(error)}")
        )
        return True

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        for name, one in objects.items():
            require(
                callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)),
                f"state({name}=...): {type(one).__name__} lacks state_dict() or load_state_dict()",
                hint="pass objects with both methods, such as modules, optimizers and schedulers",
            )
        self._objects = dict(objects)
        if self._request.resumes:
            assert self._request.checkpoint is not None, "a trial without a checkpoint path cannot resume"
            self._checkpoint(self._request.checkpoint).restore(*self._parts())
        return self._steps, self._samples

    def finish(self) -> None:
        if self._ending is None or self._has_ended:
            return
        self._has_ended = True
        self._clock.pause()
        self._line.send(TrialEnded(self._request.number, self._outcome(self._ending)))

    def close(self) -> None:
        self._memory.close()

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "samples": self._samples, "data_seconds": self._data_seconds}

    def restore(self, state: dict[str, Any]) -> None:
        self._steps, self._samples, self._data_seconds = state["steps"], state["samples"], state["data_seconds"]

    def _is_at_last(self, step: int) -> bool:
        branch = self._request.branch
        return branch is not None and step >= branch.samples // self.configuration.batch_size

    @property
    def _is_tested(self) -> bool:
        return self._plan.is_tested and self._ending is not None and self._ending.state in TESTED_STATES

    def _end(self, ending: Ending) -> None:
        self._clock.pause()
        ending = self._course.reached_before(ending)
        self._ending, self.is_over = paused(ending, self._request.checkpoint, self._save), True
        if self._is_tested:
            self._clock.enter("other")  # the test or the script's end follows
        else:
            self.finish()

    def _keep_random(self, state: dict[str, Any]) -> None:
        self._saved_random = state

    def _save(self, path: str) -> str | None:
        if not self._objects:
            return "the script did not call trial.state(...); a Trainer's script cannot call this method"
        self._course.progress.note_peak(self._memory.peak_bytes())
        for one in self._objects.values():
            refuse_unreadable(one.state_dict())
        self._checkpoint(path).save(*self._parts())
        return None

    def _checkpoint(self, path: str) -> Checkpoint:
        return Checkpoint(
            Path(path),
            identity_of(self._request, script=self._revision, device=self._torch_device.type),
            self._clock.clock,
            self._line.progressed,
        )

    def _parts(self) -> tuple[dict[str, Saved], dict[str, Saved]]:
        training: dict[str, Saved] = {
            f"own.{name}": SavedPart(one.state_dict, one.load_state_dict) for name, one in self._objects.items()
        }
        training["random"], training["pass"] = SavedPart(self._random.state, self._keep_random), self._pass
        measured: dict[str, Saved] = {
            "clock": self._clock.clock,
            "loop": self,
            "first_steps": self._clock,
            "contention": self.contention,
            "device_use": self._device_meter,
            "progress": self._course.progress,
            "reference": self._reference,
        }
        if self.stages.grows:
            measured["stages"] = self.stages
        return training, measured

    def _outcome(self, ending: Ending) -> TrialOutcome:
        clock, threads, progress = self._clock.clock, self._threads, self._course.progress
        with clock.ledger("other"):
            progress.note_peak(self._memory.peak_bytes())
            self._memory.close()
            contention = self.contention.stop()
            device_use = self._device_meter.stop()
        wall = clock.wall_seconds
        excess, undelayed = self._clock.excess, clock.undelayed_train_seconds(threads)
        return self._course.with_target(
            TrialOutcome(
                state=ending.state,
                reason=ending.reason,
                steps=self._steps,
                samples=self._samples,
                train_seconds=clock.seconds("train") - excess,
                undelayed_train_seconds=None if undelayed is None else max(0.0, undelayed - excess),
                reference_seconds=self._reference.seconds,
                evaluation_seconds=clock.seconds("evaluation"),
                warmup_seconds=clock.seconds("warmup") + excess,
                other_seconds=clock.seconds("other"),
                wall_seconds=wall,
                data_seconds=self._data_seconds,
                final_metric=None if progress.last is None else progress.last.metric,
                best_metric=progress.best,
                test_metric=self._test_metric,
                peak_memory_bytes=progress.peak,
                peak_memory_basis=None if progress.peak is None else self._memory.basis,
                contended=contention.contended or clock.is_contended(threads),
                warnings=(*progress.warnings, *contention.warnings, *clock.warnings(wall)),
                device_use=device_use,
                noise=GradientNoise() if self.noise is None else self.noise.result(),
            )
        )
