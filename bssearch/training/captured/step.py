"""An optimizer step that is recorded once and replayed: the host launches a few graphs in the place of each kernel.

Recorded are the first micro-batch of a step, which makes the gradients anew in the place of adding to zeros, one of the
others, which adds to them, and the update. Between replays the host writes the rows of the next micro-batch and, where
it changed, the learning rate. All else stays where it lies: parameters, buffers, gradients, the optimizers' state.

Python runs once, when the step is recorded. What it decided then holds for every step of the trial, so a step that
would do otherwise is refused as far as that can be seen: it draws random numbers on the host, waits for the device, or
puts new tensors in the place of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bssearch.errors import BSSearchError, WorkloadError
from bssearch.training.captured.graphs import Graphs, Work
from bssearch.training.captured.host_random import HostGenerators
from bssearch.training.captured.optimizers import begin_again
from bssearch.training.losses import LossSum
from bssearch.training.memory import is_out_of_memory
from bssearch.training.trial_checkpoint import RandomState
from bssearch.workloads.base import WeightedLoss

WARM_UP_STEPS = 3
"""Steps before the recording, as PyTorch's notes on CUDA graphs have it: the first makes the optimizer's state and has
cuDNN choose its kernels."""


class NotCapturableError(WorkloadError):
    """The step cannot be recorded, for a ``reason``. The trainer that tried is of no use any more."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the step cannot be captured: {reason}", hint="with compile: none all trials of a study run eager"
        )
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step is made of: functions that only launch work on the device, and what they change there.

    The steps are those of a ``workload``. ``micro_batch`` adds the gradient of the training samples of some rows and
    returns their loss, ``divide`` divides the gradient by the weight of the whole batch (), ``update`` applies it.
    ``tensors`` are what these change beside gradients, ``optimizers`` have a state of their own.
    """

    workload: object
    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    tensors: list[torch.Tensor]
    losses: LossSum
    micro_batch: Callable[[torch.Tensor], torch.Tensor | WeightedLoss]
    divide: Callable[[torch.Tensor], None]
    update: Work


class CapturedStep:
    """A step of ``accumulation_steps`` micro-batches, recorded when this is made; the training stands where it stood.

    ``rows`` (micro-batch size,) are those of one micro-batch of the trial. Raises `NotCapturableError`, and what the
    workload raises of its own: `BSSearchError`, and out of memory.
    """

    def __init__(self, parts: StepParts, rows: torch.Tensor, accumulation_steps: int, graphs: Graphs) -> None:
        self._parts = parts
        self._rows = rows.clone()
        self._accumulation_steps = accumulation_steps
        self._graphs = graphs
        self._weight = torch.zeros((), dtype=torch.float64, device=rows.device)
        self._weighted = False
        try:
            with _put_back(parts, rows.device):
                self._try_out()
                self._record()
        except BaseException as error:
            graphs.close()
            if isinstance(error, BSSearchError) or not isinstance(error, Exception):
                raise
            if is_out_of_memory(error):
                raise
            raise NotCapturableError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error

    @property
    def idle_bytes(self) -> int:
        """Return the memory that only replays use."""
        return self._graphs.idle_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Return the most that tensors held until the step was recorded."""
        return self._graphs.peak_bytes

    def run(self, rows: Iterator[torch.Tensor]) -> None:
        """Take a step over the next micro-batches, whose rows lie on the device; the learning rate is set."""
        for number in range(self._accumulation_steps):
            self._rows.copy_(next(rows))
            (self._first if number == 0 else self._further)()
            self._parts.losses.count(weighted=self._weighted)
        if self._weighted and self._accumulation_steps > 1:
            self._divide()
        self._update()

    def close(self) -> None:
        """Let go of the graphs; no step can follow."""
        self._graphs.close()

    def update(self) -> None:
        """Apply the gradient that lies there."""
        self._update()

    def _try_out(self) -> None:
        """Take steps as they will be recorded; raise `NotCapturableError` where the host takes part in them."""
        owners = {"workload": self._parts.workload, "model": self._parts.model}
        generators = HostGenerators(owners, self._rows.device)
        self._graphs.apart(self._whole_step)
        _refuse_drawn(generators)
        held = _tensors(self._parts.model)  # so that no new tensor can lie where one of these did
        with self._graphs.refusing_waits():
            for _ in range(WARM_UP_STEPS - 1):
                self._graphs.apart(self._whole_step)
        _refuse_drawn(generators)
        if _addresses(_tensors(self._parts.model)) != _addresses(held):
            raise NotCapturableError("the model puts new tensors in the place of its buffers at each step")

    def _record(self) -> None:
        self._first = self._graphs.record(self._first_micro_batch)
        if self._accumulation_steps > 1:
            self._further = self._graphs.record(self._further_micro_batch)
        if self._weighted and self._accumulation_steps > 1:
            self._divide = self._graphs.record(self._divide_gradient)
        self._update = self._graphs.record(self._parts.update)

    def _whole_step(self) -> None:
        self._first_micro_batch()
        if self._accumulation_steps > 1:
            self._further_micro_batch()
            if self._weighted:
                self._divide_gradient()
        self._parts.update()

    def _first_micro_batch(self) -> None:
        for parameter in self._parts.model.parameters():
            parameter.grad = None
        loss = self._parts.micro_batch(self._rows)
        self._parts.losses.take(loss)
        self._weighted = isinstance(loss, WeightedLoss)
        if isinstance(loss, WeightedLoss):
            self._weight.copy_(_on_device(loss.weight, self._rows.device))

    def _further_micro_batch(self) -> None:
        loss = self._parts.micro_batch(self._rows)
        self._parts.losses.take(loss)
        if isinstance(loss, WeightedLoss):
            self._weight.add_(_on_device(loss.weight, self._rows.device))

    def _divide_gradient(self) -> None:
        self._parts.divide(self._weight)


def _on_device(weight: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return the weight of a micro-batch; raise `NotCapturableError` where the host has it."""
    if not isinstance(weight, torch.Tensor) or weight.device.type != device.type:
        raise NotCapturableError("loss() returns a WeightedLoss whose weight is a number on the host")
    return weight.detach()


def _refuse_drawn(generators: HostGenerators) -> None:
    drawn = generators.drawn()
    if drawn is not None:
        raise NotCapturableError(f"the step draws random numbers on the host, from {drawn}, which replays would repeat")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@contextmanager
def _put_back(parts: StepParts, device: torch.device) -> Iterator[None]:
    """Afterwards give all that a step changes the values that it has now, where it lies then.

    The host keeps them meanwhile: on the device they would count towards the peak of the memory. An optimizer that has
    no state yet begins with the one that was made inside.
    """
    generators, losses = RandomState(device), parts.losses.state()
    drawn, counted = generators.state(), {name: _copied(value) for name, value in losses.items()}
    values = [_copied(tensor) for tensor in parts.tensors]
    states = [
        {parameter: {name: _copied(value) for name, value in state.items()} for parameter, state in one.state.items()}
        for one in parts.optimizers
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(parts.tensors, values, strict=True):
                tensor.detach().copy_(value)
            begin_again(parts.optimizers)
            for optimizer, of_parameters in zip(parts.optimizers, states, strict=True):
                for parameter, state in of_parameters.items():
                    for name, value in state.items():
                        if isinstance(value, torch.Tensor):
                            optimizer.state[parameter][name].copy_(value)
        parts.losses.restore(counted)
        generators.restore(drawn)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
