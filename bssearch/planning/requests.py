"""Pydantic models of plan requests, which define options for the command line, the page and Python."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from bssearch.errors import UsageError, problem_in_words
from bssearch.records import LARGE_BATCH, LAYERWISE, REGULARISERS, LearningRateRule, is_said_to_need_warmup
from bssearch.records.text import nearest
from bssearch.registry import Option
from bssearch.spec import RelativeLearningRate, StudySpec, split_batch

LARGEST_COUNT = 10**15  # far above real counts, and exact as a float

SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30  # far beyond real values; products of a few such values are finite

MOST_PARAMETERS = 10**18
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

Asked = ParamSpec("Asked")
Model = TypeVar("Model", bound="Request")
Made = TypeVar("Made")


def _parameter_count(given: Any) -> int | None:
    # Parse a number of parameters: 110000000, 1.1e8, 110M or 7B
    if given is None:
        return None
    try:
        match = re.fullmatch(r"\s*([-+]?[\d_.]+(?:e[-+]?\d+)?)\s*([kmbt]?)\s*", str(given).lower())
        value = Decimal(match[1]) * _FACTORS[match[2]] if match else Decimal(float(given))
    except (TypeError, ValueError, ArithmeticError):
        raise ValueError("must be a number such as 110000000, 1.1e8, 110M or 7B") from None
    if not value.is_finite() or not 0 < value <= MOST_PARAMETERS or value != int(value):
        raise ValueError(f"must be a whole number from 1 to {MOST_PARAMETERS:.0e}")
    return int(value)


Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Dimension = Annotated[int, Field(ge=1, le=10**9)]
Positive = Annotated[float, Field(ge=SMALLEST_NUMBER, le=LARGEST_NUMBER)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST_NUMBER)]
Finite = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
Parameters = Annotated[Any, BeforeValidator(_parameter_count)]
Database = Annotated[str | None, Option("Database with the studies.", metavar="URL")]


class RequestError(UsageError):
    """A request has invalid fields. ``problems`` maps a field's name to the message."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("\n".join(problems.values()))
        self.problems = problems


class Request(BaseModel):
    """The input of a plan, with strict types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_one_of_the_choices(cls, value: Any, info: ValidationInfo) -> Any:
        option = options_of(cls).get(info.field_name or "")
        known = () if option is None else option.choices
        for one in value if isinstance(value, list) else [value]:
            if known and one is not None and one not in known:
                raise ValueError(f"is unknown; {nearest(str(one).lower(), known, _choices(known), cutoff=0.5)}")
        return value


class Plan:
    """The answer to a request."""

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(cast(Any, self))


@cache
def options_of(model: type[Request]) -> dict[str, Option]:
    """Return a request's options by field, except fields that only Python has."""
    return {
        name: one for name, field in model.model_fields.items() for one in field.metadata if isinstance(one, Option)
    }


def type_of(model: type[Request], name: str) -> Any:
    kind: Any = model.model_fields[name].annotation
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = get_args(kind)[0]
    return kind if kind in (int, float, bool, Path, list[str]) else list[str] if get_origin(kind) is Mapping else str


def read(model: type[Model], given: Mapping[str, Any], *, are_texts: bool = False) -> Model:
    """Create a request from values or strings.

    Raises `RequestError` for invalid fields, and `UsageError` for contradictory fields.
    """
    try:
        return model.model_validate_strings(given, strict=False) if are_texts else model.model_validate(given)
    except ValidationError as error:
        problems = ((str(one["loc"][0]), one) for one in error.errors(include_url=False))
        raise RequestError({name: _problem(model, name, one) for name, one in problems}) from None


def planned(model: Callable[Asked, Model]) -> Callable[[Callable[[Model], Made]], Callable[Asked, Made]]:
    """Let a function of a request take the request's fields as keyword arguments."""

    def decorate(plan: Callable[[Model], Made]) -> Callable[Asked, Made]:
        @wraps(plan)
        def call(**given: Any) -> Made:
            return plan(read(cast(type[Model], model), given))

        call.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
        return cast(Callable[Asked, Made], call)

    return decorate


def shown(value: object) -> str:
    """Format a value for a message. A huge integer becomes ``a number of 20 digits``."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_COUNT:
        return f"a number of {len(str(abs(value))) if value.bit_length() < 10_000 else 'thousands of'} digits"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _problem(model: type[Request], name: str, problem: Any) -> str:
    if problem["type"] == "missing":
        return f"{name} is missing; give this option: {options_of(model)[name].help}"
    if problem["type"] == "extra_forbidden":
        return f"unknown option {name!r}; {nearest(name, model.model_fields, _choices(model.model_fields))}"
    return f"{name} = {shown(problem['input'])} {problem_in_words(problem)}"


def _choices(known: Sequence[str] | Mapping[str, Any]) -> str:
    return f"choose from {', '.join(known)}"


MANY_STEPS = 16  # a common claim says that gradients of more accumulation steps are stale

# Adam and its variants
ADAM_LIKE = ("adam", "adamw", "adamax", "nadam", "radam", "lamb")


@dataclass(frozen=True, slots=True)
class Note:
    """A remark, with a ``code`` for programs and a ``message`` for users."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A common claim, the ``right`` statement, and the ``source`` of the statement."""

    said: str
    right: str
    source: str

    @property
    def message(self) -> str:
        return f"“{self.said}”: {self.right} ({self.source})"


# corrections by code of the note
CLAIMS = {
    "gradients_not_of_batch": Claim(
        "gradients take memory ∝ batch",
        "gradients are as large as the parameters at every batch size; activations grow with the micro-batch",
        "Rajbhandari et al. 2020, arXiv 1910.02054, § 3; measured here: 8.02 MiB at batch 8, 64 and 512",
    ),
    "eighty_percent_feasible": Claim(
        "80 % of memory is the optimal batch",
        "this batch is feasible, not optimal; if steps take α + β·B seconds, B = √(B_crit·α/β) takes the least time",
        "McCandlish et al. 2018, arXiv 1812.06162; Shallue et al. 2019, arXiv 1811.03600",
    ),
    "accumulation_not_stale": Claim(
        "gradients accumulated over more than 16 steps are stale",
        "false, because weights are constant during accumulation; gradients of 64 micro-batches differ from the "
        "batch's gradients by a relative 5e-16, except for batch normalisation and means over unequal micro-batches",
        "measured here; huggingface/transformers#34191",
    ),
    "accumulation_cost": Claim(
        "accumulation is 1.5 to 2 times slower",
        "the factor varies, because micro-batches fill the device less; `bssearch study audit` measures the factor",
        "measured per study; Lightning-AI/pytorch-lightning#4092 for a missing no_sync",
    ),
    "accuracy_not_fixed": Claim(
        "the batch size does not affect accuracy",
        "true if each size is retuned, regularised and trained long enough; `bssearch study confirm --to-budget` "
        "compares sizes",
        "Shallue et al. 2019, arXiv 1811.03600",
    ),
    "layerwise_not_needed": Claim(
        "batches above 8k need LARS or LAMB",
        "at batch 32k, tuned Nesterov momentum and Adam match or beat LARS and LAMB",
        "Nado et al. 2021, arXiv 2102.06356",
    ),
    "linear_rule": Claim(
        "the learning rate grows ∝ batch",
        "true for SGD with warmup well below the noise scale; the best rate saturates as 1/(1 + B_noise/B)",
        "Goyal et al. 2017, arXiv 1706.02677; McCandlish et al. 2018, arXiv 1812.06162",
    ),
    "sqrt_rule": Claim(
        "Adam's learning rate grows ∝ √batch",
        "true if 1 − β ∝ batch, ε ∝ 1/√batch and κ(1 − β) < 1 (κ = batch ratio); at constant β₂ half-life, the best "
        "rate only doubles at κ = 512",
        "Malladi et al. 2022, arXiv 2205.10287; Marek et al. 2025, arXiv 2507.07101",
    ),
    "weight_decay_rule": Claim(
        "weight decay grows ∝ √batch",
        "true for AdamW if the learning rate is also ∝ √batch, because λ ∝ batch / learning rate keeps AdamW's "
        "timescale",
        "Wang & Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738",
    ),
    "largest_not_best": Claim(
        "more devices are always faster",
        "above the critical batch size, doubling the batch saves at most a quarter of the steps, for at "
        "least 1.5× the samples",
        "McCandlish et al. 2018, arXiv 1812.06162; Shallue et al. 2019, arXiv 1811.03600",
    ),
}


def notes_on(codes: Mapping[str, object]) -> list[Note]:
    return [Note(code, CLAIMS[code].message) for code, bears in codes.items() if bears]


def notes_on_spec(spec: StudySpec) -> list[Note]:
    """Return corrections of common claims that a spec seems to follow."""
    space, largest = spec.space, spec.batch_sizes[-1]
    names = {optimizer.name for optimizer in space.optimizers}
    rate = space.learning_rate if isinstance(space.learning_rate, RelativeLearningRate) else None
    rule, adam = None if rate is None else rate.rule, bool(names & {*ADAM_LIKE})
    searched = {one.name.rpartition(".")[2] for one in space.dimensions()}
    is_fixed = not searched & {*REGULARISERS} and space.batch_rules.weight_decay == "none"
    early = rate is not None and is_said_to_need_warmup(largest, rate.reference_batch)
    return notes_on(
        {
            "accumulation_not_stale": split_batch(largest, space.max_micro_batch_size)[1] > MANY_STEPS,
            "accuracy_not_fixed": is_fixed and is_said_to_need_warmup(largest, spec.default.batch_size),
            "layerwise_not_needed": names & {*LAYERWISE} or largest >= LARGE_BATCH,
            "eighty_percent_feasible": spec.executor.memory_limit_gib or space.max_micro_batch_size,
            "gradients_not_of_batch": spec.training.activation_checkpointing,
            "weight_decay_rule": space.batch_rules.weight_decay == "sqrt",
            "linear_rule": rule is LearningRateRule.LINEAR and (adam or early),
            "sqrt_rule": rule is LearningRateRule.SQRT and adam and space.batch_rules.betas == "none",
        }
    )
