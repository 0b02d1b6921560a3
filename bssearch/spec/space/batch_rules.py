"""How betas, the average of the weights and weight decay follow the batch size, where a space says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from bssearch.records.scaling import half_life, sde_beta, sde_epsilon, sqrt_weight_decay, timescale_weight_decay
from bssearch.spec.space.domains import StrictModel


class BatchRules(StrictModel):
    """Rules that carry what a space gives at ``learning_rate.reference_batch`` over to another batch size.

    κ is the batch size over the reference batch, η/η0 the factor of the learning rate's own rule.

    - ``betas``: ``half_life`` makes β₂ into β₂^κ, whose half-life in samples stays (Marek et al. 2025, arXiv
      2507.07101); ``sde`` makes both β into 1 − κ(1 − β), at least 0, and ε into ε/√κ, which with the learning rate ∝
      √κ keeps Adam's stochastic differential equation (Malladi et al. 2022, arXiv 2205.10287).
    - ``ema_decay``: ``half_life`` makes ρ into ρ^κ (Busbridge et al. 2023, arXiv 2307.13813).
    - ``weight_decay``: ``sqrt`` makes λ into λ√κ; ``timescale`` into λκ·η0/η, which keeps AdamW's averaging time (Wang
      & Aitchison 2024, arXiv 2405.13698).
    """

    betas: Literal["none", "half_life", "sde"] = "none"
    ema_decay: Literal["none", "half_life"] = "none"
    weight_decay: Literal["none", "sqrt", "timescale"] = "none"

    @property
    def followed(self) -> dict[str, str]:
        """Return the rules in force, by the names of their fields."""
        return {name: rule for name, rule in self if rule != "none"}

    def carried(self, values: Mapping[str, Any], ratio: float, rate_factor: float) -> dict[str, Any]:
        """Return values by their bare names with those that a rule is about made what they are at κ = ``ratio``.

        ``rate_factor`` is η/η0. The way back is that with 1/κ and η0/η.
        """
        rules = self._rules(ratio, rate_factor)
        return {
            name: rules[name](value) if name in rules and value is not None else value for name, value in values.items()
        }

    def check(self, parameters: Collection[str]) -> None:
        """Raise `ValueError` for a rule about what no trial of the space has; ``parameters`` are what some have."""
        for field, about in (("betas", "beta2"), ("ema_decay", "ema_decay"), ("weight_decay", "weight_decay")):
            if field in self.followed and about not in parameters:
                raise ValueError(f"batch_rules.{field} = {self.followed[field]}: the space has no {about}")

    def _rules(self, ratio: float, rate_factor: float) -> dict[str, Callable[[float], float]]:
        found: dict[str, Callable[[float], float]] = {}
        if self.betas == "half_life":
            found["beta2"] = lambda beta: half_life(beta, ratio)
        if self.betas == "sde":
            found["beta1"] = found["beta2"] = lambda beta: sde_beta(beta, ratio)
            found["epsilon"] = lambda epsilon: sde_epsilon(epsilon, ratio)
        if self.ema_decay == "half_life":
            found["ema_decay"] = lambda decay: half_life(decay, ratio)
        if self.weight_decay == "sqrt":
            found["weight_decay"] = lambda decay: sqrt_weight_decay(decay, ratio)
        if self.weight_decay == "timescale":
            found["weight_decay"] = lambda decay: timescale_weight_decay(decay, ratio, 1 / rate_factor)
        return found
