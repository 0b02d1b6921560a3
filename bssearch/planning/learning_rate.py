"""Rules of thumb that scale a tuned configuration to another batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from bssearch.errors import require
from bssearch.planning.requests import (
    ADAM_LIKE,
    Count,
    Database,
    Note,
    NotNegative,
    Plan,
    Positive,
    Request,
    ShareBelowOne,
    notes_on,
)
from bssearch.records import (
    LARGE_BATCH,
    LARGEST_DROPOUT,
    LAYERWISE,
    LearningRateRule,
    is_said_to_need_warmup,
    learning_rate_factor,
    rule_of_optimizer,
    sqrt_dropout,
)
from bssearch.registry import Option
from bssearch.spec import OPTIMIZERS, BatchRules

WARMUP_EPOCHS = 5.0  # default epochs of gradual warmup if necessary; 5 of 90 in Goyal et al. 2017, § 2.2

LABEL_SMOOTHING = 0.1  # recommended value for large batches (Szegedy et al. 2016, arXiv 1512.00567, § 7)

ROUNDING = 1e-9  # κ(1 − β) counts as 1 within this distance, which is above double-precision rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """A rule of thumb, with limits in ``holds`` and ``breaks``."""

    rate: LearningRateRule | None = None  # None means the optimizer's usual rule
    batch_rules: Mapping[str, str] = field(default_factory=dict)
    scales_dropout: bool = False
    smooths_labels: bool = False
    needs: str | None = None
    holds: str
    breaks: str
    source: str
    audited_as: tuple[str, ...] = ()  # names of the rule in `bssearch study audit`


NONE, LINEAR, SQRT = LearningRateRule.NONE, LearningRateRule.LINEAR, LearningRateRule.SQRT

RULES_OF_THUMB: Mapping[str, RuleOfThumb] = {
    "none": RuleOfThumb(
        rate=NONE,
        holds="for batches a few times larger, and beyond the noise scale, because training fails at larger rates",
        breaks="below the noise scale: at batch 8,192 with the rate of batch 256, ResNet-50 has 41.67 % error instead "
        "of 23.60 %",
        source="Goyal et al. 2017, arXiv 1706.02677, table 2",
    ),
    "linear": RuleOfThumb(
        rate=LINEAR,
        holds="for SGD with gradual warmup well below the noise scale: ResNet-50 from batch 256 to 8,192",
        breaks="near and above the noise scale (24.79 % error at batch 16k, 27.55 % at 32k), and with Adam",
        source="Goyal et al. 2017, arXiv 1706.02677; McCandlish et al. 2018, arXiv 1812.06162",
        audited_as=("LINEAR_RATE", "WARMUP"),
    ),
    "sqrt": RuleOfThumb(
        rate=SQRT,
        holds="for Adam if β and ε are scaled too; for SGD with equally many updates and ghost batch normalisation",
        breaks="for SGD below the noise scale (26.22 % error at batch 8k, instead of 23.74 % by the linear rule); for "
        "Adam past the noise scale, because the best rate falls again",
        source="Hoffer et al. 2017, arXiv 1705.08741; Granziol et al. 2020, arXiv 2006.09092; Li et al. 2024, arXiv "
        "2405.14578",
        audited_as=("SQRT_RATE", "WARMUP"),
    ),
    "sde": RuleOfThumb(
        rate=SQRT,
        batch_rules={"betas": "sde"},
        holds="for Adam if κ(1 − β) < 1 for β₁ and β₂ (the full square root scaling rule)",
        breaks="if κ(1 − β) ≥ 1, as at κ = 10 for β₁ = 0.9; also if β and ε are not scaled",
        source="Malladi et al. 2022, arXiv 2205.10287, definition 2",
        audited_as=("SDE",),
    ),
    "half_life": RuleOfThumb(
        batch_rules={"betas": "half_life"},
        holds="for language models with AdamW from batch 1 to 512: β₂^κ keeps the half-life in tokens",
        breaks="unknown beyond 512 times the tuned batch; up to κ = 512 the best rate changed by only 2×",
        source="Marek et al. 2025, arXiv 2507.07101",
        audited_as=("BETA_HALF_LIFE",),
    ),
    "ema_half_life": RuleOfThumb(
        batch_rules={"ema_decay": "half_life"},
        needs="ema_decay",
        holds="for an EMA of the weights, also as a teacher: ρ^κ keeps the half-life in samples",
        breaks="if κ is so large that the EMA covers few steps",
        source="Busbridge et al. 2023, arXiv 2307.13813",
        audited_as=("EMA_HALF_LIFE",),
    ),
    "sqrt_weight_decay": RuleOfThumb(
        batch_rules={"weight_decay": "sqrt"},
        needs="weight_decay",
        holds="for AdamW with the rate ∝ √batch, because then the rule equals the timescale rule",
        breaks="with the rate ∝ batch, because λ must stay constant; with a constant rate, because λ must grow ∝ batch",
        source="folklore; Wang & Aitchison 2024, arXiv 2405.13698",
        audited_as=("WEIGHT_DECAY",),
    ),
    "timescale": RuleOfThumb(
        batch_rules={"weight_decay": "timescale"},
        needs="weight_decay",
        holds="for AdamW with the same data and model, because τ = B/(ηλN) in epochs stays equal",
        breaks="for L2 in the gradient (SGD, Adam), and for another number of samples or epochs",
        source="Wang & Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738",
        audited_as=("TIMESCALE",),
    ),
    "sqrt_dropout": RuleOfThumb(
        scales_dropout=True,
        needs="dropout",
        holds="never shown; the rule is an analogy with the gradient's noise",
        breaks=f"if κ is so large that the rule gives {LARGEST_DROPOUT:g} or more",
        source="folklore",
        audited_as=("DROPOUT",),
    ),
    "label_smoothing": RuleOfThumb(
        smooths_labels=True,
        holds="for long trainings of classifiers at any batch size; no evidence that large batches need more smoothing",
        breaks="for losses other than cross-entropy over classes, and for teachers in distillation",
        source="Szegedy et al. 2016, arXiv 1512.00567, § 7; Müller et al. 2019, arXiv 1906.02629",
    ),
}


class LearningRateRequest(Request):
    """A configuration tuned at ``from_batch``, and the ``batch`` to train with."""

    from_batch: Annotated[
        Count, Option("Batch size of the tuned configuration.", label="Tuned at batch", unit="samples")
    ]
    learning_rate: Annotated[Positive, Option("Learning rate of the tuned configuration.")]
    batch: Annotated[Count, Option("Batch size to train with.", label="Wanted batch", unit="samples")]
    rule: Annotated[
        Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] | None,
        Option(
            "Rule of thumb; repeat for several rules.",
            shown_default="all",
            choices=tuple(RULES_OF_THUMB),
        ),
    ] = None
    rate_rule: Annotated[
        str | None,
        Option(
            "Learning-rate rule to use with rules for other parameters.",
            label="Learning rate under other rules",
            shown_default="linear with sgd and lars, else sqrt",
            choices=tuple(LearningRateRule),
        ),
    ] = None
    optimizer: Annotated[
        str,
        Option(
            "Optimizer; sgd has momentum.",
            label="Optimizer of the training",
            choices=tuple(OPTIMIZERS),
        ),
    ] = "sgd"
    warmup_epochs: Annotated[
        NotNegative, Option("Epochs of warmup of the tuned configuration.", label="Warmup", unit="epochs")
    ] = 0.0
    weight_decay: Annotated[NotNegative, Option("Weight decay of the tuned configuration.")] = 0.0
    dropout: Annotated[ShareBelowOne, Option("Dropout of the tuned configuration.")] = 0.0
    label_smoothing: Annotated[ShareBelowOne, Option("Label smoothing of the tuned configuration.")] = 0.0
    beta1: Annotated[ShareBelowOne | None, Option("Adam's β₁.", label="β₁", shown_default="the optimizer's")] = None
    beta2: Annotated[ShareBelowOne | None, Option("Adam's β₂.", label="β₂", shown_default="the optimizer's")] = None
    epsilon: Annotated[Positive | None, Option("Adam's ε.", label="ε", shown_default="the optimizer's")] = None
    ema_decay: Annotated[ShareBelowOne | None, Option("Decay of the EMA of the weights.", label="Averaging")] = None
    db: Database = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for name in ("beta1", "beta2", "epsilon"):
            value = getattr(self, name)
            require(
                value is None or name in self._own,
                f"{name} = {value} contradicts optimizer = {self.optimizer!r}, which has no {name}; omit {name}",
            )
        require(
            self.rate_rule is None or any(RULES_OF_THUMB[name].rate is None for name in self.rules),
            f"rate_rule = {self.rate_rule!r} has no effect with rule = {', '.join(self.rules)}; omit rate_rule or rule",
        )
        return self

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(self.rule or RULES_OF_THUMB))

    @property
    def _own(self) -> Mapping[str, Any]:
        return OPTIMIZERS[self.optimizer].option_defaults()

    @property
    def tuned(self) -> dict[str, Any]:
        """The values for `BatchRules`. A missing value takes the optimizer's default, if any, else None."""
        return {
            name: self._own.get(name) if (value := getattr(self, name)) is None else value
            for name in ("beta1", "beta2", "epsilon", "ema_decay", "weight_decay")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRule:
    """The verdict of a study's audit on a rule."""

    study: str
    rule: str
    batch_size: int | None
    verdict: str
    regret: float | None  # None if unknown
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledConfiguration:
    """The configuration from a rule, with the rule's limits and caveats, and the verdicts of stored ``audits``."""

    learning_rate: float
    warmup_epochs: float
    weight_decay: float
    dropout: float
    label_smoothing: float
    beta1: float | None
    beta2: float | None
    epsilon: float | None
    ema_decay: float | None
    holds: str
    breaks: str
    source: str
    caveats: list[str]
    audits: list[AuditedRule]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRatePlan(Plan):
    """The configurations by rule, at ``ratio`` = ``batch`` / ``from_batch``."""

    from_batch: int
    batch: int
    ratio: float
    optimizer: str
    rules: dict[str, RuledConfiguration]
    notes: list[Note]


def plan_rules(asked: LearningRateRequest, audits: Sequence[AuditedRule] = ()) -> LearningRatePlan:
    """Scale the configuration by each rule.

    Rules for other parameters scale the learning rate by ``rate_rule``. If ``batch`` is at least 8 × ``from_batch``,
    each rule except ``none`` warms up for at least `WARMUP_EPOCHS` epochs.
    """
    default = LearningRateRule(asked.rate_rule) if asked.rate_rule else rule_of_optimizer(asked.optimizer)
    rules = {name: RULES_OF_THUMB[name] for name in asked.rules}
    rates = {rule.rate or default for rule in rules.values()}
    return LearningRatePlan(
        from_batch=asked.from_batch,
        batch=asked.batch,
        ratio=asked.batch / asked.from_batch,
        optimizer=asked.optimizer,
        rules={name: _ruled(rule, asked, rule.rate or default, audits) for name, rule in rules.items()},
        notes=notes_on(
            {
                "linear_rule": LINEAR in rates,
                "sqrt_rule": SQRT in rates and asked.optimizer in ADAM_LIKE,
                "weight_decay_rule": asked.weight_decay > 0,
                "layerwise_not_needed": asked.optimizer in LAYERWISE
                or max(asked.batch, asked.from_batch) >= LARGE_BATCH,
            }
        ),
    )


def _ruled(
    rule: RuleOfThumb, asked: LearningRateRequest, rate_rule: LearningRateRule, audits: Sequence[AuditedRule]
) -> RuledConfiguration:
    factor = learning_rate_factor(rate_rule, asked.batch, asked.from_batch)
    warms_up = rule.rate is not NONE and is_said_to_need_warmup(asked.batch, asked.from_batch)
    return RuledConfiguration(
        learning_rate=asked.learning_rate * factor,
        warmup_epochs=max(asked.warmup_epochs, WARMUP_EPOCHS if warms_up else 0.0),
        dropout=sqrt_dropout(asked.dropout, asked.batch, asked.from_batch) if rule.scales_dropout else asked.dropout,
        label_smoothing=max(asked.label_smoothing, LABEL_SMOOTHING if rule.smooths_labels else 0.0),
        **BatchRules.model_validate(rule.batch_rules).carried(asked.tuned, asked.batch / asked.from_batch, factor),
        holds=rule.holds,
        breaks=rule.breaks,
        source=rule.source,
        caveats=_caveats(rule, asked, rate_rule),
        audits=[one for one in audits if one.rule in rule.audited_as],
    )


def _caveats(rule: RuleOfThumb, asked: LearningRateRequest, rate_rule: LearningRateRule) -> list[str]:
    ratio, tuned = asked.batch / asked.from_batch, asked.tuned
    has_betas = tuned["beta1"] is not None and tuned["beta2"] is not None
    reached = max(ratio * (1 - tuned[name]) for name in ("beta1", "beta2")) if has_betas else 0.0
    caveats = {
        f"the linear rule is for SGD, but the optimizer is {asked.optimizer}": ratio > 1
        and rate_rule is LINEAR
        and asked.optimizer in ADAM_LIKE,
        f"the rule is about Adam's β, but {asked.optimizer} has no β": "betas" in rule.batch_rules
        and tuned["beta2"] is None,
        f"κ(1 − β) = {reached:.3g} is not below 1, so the rule does not hold": reached > 1 - ROUNDING
        and rule.batch_rules.get("betas") == "sde",
        f"the rule is about AdamW, but the optimizer is {asked.optimizer}": "weight_decay" in rule.batch_rules
        and asked.optimizer != "adamw",
        f"{rule.needs} is missing; give a value to scale": rule.needs and not getattr(asked, rule.needs),
    }
    return [caveat for caveat, bears in caveats.items() if bears]
