"""Optimizers that a search space may name, with their options and default values."""

import keyword
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bssearch.records import ParameterValue, grouped
from bssearch.spec.space.domains import (
    LIMITS,
    OPTIONAL,
    TRAINING_PARAMETERS,
    UNKNOWN_KEY,
    Domain,
    Range,
    StrictModel,
    bounds,
    check_bounds,
    domain_kind,
    is_number,
)

OPTIMIZER_SETTINGS = {"name", "learning_rate_scale"}  # fields of every optimizer; other fields are options

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
    """The optimizer's name, and a factor on the space's learning rate."""

    name: str
    learning_rate_scale: float = Field(default=1.0, gt=0)

    @classmethod
    def _unknown(cls, key: str) -> PydanticCustomError:
        context = {"key": key, "name": cls.optimizer_name(), "has": ", ".join(cls.option_defaults())}
        return PydanticCustomError(UNKNOWN_KEY, "{name} has no option '{key}'; choose from {has}", context)

    @field_validator("*")
    @classmethod
    def _limits(cls, domain: Any, info: ValidationInfo) -> Any:
        if info.field_name in OPTION_LIMITS:
            check_bounds(domain, OPTION_LIMITS[info.field_name])
        return domain

    @classmethod
    def optimizer_name(cls) -> str:
        return str(get_args(cls.model_fields["name"].annotation)[0])

    @classmethod
    def option_defaults(cls) -> dict[str, Any]:
        return {name: field.default for name, field in cls.model_fields.items() if name not in OPTIMIZER_SETTINGS}

    @property
    def options(self) -> dict[str, Any]:
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
    """Adam (Kingma & Ba 2015, arXiv 1412.6980). Weight decay is L2 in the gradient."""

    name: Literal["adam"]


class AdamW(_Moments):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    name: Literal["adamw"]


class Adamax(_Moments):
    """Adam with the decayed largest gradient instead of the root mean square (Kingma & Ba 2015, § 7.1)."""

    name: Literal["adamax"]


class NAdam(_Moments):
    """Adam with Nesterov momentum (Dozat 2016). Weight decay is L2 by default."""

    name: Literal["nadam"]
    momentum_decay: Domain = 4e-3
    decoupled_weight_decay: Switch = False


class RAdam(_Moments):
    """Rectified Adam (Liu et al. 2020, arXiv 1908.03265). Weight decay is L2 by default."""

    name: Literal["radam"]
    decoupled_weight_decay: Switch = False


class RmsProp(OptimizerOptions):
    """RMSprop: ``alpha`` decays the mean square, and ``centered`` uses the variance."""

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

    In PyTorch, step t has the size min(rate, 1/√t) × max(``epsilon2``, RMS). ``clipping_threshold`` is the paper's d.
    """

    name: Literal["adafactor"]
    beta2_decay: Domain = -0.8
    epsilon2: Domain = 1e-3
    clipping_threshold: Domain = 1.0


class Muon(OptimizerOptions):
    """Muon (Jordan et al. 2024) for weight matrices, and AdamW for other parameters.

    ``beta1``, ``beta2`` and ``epsilon`` are AdamW's. ``adjustment: match_rms_adamw`` gives updates AdamW's RMS (Liu et
    al. 2025, arXiv 2502.16982, § 2.2). Muon and AdamW then share rate and weight decay. ``original`` needs larger Muon
    rates: PyTorch's example has 0.02 for Muon, and 0.015 × this rate for AdamW.
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

    After the space's ``clip_norm``, LAMB clips the gradient's norm to ``max_gradient_norm``.
    """

    name: Literal["lamb"]
    epsilon: Domain = 1e-6
    max_gradient_norm: Domain = 1.0
    trust_clip: Switch = False


class Lars(_Momentum):
    """LARS (You et al. 2017, arXiv 1708.03888), as in timm: SGD with a rate per matrix or filter.

    ``trust_coefficient`` × ‖w‖ / (‖gradient‖ + weight decay × ‖w‖) scales the rate. ``trust_clip`` caps the result at
    the learning rate (LARC). The default momentum is the paper's, not timm's 0.
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
# Adamax 0.002 (Kingma & Ba 2015, arXiv 1412.6980, algorithms 1 and 2), other rates by PyTorch's and timm's defaults.
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


MOST_OWN = 32

MOST_CHOICES = 256

LONGEST_NAME = 50
LONGEST_TEXT = 100  # longest name or text choice, in characters

LARGEST_WHOLE = 2**53  # every whole number up to here is an exact double

LARGEST_NUMBER = 1e100  # products of such numbers stay finite in double precision

# Names that bssearch uses itself.
RESERVED = frozenset(
    {
        *("batch_size", "micro_batch_size", "max_micro_batch_size", "accumulation_steps", "world_size"),
        *("learning_rate", "reference_learning_rate", "optimizer", "schedule", "horizon_samples"),
        *("seed", "steps", "parameters", "self", "model", "loss", "inputs", "targets"),
        *TRAINING_PARAMETERS,
        *OPTIONAL,
        *LIMITS,
        *Sgd.model_fields,
        *AdamW.model_fields,
    }
)

OwnValue = bool | int | float | str
Kind = Literal["a number", "true or false", "a string"]


def _checked_number(value: Any) -> int | float:
    if not is_number(value):
        raise ValueError("must be a number")
    largest = LARGEST_WHOLE if isinstance(value, int) else LARGEST_NUMBER
    if not abs(value) <= largest:
        raise ValueError(f"must be at most {largest} in absolute value")
    return value


def _checked_value(value: Any) -> OwnValue:
    # A text must not start like a formula of a spreadsheet.
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _checked_number(value)
    if not isinstance(value, str):
        raise ValueError("must be a number, true or false, or a string")
    if len(value) > LONGEST_TEXT or not TEXT.fullmatch(value):
        raise ValueError(
            f"a string must have 1 to {LONGEST_TEXT} printable characters, the first a letter, a digit, _, . or /"
        )
    return value


TEXT = re.compile(r"[\w./][^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*")
Number = Annotated[int | float, PlainValidator(_checked_number), WithJsonSchema({"type": "number"})]
Scalar = Annotated[OwnValue, PlainValidator(_checked_value), WithJsonSchema({"type": ["boolean", "number", "string"]})]


class OwnRange(Range):
    """A range of a user's parameter, searched on a log scale if ``log`` (default: if low > 0).

    ``integer``: whole numbers only (default: if neither end has a decimal point).
    """

    low: Number
    high: Number
    integer: bool | None = None

    @model_validator(mode="after")
    def _whole_ends(self) -> Self:
        for name, end in (("low", self.low), ("high", self.high)):
            if self.integer and end != math.floor(end):
                raise ValueError(f"{name} = {end:g} must be a whole number with integer: true")
            if self.integer and abs(end) > LARGEST_WHOLE:
                raise ValueError(f"{name} = {end:g} must be at most {LARGEST_WHOLE} in absolute value")
        return self

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int) if self.integer is None else self.integer


def _choices(values: tuple[OwnValue, ...]) -> tuple[OwnValue, ...]:
    if len({kind_of_value(value) for value in values}) > 1:
        raise ValueError("the choices must all be numbers, all true or false, or all strings")
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{value!r} appears twice among the choices; list each choice once")
    return values


OwnDomain = Annotated[
    Annotated[Scalar, Tag("fixed")]
    | Annotated[OwnRange, Tag("range")]
    | Annotated[
        tuple[Scalar, ...], Field(min_length=1, max_length=MOST_CHOICES), AfterValidator(_choices), Tag("choices")
    ],
    Discriminator(domain_kind),
]


def checked_names(given: Mapping[str, Any] | None) -> Any:
    """Return a group of a user's parameters. Raises `PydanticCustomError` for an invalid name."""
    for name in given or {}:
        if problem := _problem(name):
            raise PydanticCustomError(UNKNOWN_KEY, "{advice}", {"key": name, "advice": problem})
    return given or None


def _problem(name: str) -> str | None:
    if len(name) > LONGEST_NAME:
        return f"a name must have at most {LONGEST_NAME} characters"
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        return "a name must be a Python identifier of ASCII letters, digits and _, because the name becomes an argument"
    return "bssearch uses this name itself; choose another name" if name in RESERVED else None


OwnDomains = Annotated[dict[str, OwnDomain] | None, AfterValidator(checked_names)]
OwnValues = Annotated[dict[str, Scalar] | None, AfterValidator(checked_names)]


def check_groups(groups: Mapping[str, Mapping[str, Any]]) -> None:
    by_name = grouped((name, group) for group, names in groups.items() for name in names)
    if twice := [name for name, found in by_name.items() if len(found) > 1]:
        raise ValueError(f"{twice[0]} is under both {' and '.join(by_name[twice[0]][:2])}; remove one entry")
    if (count := len(by_name)) > MOST_OWN:
        raise ValueError(f"{', '.join(groups)} have {count} parameters together; list at most {MOST_OWN}")


def kind_of_value(value: ParameterValue) -> Kind:
    return "true or false" if isinstance(value, bool) else "a string" if isinstance(value, str) else "a number"


def as_in_domain(name: str, value: Any, domain: Any) -> ParameterValue:
    """Convert a value to its domain's type, even out of range. Raises `ValueError` for another kind of value."""
    some = domain.low if isinstance(domain, Range) else domain[0] if isinstance(domain, tuple) else domain
    if kind_of_value(value) != kind_of_value(some):
        raise ValueError(f"{name} = {value!r} must be {kind_of_value(some)}, as in space.{name}")
    if isinstance(domain, OwnRange):
        if not domain.is_integer:
            return float(value)
        if value != math.floor(value):
            raise ValueError(f"{name} = {value:g} must be a whole number, as in space.{name}")
        return int(value)
    choices = domain if isinstance(domain, tuple) else (domain,)
    return next((choice for choice in choices if choice == value), value)  # type: ignore[no-any-return]


def from_coordinate(value: ParameterValue, domain: Domain | OwnDomain) -> ParameterValue:
    if not isinstance(domain, OwnRange) or isinstance(value, str | None):
        return value
    return min(max(round(value), round(domain.low)), round(domain.high)) if domain.is_integer else float(value)
