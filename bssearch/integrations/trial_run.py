"""A loop that trains a trial of a study: its clock, its evaluations, its end, and its pauses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bssearch.errors import CheckpointError, UsageError
from bssearch.integrations.assignment import Evaluate, Metrics, ended_by, number_of
from bssearch.integrations.branching import RequestedBranch
from bssearch.integrations.growing.stages import LoopStages
from bssearch.integrations.line import Line
from bssearch.integrations.loop_clock import HostClock, LoopClock, contention_meter
from bssearch.integrations.saved_parts import (
    Attributes,
    LateRandomState,
    Pass,
    StateDict,
    first_non_finite,
    generators_of,
    refuse_unreadable,
)
from bssearch.records import (
    COULD_NOT_PAUSE,
    Configuration,
    Observation,
    ParameterValue,
    TrialOutcome,
    TrialRequest,
    TrialState,
    is_metric,
)
from bssearch.training.contention import Contention
from bssearch.training.core_pace import CorePace, ReferenceKernel
from bssearch.training.course import Course, Ending, not_finite
from bssearch.training.device_use import DeviceMeter
from bssearch.training.loop import TESTED_STATES
from bssearch.training.memory import is_out_of_memory, peak_memory_meter
from bssearch.training.trial_checkpoint import Checkpoint, Saved, first_line

NO_STATE = "the script has named no trial.state(...), which one with a Trainer does not"


class TrialRun:
    """The assignment to train one trial; see `bssearch.integrations.assignment.Assignment`."""

    cycles = True
    evaluates_passes = False
    is_look = False

    def __init__(
        self,
        request: TrialRequest,
        parameters: Mapping[str, ParameterValue],
        device: str,
        line: Line,
        revision: str,
        *,
        clock: HostClock | None = None,
    ) -> None:
        self.configuration: Configuration = request.configuration
        self.stages = LoopStages(request.configuration)
        self.seed = request.seed
        self.device = device
        self.parameters = parameters
        self._request = request
        self.branch = RequestedBranch(request)
        self._line = line
        self._revision = revision
        self._torch_device = torch.device(device)
        self._clock = LoopClock(clock or HostClock(self._torch_device), request.threads)
        self._course = Course(request, None)
        core = CorePace() if self._torch_device.type == "cpu" else None
        self._contention = contention_meter(self._torch_device, request.threads, core)
        self._clock.clock.meter = self._device_meter = DeviceMeter(self._torch_device)
        self._reference = ReferenceKernel.where_it_tells(self._torch_device, request.threads)
        self._memory = peak_memory_meter(self._torch_device)
        self._objects: dict[str, Any] = {}
        self._ending: Ending | None = None
        self._has_ended = False
        self._steps = self._samples = 0
        self._data_seconds: float | None = None
        self._random = LateRandomState(self._torch_device)
        self._pass = Pass(self._torch_device)
        self._test_metric: float | None = None
        self._memory.start()

    @property
    def is_over(self) -> bool:
        """Return whether the trial has ended."""
        return self._ending is not None

    def begin(self) -> None:
        """Begin the training's time; what the script did before is no training."""
        self.branch.check_begins(self.stages)
        clock = self._clock.clock
        clock.book_rest("other")
        with clock.ledger("other"):
            self._device_meter.start()
            self._contention.start()
        if self._request.resumes and not self._objects:
            raise CheckpointError(f"trial {self._request.number} cannot go on: {NO_STATE}")
        self._random.apply()
        self._clock.train()

    def passes(self, loader: object, in_order: bool) -> int | None:
        """Begin a pass over a loader, see `bssearch.integrations.assignment.Assignment`."""
        was_within, self._pass.own = self._pass.was_within, generators_of(loader)
        if self._pass.restored:
            self._pass.rewind_own()
        if was_within and not in_order:
            self._pass.rewind()
            return self._pass.micro_batches
        if self._request.checkpoint is not None:
            self._pass.begin()
        return 0 if was_within else None

    def skipped(self) -> None:
        """Go on with the random numbers of the moment of the pause."""
        self._random.apply()

    def pass_ended(self) -> None:
        """End a pass before its loader does."""
        self._pass.end()

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due; one that was made before a pause is not made again."""
        last = self._course.progress.last
        every = self._request.eval_every_steps * self.configuration.batch_size
        is_due = self._is_at_last(step) or self.stages.has_seen_again(every, step)
        return is_due and (last is None or last.step != step)

    def pause(self) -> None:
        """Leave the training's time: an evaluation begins."""
        self._clock.pause()
        self._clock.evaluate()

    def resume(self) -> None:
        """Go on with the training's time."""
        self._clock.train()

    def stepped(self, step: int, samples: int | None) -> None:
        """Count steps and their samples; full batches if the samples are not known."""
        full = self.stages.samples(step) - self.stages.samples(self._steps)
        self._samples += full if samples is None else samples
        self._steps = step
        self._clock.stepped()
        self._line.progressed()

    def diverged(self, reason: str) -> bool:
        """End the trial as diverged."""
        self._end(Ending(TrialState.DIVERGED, reason))
        return True

    def settle(self) -> None:
        """End the trial where it is asked to, or has trained past its limit.

        Where an evaluation is due that is made first: a paused trial could not make up for it in the body of a loop.
        """
        if not self.is_over and not self.is_due(self._steps):
            self._end_where_asked()
            self._end_where_late()

    def waited(self, seconds: float) -> None:
        """Count a wait for data within the training."""
        self._data_seconds = (self._data_seconds or 0.0) + seconds
        self._pass.micro_batches += 1

    def warned(self, sentence: str) -> None:
        """Keep a sentence for the outcome."""
        if sentence not in self._course.progress.warnings:
            self._course.progress.warnings.append(sentence)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Take in an evaluation, tell of it, and end the trial where it says so."""
        self._clock.pause()
        self._steps = step
        self._line.progressed()
        target = self._request.target
        metric = number_of(metrics, target.metric)
        loss = None if loss is None else float(loss)
        with self._clock.clock.ledger("other"):
            if not is_metric(metric) or (loss is not None and not math.isfinite(loss)):
                self._end(Ending(TrialState.DIVERGED, self._not_finite(metric, step)))
                return
            broken = first_non_finite(self._objects)
            if broken is not None:
                self._end(Ending(TrialState.DIVERGED, f"{broken} is not finite: {self._where(step)}"))
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
            self._device_meter.sample()
            self._contention.look()
            if self._reference is not None:
                self._reference.look()
            self._line.observed(self._request.number, observation)
        if ending is not None:
            self._end(ending)

    def test(self, evaluate: Evaluate) -> None:
        """Evaluate the test part, where the request asks for it and the trial ended well."""
        if self._has_ended or not self._is_tested:
            return
        self._clock.evaluate()
        metric = number_of(evaluate(), self._request.target.metric)
        self._test_metric = metric if is_metric(metric) else None
        self.finish()

    def looped(self, step: int, because: str = "") -> None:
        """End the trial where the loop ended by itself."""
        if self.is_over:
            return
        self._clock.pause()
        if step == 0:
            raise UsageError(f"the loop ended before its first step{ended_by(because)}")
        if self._course.progress.last is None:
            raise UsageError(
                f"the loop ended after {step} steps without an evaluation",
                hint="batches(loader, evaluate=...), or: if trial.evaluation_due: trial.report(accuracy=...)",
            )
        self._end(Ending(TrialState.EXHAUSTED, f"the script ended its loop at step {step}{ended_by(because)}"))

    def failed(self, error: BaseException) -> bool:
        """End the trial where memory ran out; return whether that is what the error says."""
        if self.is_over or not is_out_of_memory(error):
            return False
        self._clock.pause()
        micro = self.stages.at(self._steps).micro_batch_size
        reason = f"out of memory, micro-batch {micro}, step {self._steps}: {first_line(error)}"
        self._end(Ending(TrialState.OOM, reason))
        return True

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        """Keep what the training goes on from; return the steps and samples that a paused trial has behind it."""
        for name, one in objects.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise UsageError(f"state({name}=...): a {type(one).__name__} has no state_dict() and load_state_dict()")
        self._objects = dict(objects)
        if self._request.resumes:
            assert self._request.checkpoint is not None, "a trial that resumes has a checkpoint"
            self._checkpoint(self._request.checkpoint).restore(*self._parts())
            self._samples = self._samples or self.stages.samples(self._steps)  # a checkpoint may lack them
        return self._steps, self._samples

    def finish(self) -> None:
        """Tell how the trial ended, once it has."""
        if self._ending is None or self._has_ended:
            return
        self._has_ended = True
        self._clock.pause()
        self._line.ended(self._request.number, self._outcome(self._ending))

    def close(self) -> None:
        """End what measures the memory, of a trial that may not have ended."""
        self._memory.close()

    def _is_at_last(self, step: int) -> bool:
        return self.branch.last_step is not None and step >= self.branch.last_step

    @property
    def _is_tested(self) -> bool:
        ending = self._ending
        return self._request.evaluate_test and ending is not None and ending.state in TESTED_STATES

    def _end_where_asked(self) -> None:
        asked = self._line.asked_to_stop()
        if asked is not None and not self.is_over:
            self._end(Ending(*asked, asked=True))

    def _end_where_late(self) -> None:
        if self.is_over or self._clock.clock.train_seconds_so_far <= self._request.train_seconds_limit:
            return
        late = self._course.limited(self._clock.train_seconds())
        if late is not None:
            self._end(late)

    def _end(self, ending: Ending) -> None:
        self._clock.pause()
        self._ending = self._paused(self._course.reached_before(ending))
        if self._is_tested:
            self._clock.rest()  # until the script tests, or ends
        else:
            self.finish()

    def _paused(self, ending: Ending) -> Ending:
        """Save a trial that is to be paused; one that cannot be saved ends as pruned."""
        if ending.state is not TrialState.PAUSED:
            return ending
        if self._request.checkpoint is None:
            return replace(ending, state=TrialState.PRUNED)
        problem = None if self._objects else NO_STATE
        if problem is None:
            self._course.progress.note_peak(self._memory.peak_bytes())
            try:
                for one in self._objects.values():
                    refuse_unreadable(one.state_dict())
                self._checkpoint(self._request.checkpoint).save(*self._parts())
            except Exception as error:
                problem = first_line(error)
        if problem is None:
            return ending
        return replace(ending, state=TrialState.PRUNED, reason=f"{ending.reason}; {COULD_NOT_PAUSE}: {problem}")

    def _checkpoint(self, path: str) -> Checkpoint:
        request = self._request
        fields = {
            "configuration": asdict(request.configuration),
            "seed": request.seed,
            "target": asdict(request.target),
            "eval_every_steps": request.eval_every_steps,
            "threads": request.threads,
            "script": self._revision,
            "device": self._torch_device.type,
        }
        identity = {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}
        return Checkpoint(Path(path), identity, self._clock.clock, self._line.progressed)

    def _parts(self) -> tuple[dict[str, Saved], dict[str, Saved]]:
        training: dict[str, Saved] = {f"own.{name}": StateDict(one) for name, one in self._objects.items()}
        training["random"], training["pass"] = self._random, self._pass
        measured: dict[str, Saved] = {
            "clock": self._clock.clock,
            "loop": Attributes(self, ("_steps", "_samples", "_data_seconds")),
            "first_steps": self._clock,
            "contention": self._contention,
            "device_use": self._device_meter,
            "progress": self._course.progress,
        }
        if self._reference is not None:
            measured["reference"] = self._reference
        if self.stages.grows:
            measured["stages"] = self.stages
        return training, measured

    def _not_finite(self, metric: float, step: int) -> str:
        what = "the loss" if is_metric(metric) else self._request.target.metric
        return f"{not_finite(what, metric)}: {self._where(step)}"

    def _where(self, step: int) -> str:
        last = self.stages.last(step)
        return f"batch size {last.batch_size}, learning rate {last.learning_rate:.4g}, step {step}"

    def _outcome(self, ending: Ending) -> TrialOutcome:
        clock, threads, progress = self._clock.clock, self._request.threads, self._course.progress
        with clock.ledger("other"):
            progress.note_peak(self._memory.peak_bytes())
            self._memory.close()
            contention = self._contention.stop()
            device_use = self._device_meter.stop()
        wall = clock.wall_seconds
        excess, undelayed = self._clock.excess, clock.undelayed_train_seconds(threads)
        outcome = TrialOutcome(
            state=ending.state,
            reason=ending.reason,
            steps=self._steps,
            samples=self._samples,
            train_seconds=clock.seconds("train") - excess,
            undelayed_train_seconds=None if undelayed is None else max(0.0, undelayed - excess),
            reference_seconds=None if self._reference is None else self._reference.seconds,
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
            warnings=self._warnings(contention, wall),
            device_use=device_use,
        )
        return self._course.with_target(outcome)

    def _warnings(self, contention: Contention, wall: float) -> tuple[str, ...]:
        warnings = self._course.progress.warnings
        return (*warnings, *contention.warnings, *self._clock.clock.warnings(wall))
