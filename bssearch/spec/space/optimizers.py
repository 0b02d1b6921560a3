"""Optimizers of a space, with their options and the library's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bssearch.spec.space.domains import LIMITS, UNKNOWN_KEY, Domain, StrictModel, bounds, check_bounds, domain_kind

OPTIMIZER_SETTINGS = {"name", "learning_rate_scale"}  # fields of every optimizer; others are options

# Absolute limits of numeric options: least, greatest, in words.
OPTION_LIMITS: dict[str, tuple[float, float, str]] = {
    **{name: LIMITS[name] for name in ("momentum", "beta1", "beta2", "epsilon")},
    "alpha": LIMITS["beta2"],
    "epsilon2": LIMITS["epsilon"],
    "momentum_decay": (0.0, math.inf, "must be >= 0"),
    "initial_accumulator_value": (0.0, math.inf, "must be >= 0"),
    "beta2_decay": (-math.inf, 0.0, "must be <= 0"),
    "clipping_threshold": (1.0, math.inf, "must be >= 1"),
    "adamw_learning_rate_scale": LIMITS["epsilon"],
    "max_gradient_norm": LIMITS["clip_norm"],
    "trust_coefficient": LIMITS["epsilon"],
}

Switch = Annotated[
    Annotated[bool, Tag("fixed")] | Annotated[tuple[bool, ...], Field(min_length=1), Tag("choices")],
    Discriminator(domain_kind),
]


class OptimizerOptions(StrictModel):
    """Name, and a factor on the space's learning rate."""

    name: str
    learning_rate_scale: float = Field(default=1.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, Mapping) else []
        if unknown:
            has = ", ".join(cls.option_defaults())
            context = {"key": str(unknown[0]), "name": cls.optimizer_name(), "has": has}
            raise PydanticCustomError(UNKNOWN_KEY, "{name} has no option '{key}'; it has {has}", context)
        return data

    @field_validator("*")
    @classmethod
    def _limits(cls, domain: Any, info: ValidationInfo) -> Any:
        if info.field_name in OPTION_LIMITS:
            check_bounds(domain, OPTION_LIMITS[info.field_name])
        return domain

    @classmethod
    def optimizer_name(cls) -> str:
        """Name in a spec."""
        return str(get_args(cls.model_fields["name"].annotation)[0])

    @classmethod
    def option_defaults(cls) -> dict[str, Any]:
        """Own options and defaults."""
        return {name: field.default for name, field in cls.model_fields.items() if name not in OPTIMIZER_SETTINGS}

    @property
    def options(self) -> dict[str, Any]:
        """Domains of the own options."""
        return {name: getattr(self, name) for name in self.option_defaults()}


class _Momentum(OptimizerOptions):
    momentum: Domain = 0.9
    nesterov: Switch = True

    @model_validator(mode="after")
    def _momentum_for_nesterov(self) -> Self:
        if bounds(self.nesterov)[1] and (low := bounds(self.momentum)[0]) <= 0:
            raise ValueError(f"nesterov needs momentum > 0, not {low:g}; set nesterov: false")
        return self


class _Moments(OptimizerOptions):
    beta1: Domain = 0.9
    beta2: Domain = 0.999
    epsilon: Domain = 1e-8


class Sgd(_Momentum):
    """SGD with (Nesterov) momentum."""

    name: Literal["sgd"] = "sgd"


class Adam(_Moments):
    """Adam (Kingma & Ba 2015, arXiv 1412.6980); weight decay is L2 in the gradient."""

    name: Literal["adam"]


class AdamW(_Moments):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]


class Adamax(_Moments):
    """Adam with the largest gradient instead of the mean square (Kingma & Ba 2015, § 7.1)."""

    name: Literal["adamax"]


class NAdam(_Moments):
    """Adam with Nesterov momentum (Dozat 2016); weight decay is L2 by default."""

    name: Literal["nadam"]
    momentum_decay: Domain = 4e-3
    decoupled_weight_decay: Switch = False


class RAdam(_Moments):
    """Rectified Adam (Liu et al. 2020, arXiv 1908.03265); weight decay is L2 by default."""

    name: Literal["radam"]
    decoupled_weight_decay: Switch = False


class RmsProp(OptimizerOptions):
    """RMSprop: ``alpha`` decays the mean square; ``centered`` uses the variance."""

    name: Literal["rmsprop"]
    alpha: Domain = 0.99
    epsilon: Domain = 1e-8
    momentum: Domain = 0.0
    centered: Switch = False


class Adagrad(OptimizerOptions):
    """Adagrad (Duchi et al. 2011): gradients over the root of their summed squares."""

    name: Literal["adagrad"]
    epsilon: Domain = 1e-10
    initial_accumulator_value: Domain = 0.0


class Adafactor(OptimizerOptions):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235): steps relative to each tensor's RMS.

    In PyTorch step t takes min(rate, 1/√t) × max(``epsilon2``, RMS). ``clipping_threshold`` is the paper's d.
    """

    name: Literal["adafactor"]
    beta2_decay: Domain = -0.8
    epsilon2: Domain = 1e-3
    clipping_threshold: Domain = 1.0


class Muon(OptimizerOptions):
    """Muon (Jordan et al. 2024) for weight matrices, AdamW (``beta1``, ``beta2``, ``epsilon``) for the rest.

    ``adjustment: match_rms_adamw`` gives updates AdamW's RMS, so both share rate and weight decay (Liu et al. 2025,
    arXiv 2502.16982, § 2.2). ``original`` needs larger Muon rates: PyTorch's example has 0.02, and AdamW at 0.015 of
    it.
    """

    name: Literal["muon"]
    momentum: Domain = 0.95
    nesterov: Switch = True
    newton_schulz_steps: int = Field(default=5, ge=1, le=99)
    adjustment: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_learning_rate_scale: Domain = 1.0
    beta1: Domain = 0.9
    beta2: Domain = 0.999
    epsilon: Domain = 1e-8


class Lamb(_Moments):
    """LAMB (You et al. 2020, arXiv 1904.00962), as in timm: AdamW's update times a trust ratio per tensor.

    After the space's ``clip_norm``, it clips the gradient's norm to ``max_gradient_norm``.
    """

    name: Literal["lamb"]
    epsilon: Domain = 1e-6
    max_gradient_norm: Domain = 1.0
    trust_clip: Switch = False


class Lars(_Momentum):
    """LARS (You et al. 2017, arXiv 1708.03888), as in timm: SGD with a rate per tensor.

    The rate is multiplied by ``trust_coefficient`` × ‖w‖ / ‖gradient‖; ``trust_clip`` caps it at the learning rate
    (LARC). Momentum is the paper's; timm's default is 0.
    """

    name: Literal["lars"]
    nesterov: Switch = False
    trust_coefficient: Domain = 1e-3
    epsilon: Domain = 1e-8
    trust_clip: Switch = False


Optimizer = Annotated[
    Sgd | Adam | AdamW | Adamax | NAdam | RAdam | RmsProp | Adagrad | Adafactor | Muon | Lamb | Lars,
    Field(discriminator="name"),
]
OPTIMIZERS: dict[str, type[OptimizerOptions]] = {
    kind.optimizer_name(): kind for kind in get_args(get_args(Optimizer)[0])
}


FINE_TUNING = "fine_tuning"

# Usual rates from scratch: SGD with momentum 0.1 at batch 256 (Goyal et al. 2017, arXiv 1706.02677), Adam 0.001 and
# Adamax 0.002 (Kingma & Ba 2015, arXiv 1412.6980, algorithms 1 and 2), others by PyTorch's and timm's defaults.
SCRATCH_RATES = {
    "sgd": 0.1,
    "adam": 1e-3,
    "adamw": 1e-3,
    "adamax": 2e-3,
    "nadam": 2e-3,
    "radam": 1e-3,
    "rmsprop": 1e-2,
    "adagrad": 1e-2,
    "adafactor": 1e-2,
    "muon": 1e-3,
    "lamb": 1e-3,
    "lars": 1.0,
}

# Fine-tuning rates are at least this much smaller: BERT uses 2e-5 to 5e-5 with Adam (Devlin et al. 2019, arXiv
# 1810.04805, A.3), 20 to 50 times less.
FINE_TUNING_FACTOR = 10
