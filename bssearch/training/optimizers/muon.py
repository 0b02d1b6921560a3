"""Muon for weight matrices and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.records import Configuration
from bssearch.training.optimizers.groups import parameter_groups


class OptimizersAsOne(torch.optim.Optimizer):
    """Optimizers over different parameters that step together, with their groups and states in one.

    To schedules, clipping, loss scaling and pauses it is one optimizer. An update that the loss scaling leaves out is
    left out by all of them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each; return what the closure does, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Have the parts work on the groups and states that are seen from outside."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]


def muon_with_adamw(
    model: nn.Module, configuration: Configuration, options: Mapping[str, Any], fused: bool | None
) -> torch.optim.Optimizer:
    """Return Muon over a model's weight matrices and AdamW over all else, at the learning rate times its scale.

    Muon takes parameters of two dimensions: PyTorch's has no others, so that convolution filters go to AdamW, with
    embeddings, biases and norms. Embeddings are known by their module. The last layer of a classifier or a language
    model is a matrix like any other, unless it shares its weights with an embedding. Raises `UsageError` where the
    model has no such matrix.
    """
    embeddings = _embeddings(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and id(parameter) not in embeddings]
    if not matrices:
        raise UsageError(
            "optimizer = 'muon' trains weight matrices outside of embeddings, and the model has none",
            hint="optimizer: {name: adamw}",
        )
    chosen = {id(parameter) for parameter in matrices}
    rest = parameter_groups((one for one in trainable if id(one) not in chosen), configuration.weight_decay)
    muon = torch.optim.Muon(
        matrices,
        lr=configuration.learning_rate,
        weight_decay=configuration.weight_decay,
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        ns_steps=options["newton_schulz_steps"],
        adjust_lr_fn=options["adjustment"],
    )
    if not rest:
        return muon
    adamw = torch.optim.AdamW(
        rest,
        lr=configuration.learning_rate * options["adamw_learning_rate_scale"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["epsilon"],
        fused=fused,
    )
    return OptimizersAsOne([muon, adamw])


def _embeddings(model: nn.Module) -> set[int]:
    """Return which parameters are those of embeddings, by their id."""
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(parameter) for layer in layers for parameter in layer.parameters()}
