"""How steps are computed on a device: what `compile: auto`, `compile: capture` and `channels_last: auto` come to."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from bssearch.probes.step_time import measure_step_time
from bssearch.records import Configuration, StepTimeRequest, TrainingSettings, parameters_of_group
from bssearch.training.beginning.ready import ready_trainer
from bssearch.training.beginning.warm_up import warm_up
from bssearch.training.captured.optimizers import why_not_capturable
from bssearch.training.captured.step import NotCapturableError
from bssearch.training.computation import Computation
from bssearch.training.memory import is_out_of_memory
from bssearch.training.own.optimizers import built_optimizers, flat
from bssearch.workloads.base import Data, Workload

MODES = {"cpu": ("default",), "cuda": ("default", "reduce-overhead", "capture")}
"""What is tried beside eager steps; a CPU has no CUDA graphs."""

AGREEMENT_STEPS = 5
"""Steps whose losses must agree with those of eager steps: the fifth hangs on four updates."""

TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}
"""The largest relative difference of these losses by precision: a choice, several times what the order of additions
changes in five steps, and less than a wrong update does."""

GAIN = 0.03
"""A mode is taken where its steps are shorter by more than this share: a choice, more than step times differ by chance.
Of two alike the one that does less to the model is taken."""

TIMED_SECONDS = 1.0
"""The seconds for which the steps of each mode are timed at most: a choice."""


@dataclass(frozen=True, slots=True)
class Fastest:
    """A mode as an environment has it (``compile_mode``), and what was found, in words."""

    compile_mode: str
    notice: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A mode that was tried: its losses and the seconds of a step, or why it is out of the question."""

    losses: tuple[float, ...] = ()
    seconds: float = math.inf
    reason: str | None = None


Try = Callable[[TrainingSettings], Tried]


def fastest(
    workload: Workload,
    configuration: Configuration,
    data: Data,
    device: torch.device,
    settings: TrainingSettings,
    optimizers: Sequence[str] = (),
    *,
    threads: int = 1,
) -> Fastest:
    """Return what the settings leave open, as it is fastest at a configuration.

    The steps are those of trials, without dropout. A captured step is tried only where those of all ``optimizers`` can
    be captured, so that no study mixes modes; one that is asked for is taken where it agrees with eager ones, as fast
    as it is. Raises what the steps raise with which others are compared; what others raise is only said.
    """
    configuration = replace(configuration, dropout=0.0)

    def tried(one: TrainingSettings) -> Tried:
        attempt = _Attempt(workload, configuration, data, Computation(device, one), optimizers, threads)
        return attempt.tried(raises=one == settings.settled("none"))

    precision = Computation(device, settings).precision
    return chosen(settings, tried, MODES[device.type], TOLERANCE[precision])


def chosen(settings: TrainingSettings, tried: Try, modes: Sequence[str], tolerance: float) -> Fastest:
    """Return the fastest of the modes and layouts that settings leave open and whose losses agree with the first one's.

    That are eager steps, or those of the mode that is given. The layout is chosen first, at the same steps. Captured
    steps that are asked for need not be faster.
    """
    wanted = settings.compile
    others: list[dict[str, Any]] = [{"channels_last": True}] if settings.channels_last == "auto" else []
    others += [{"compile": mode} for mode in modes if wanted == "auto" or mode == wanted == "capture"]
    has_no_graphs = "capture is for devices with CUDA graphs"
    best = settings.settled("none")
    if not others:
        return Fastest(best.compile, f"steps are computed as {_name(best)}: {has_no_graphs}")
    plain = fastest_yet = tried(best)
    said = [f"{_name(best)} {_milliseconds(plain)}"]
    nothing_to_compare_with = plain.reason
    if plain.reason is None and not all(map(math.isfinite, plain.losses)):
        nothing_to_compare_with = "its first losses are not finite, so that no other can be compared with them"
    if nothing_to_compare_with is not None:
        only = f"steps are computed as {_name(best)}, the only mode that was tried"
        return Fastest(best.compile, f"{only}: {nothing_to_compare_with}")
    if wanted == "capture" and wanted not in modes:
        said.append(has_no_graphs)
    for changes in others:
        candidate = replace(best, **changes)
        found = tried(candidate)
        reason = found.reason or _disagreement(found, plain, tolerance)
        said.append(f"{_name(candidate)} {reason or _milliseconds(found)}")
        is_asked = candidate.compile == wanted == "capture"
        if reason is None and (is_asked or found.seconds < (1 - GAIN) * fastest_yet.seconds):
            best, fastest_yet = candidate, found
    layout = " channels_last" if settings.channels_last == "auto" and best.channels_last else ""
    return Fastest(f"{best.compile}{layout}", f"steps are computed as {_name(best)}: {'; '.join(said)}")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What is done to find out how fast steps are in one mode, and what they compute."""

    workload: Workload
    configuration: Configuration
    data: Data
    computation: Computation
    optimizers: Sequence[str]
    threads: int

    def tried(self, *, raises: bool) -> Tried:
        """Take the first steps and time others; what goes wrong but a lack of memory is raised, or is the reason."""
        try:
            reason = self._not_capturable() if self.computation.settings.compile == "capture" else None
            if reason is not None:
                return Tried(reason=reason)
            losses = self._first_losses()
            request = StepTimeRequest(
                configuration=self.configuration, threads=self.threads, seconds_limit=TIMED_SECONDS
            )
            time = measure_step_time(request, self.workload, self.data, self.computation)
        except NotCapturableError as error:
            return Tried(reason=error.reason)
        except Exception as error:
            if raises and not is_out_of_memory(error):
                raise
            return Tried(reason=(str(error).strip().splitlines() or [type(error).__name__])[0])
        finally:
            _let_go(self.computation.device)
        if self.computation.given_up is not None:
            return Tried(reason=self.computation.given_up)
        if time.step_seconds is None:
            return Tried(reason="out of memory")
        return Tried(losses, time.step_seconds)

    def _first_losses(self) -> tuple[float, ...]:
        given = self.workload, self.configuration
        warm_up(*given, self.data, self.computation, next(iter(self.workload.metrics)), seed=0)
        losses = []
        with ready_trainer(*given, self.data.train, self.computation, seed=0) as trainer:
            for _ in range(AGREEMENT_STEPS):
                trainer.step()
                losses.append(trainer.take_mean_loss())
        return tuple(math.nan if loss is None else loss for loss in losses)

    def _not_capturable(self) -> str | None:
        """Return why the steps of one of the optimizers cannot be captured."""
        own = parameters_of_group(self.configuration.parameters, "model")
        for name in dict.fromkeys([self.configuration.optimizer, *self.optimizers]):
            model = self.computation.build_model(self.workload, 0.0, own)
            changed = replace(self.configuration, optimizer=name)
            built = flat(built_optimizers(self.workload, model, changed, self.computation.fused), model)
            reason = next(filter(None, map(why_not_capturable, built)), None)
            if reason is not None:
                return reason
        return None


def _disagreement(found: Tried, plain: Tried, tolerance: float) -> str | None:
    """Return how far the first losses are from finite ones that they should be, where that is too far."""
    if not all(map(math.isfinite, found.losses)):
        return "disagrees with eager steps: its losses are not finite"
    pairs = zip(found.losses, plain.losses, strict=True)
    apart = max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)
    if apart <= tolerance:
        return None
    return f"disagrees with eager steps: losses differ by {apart:.2g} of them, more than {tolerance:g}"


def _name(settings: TrainingSettings) -> str:
    return settings.compile + (", channels last" if settings.channels_last else "")


def _milliseconds(tried: Tried) -> str:
    return tried.reason or f"{tried.seconds * 1e3:.3g} ms a step"


def _let_go(device: torch.device) -> None:
    """Free what a mode held on the device, graphs of the compiler too."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a recording that failed may count as one that goes on
            torch.cuda.empty_cache()
