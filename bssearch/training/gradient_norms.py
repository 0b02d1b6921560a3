"""Squared gradient norms for the gradient noise scale, plain and for Adam's updates."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from bssearch.records.noise_scale import Norms, Pass

Divisors = Mapping[nn.Parameter, Callable[[], torch.Tensor]]

LEAST_EVERY, MOST_EVERY = 2, 1000  # steps from one measured step to the next


def measured_every(seconds: float, step_seconds: float, share: float) -> int:
    """Return the steps between measured steps, if a measurement adds ``seconds`` and may take ``share`` of the time."""
    return min(MOST_EVERY, max(LEAST_EVERY, math.ceil(seconds / (share * step_seconds))))


def adam_divisors(optimizers: Sequence[torch.optim.Optimizer]) -> Divisors | None:
    """Return functions that compute Adam's √v̂ + ε, by parameter.

    Returns None if no optimizer has Adam's options and state.
    """

    def divisor(state: dict[str, torch.Tensor], beta2: float, epsilon: float) -> Callable[[], torch.Tensor]:
        return lambda: (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(epsilon)

    found = {
        parameter: divisor(optimizer.state[parameter], group["betas"][1], group["eps"])
        for optimizer in optimizers
        if all({"betas", "eps"} <= group.keys() for group in optimizer.param_groups)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if {"exp_avg_sq", "step"} <= optimizer.state.get(parameter, {}).keys()
    }
    return found or None


def squares(parameter: nn.Parameter, gradient: torch.Tensor, divisors: Divisors | None) -> torch.Tensor:
    """Return a gradient's squared norms, shape (2,): plain, and divided as in Adam's update (0 without a divisor)."""
    given = gradient.detach().coalesce() if gradient.is_sparse else gradient.detach()
    values, place = (given.values(), tuple(given.indices())) if given.is_sparse else (given, ...)
    divisor = (divisors or {}).get(parameter)
    seen = [values, values.new_zeros(1) if divisor is None else values / divisor()[place]]
    return torch.stack([_norm(torch.view_as_real(one) if one.is_complex() else one) for one in seen]).square()


def _norm(values: torch.Tensor) -> torch.Tensor:
    # Norms of rows in the gradient's precision, then their norm in float64: takes a third of the time of float64 alone,
    # and is more exact than one long sum.
    rows = torch.linalg.vector_norm(values.flatten(1) if values.ndim > 1 else values, dim=-1)
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64)
    return norm


def sum_of_squares(
    gradients: Iterable[tuple[nn.Parameter, torch.Tensor | None]], divisors: Divisors | None, device: torch.device
) -> torch.Tensor:
    found = [squares(one, gradient, divisors).to(device) for one, gradient in gradients if gradient is not None]
    return torch.stack(found).sum(dim=0) if found else torch.zeros(2, dtype=torch.float64, device=device)


def pass_of(
    small: Sequence[float],
    big: Sequence[float],
    weights: tuple[float, float],
    *,
    batch: float,
    samples: int,
    divisors: Divisors | None,
) -> Pass | None:
    """Return a pass over batches of unequal weight.

    Returns None if fewer than two batches have weight, or a norm is not finite.
    """
    # A small batch's gradient is its weight × the gradient of its mean loss. Plain and for Adam, `small` is the sum of
    # the small batches' squared norms, and `big` the squared norm of the sum of their gradients. `weights` are the sums
    # of the squared weights and of the weights, `batch` the samples of all small batches.
    # E Σ‖wᵢgᵢ‖² = ‖G‖² Σwᵢ² + tr Σ W² / batch, because the batch with weight wᵢ has batch × wᵢ / W samples. Divided by
    # Σwᵢ², this is the expectation of Norms.small for W² / Σwᵢ² equal batches.
    squared, weight = weights
    batches = weight**2 / squared if squared > 0 else 0.0
    if batches <= 1:
        return None
    plain, adam = (Norms(one / squared, other / weight**2) for one, other in zip(small, big, strict=True))
    if not plain.are_finite or not adam.are_finite:
        return None
    return Pass(
        small_batch=batch / batches,
        small_batches=batches,
        samples=samples,
        plain=plain,
        adam=None if divisors is None else adam,
    )
