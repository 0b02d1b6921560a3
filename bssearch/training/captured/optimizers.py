"""Optimizers whose update a CUDA graph can hold: learning rate, state and counters are tensors that stay in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from bssearch.training.optimizers.muon import OptimizersAsOne

CAPTURABLE = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adamax)
"""PyTorch's optimizers with a ``capturable`` update, and SGD, whose fused kernel reads the rate on the device.

The others read their rate or a counter on the host (Muon, Adafactor, Adagrad), or are not PyTorch's."""

FIRST_VALUES = {"mu_product": 1.0}
"""What a tensor of an optimizer's state begins with (NAdam's product of momenta), where that is not 0."""


def why_not_capturable(optimizer: Optimizer) -> str | None:
    """Return why a CUDA graph cannot hold the update of an optimizer, None where it can."""
    name = "muon" if isinstance(optimizer, OptimizersAsOne) else type(optimizer).__name__
    if type(optimizer) not in CAPTURABLE:
        return f"the optimizer {name} waits for the device, or has its learning rate on the host"
    for group in optimizer.param_groups:
        if type(optimizer) is SGD and not group["fused"]:
            return "the optimizer SGD has its learning rate on the host unless it is fused"
        if type(optimizer) is SGD and group["momentum"] and group["dampening"]:
            return f"the optimizer SGD with dampening = {group['dampening']} takes another first step than the next"
        if group.get("differentiable"):
            return f"the optimizer {name} is differentiable"
    return None


class RatesInPlace:
    """The learning rates of optimizers as tensors (), one for each peak rate; groups share those of their rate.

    On a GPU they are float32, which the fused kernels take; on a CPU float64, in which they are the host's numbers.
    """

    def __init__(self, optimizers: tuple[Optimizer, ...], peak_rates: list[list[float]], device: torch.device) -> None:
        self._optimizers = optimizers
        self._peak_rates = peak_rates
        self._values: dict[float, float] = {}
        self._tensors: dict[float, torch.Tensor] = {}
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        for optimizer, rates in zip(optimizers, peak_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                value = self._values.setdefault(rate, float(group["lr"]))
                group["lr"] = self._tensors.setdefault(rate, torch.tensor(value, dtype=dtype, device=device))
                if "capturable" in group:
                    group["capturable"] = True
            _move_counters(optimizer)

    def set(self, factor: float) -> None:
        """Set each rate to a factor times its peak, without waiting for the device."""
        for rate, tensor in self._tensors.items():
            self._values[rate] = rate * factor
            tensor.fill_(rate * factor)

    def states(self) -> Any:
        """Return the state of one optimizer, or those of several, as they would be with the rates on the host."""
        states = [
            {**state, "param_groups": [self._on_host(*pair) for pair in zip(state["param_groups"], rates, strict=True)]}
            for state, rates in zip((one.state_dict() for one in self._optimizers), self._peak_rates, strict=True)
        ]
        return states[0] if len(states) == 1 else states

    def _on_host(self, group: dict[str, Any], rate: float) -> dict[str, Any]:
        capturable = {"capturable": False} if "capturable" in group else {}
        return {**group, "lr": self._values[rate], **capturable}


def _move_counters(optimizer: Optimizer) -> None:
    """Bring counters to their parameter's device: those that were made before lie on the host."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                state[name] = value.to(parameter.device)


@torch.no_grad()
def begin_again(optimizers: tuple[Optimizer, ...]) -> None:
    """Let optimizers begin anew with the tensors that they have.

    SGD's momentum buffers begin at 0 then and not at the first gradient, which is the same: momentum · 0 + gradient.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.fill_(FIRST_VALUES.get(name, 0.0))


@torch.no_grad()
def restore_in_place(optimizers: tuple[Optimizer, ...], saved: Any) -> None:
    """Put optimizers back into saved states, at the addresses of those that they have.

    Raises `KeyError` and `ValueError` where the states are those of other optimizers.
    """
    states = [saved] if len(optimizers) == 1 else saved
    begin_again(optimizers)
    for optimizer, state in zip(optimizers, states, strict=True):
        for group, saved_group in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, place in zip(group["params"], saved_group["params"], strict=True):
                own = optimizer.state[parameter]
                for name, value in state["state"].get(place, {}).items():
                    if isinstance(value, torch.Tensor):
                        own[name].copy_(value)
