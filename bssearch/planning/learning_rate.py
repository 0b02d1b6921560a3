"""A configuration for another batch size from one that was tuned, by each rule there is, and where that rule holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bssearch.errors import UsageError
from bssearch.planning.claims import ADAM_LIKE, Claim, claims_about_rates
from bssearch.planning.given import check_count, check_known, check_not_negative, check_positive, check_share
from bssearch.scaling import (
    LARGEST_DROPOUT,
    LearningRateRule,
    is_said_to_need_warmup,
    learning_rate_factor,
    rule_of_optimizer,
    sqrt_dropout,
)
from bssearch.space import OPTIMIZERS, BatchRules

WARMUP_EPOCHS = 5.0
"""Epochs of gradual warmup where one is said to be needed and none is given: of 90 (Goyal et al. 2017, § 2.2)."""

LABEL_SMOOTHING = 0.1
"""The label smoothing said to go with large batches (Szegedy et al. 2016, arXiv 1512.00567, § 7)."""

ROUNDING = 1e-9
"""κ(1 − β) this close to 1 is 1: above the rounding of double precision. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A configuration that was tuned at ``batch`` samples; None is what the optimizer does not have, or nobody gave."""

    batch: int
    learning_rate: float
    optimizer: str = "sgd"
    warmup_epochs: float = 0.0
    weight_decay: float = 0.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no training has; raise `UsageError`."""
        check_count("from_batch", self.batch)
        check_positive("learning_rate", self.learning_rate)
        check_known("optimizer", self.optimizer, tuple(OPTIMIZERS))
        for name in ("warmup_epochs", "weight_decay"):
            check_not_negative(name, getattr(self, name))
        for name in ("dropout", "label_smoothing"):
            check_share(name, getattr(self, name), below_one=True)
        for name in ("beta1", "beta2", "ema_decay"):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name), below_one=True)
        if self.epsilon is not None:
            check_positive("epsilon", self.epsilon)

    @property
    def has_betas(self) -> bool:
        """Return whether the optimizer has Adam's running means."""
        return "beta2" in OPTIMIZERS[self.optimizer].option_defaults()

    def whole(self) -> Tuned:
        """Return the configuration with the optimizer's own β and ε where none are given."""
        own = OPTIMIZERS[self.optimizer].option_defaults()
        given = {name: value for name in ("beta1", "beta2", "epsilon") if (value := getattr(self, name)) is not None}
        if unknown := [name for name in given if name not in own]:
            raise UsageError(
                f"{unknown[0]} = {given[unknown[0]]:g} contradicts optimizer = {self.optimizer!r}, which has none"
            )
        beta1, beta2, epsilon = (given.get(name, own.get(name)) for name in ("beta1", "beta2", "epsilon"))
        return replace(self, beta1=beta1, beta2=beta2, epsilon=epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """A rule: what it says of each parameter, where it is known to hold or to break, and its source.

    ``rate`` is how the learning rate follows; where None it goes as it usually does with the optimizer. ``audited_as``
    are the names of the rules that `bssearch audit` holds it against.
    """

    rate: LearningRateRule | None = None
    batch_rules: Mapping[str, str] = field(default_factory=dict)
    scales_dropout: bool = False
    smooths_labels: bool = False
    is_about_adam: bool = False
    needs: str | None = None
    holds: str
    breaks: str
    source: str
    audited_as: tuple[str, ...] = ()


NONE, LINEAR, SQRT = LearningRateRule.NONE, LearningRateRule.LINEAR, LearningRateRule.SQRT

RULES_OF_THUMB: Mapping[str, RuleOfThumb] = {
    "none": RuleOfThumb(
        rate=NONE,
        holds="batches of a few times the tuned one, and beyond the noise scale, where no larger rate trains",
        breaks="below the noise scale: at batch 8,192 with the rate of 256, ResNet-50 has 41.67 % error for 23.60 %",
        source="Goyal et al. 2017, arXiv 1706.02677, table 2",
    ),
    "linear": RuleOfThumb(
        rate=LINEAR,
        holds="SGD well below the noise scale, with gradual warmup: ResNet-50 from 256 to 8,192",
        breaks="near and above the noise scale (24.79 % error at 16k, 27.55 % at 32k), and with Adam",
        source="Goyal et al. 2017, arXiv 1706.02677; McCandlish et al. 2018, arXiv 1812.06162",
        audited_as=("LINEAR_RATE", "WARMUP"),
    ),
    "sqrt": RuleOfThumb(
        rate=SQRT,
        holds="Adam, where β and ε are scaled too; SGD with as many updates and ghost batch normalisation",
        breaks="SGD below the noise scale (26.22 % error for 23.74 % by the linear rule at 8k); Adam past B_noise, "
        "where the best rate falls again",
        source="Hoffer et al. 2017, arXiv 1705.08741; Granziol et al. 2020, arXiv 2006.09092; Li et al. 2024, arXiv "
        "2405.14578",
        audited_as=("SQRT_RATE", "WARMUP"),
    ),
    "sde": RuleOfThumb(
        rate=SQRT,
        batch_rules={"betas": "sde"},
        is_about_adam=True,
        holds="Adam while κ(1 − β) < 1 for both β: the whole square root scaling rule",
        breaks="where κ(1 − β) reaches 1, at κ = 10 for β₁ = 0.9; and without the β and ε",
        source="Malladi et al. 2022, arXiv 2205.10287, definition 2",
        audited_as=("SDE",),
    ),
    "half_life": RuleOfThumb(
        batch_rules={"betas": "half_life"},
        is_about_adam=True,
        holds="language models with AdamW from batch 1 to 512: β₂^κ keeps its half-life in tokens",
        breaks="not known above the batch it was tuned at by more than 512 times; the rate moved 2× over κ = 512, less "
        "than any rule says",
        source="Marek et al. 2025, arXiv 2507.07101",
        audited_as=("BETA_HALF_LIFE",),
    ),
    "ema_half_life": RuleOfThumb(
        batch_rules={"ema_decay": "half_life"},
        needs="ema_decay",
        holds="averages of the weights, and teachers that are averages: ρ^κ",
        breaks="where κ is so large that the average is over few steps",
        source="Busbridge et al. 2023, arXiv 2307.13813",
        audited_as=("EMA_HALF_LIFE",),
    ),
    "sqrt_weight_decay": RuleOfThumb(
        batch_rules={"weight_decay": "sqrt"},
        needs="weight_decay",
        holds="AdamW with the rate ∝ √batch, where it is the timescale rule",
        breaks="with the rate ∝ batch, where λ stays, and with the same rate, where λ ∝ batch",
        source="folklore; Wang & Aitchison 2024, arXiv 2405.13698",
        audited_as=("WEIGHT_DECAY",),
    ),
    "timescale": RuleOfThumb(
        batch_rules={"weight_decay": "timescale"},
        needs="weight_decay",
        holds="AdamW: τ = B/(ηλN) in epochs stays, for the same data and model",
        breaks="L2 in the gradient (SGD, Adam), and another number of samples or epochs",
        source="Wang & Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738",
        audited_as=("TIMESCALE",),
    ),
    "sqrt_dropout": RuleOfThumb(
        scales_dropout=True,
        needs="dropout",
        holds="not known to hold: an analogy with the gradient's noise",
        breaks=f"at large κ, where it asks for {LARGEST_DROPOUT:g} and more",
        source="folklore",
        audited_as=("DROPOUT",),
    ),
    "label_smoothing": RuleOfThumb(
        smooths_labels=True,
        holds="long trainings of classifiers at any batch size; that large batches need more is not shown",
        breaks="losses that are no cross-entropy over classes, and models that are distilled from",
        source="Szegedy et al. 2016, arXiv 1512.00567, § 7; Müller et al. 2019, arXiv 1906.02629",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRule:
    """What an audit of a ``study`` said of a rule at a batch size; ``regret`` is null where there is none."""

    study: str
    rule: str
    batch_size: int | None
    verdict: str
    regret: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledConfiguration:
    """What a rule gives at the batch size, beside it where it holds and breaks.

    ``caveats`` are what is wrong with it in this very case, ``audits`` what was found in one's own studies.
    """

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
class LearningRatePlan:
    """Configurations at ``batch`` from one tuned at ``from_batch``, by rule; ``ratio`` is batch / from_batch."""

    from_batch: int
    batch: int
    ratio: float
    optimizer: str
    rules: dict[str, RuledConfiguration]
    claims: list[Claim]

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            **{name: getattr(self, name) for name in ("from_batch", "batch", "ratio", "optimizer")},
            "rules": {name: asdict(one) for name, one in self.rules.items()},
            "notes": [{"code": one.code, "message": one.message} for one in self.claims],
        }


def plan_rules(
    tuned: Tuned,
    batch: int,
    rules: Sequence[str] = (),
    *,
    rate_rule: str | None = None,
    audits: Sequence[AuditedRule] = (),
) -> LearningRatePlan:
    """Return what each of the ``rules`` (default: all) makes of a tuned configuration at ``batch`` samples.

    Under rules that say nothing of the learning rate it follows ``rate_rule``: by default linearly with SGD and LARS,
    else by the root. What a rule does not speak of stays, but for the warmup, of which no rule but ``none`` has less
    than `WARMUP_EPOCHS` from 8 times the batch on. Raises `UsageError` for names that are not known.
    """
    check_count("batch", batch)
    for name in rules:
        check_known("rule", name, tuple(RULES_OF_THUMB))
    names = list(dict.fromkeys(rules)) or list(RULES_OF_THUMB)
    if rate_rule is not None:
        check_known("rate_rule", rate_rule, tuple(LearningRateRule))
        if all(RULES_OF_THUMB[name].rate is not None for name in names):
            raise UsageError(
                f"rate_rule = {rate_rule!r} contradicts rule = {', '.join(names)}, which says itself how the learning "
                "rate goes"
            )
    whole = tuned.whole()
    default = LearningRateRule(rate_rule) if rate_rule else rule_of_optimizer(tuned.optimizer)
    return LearningRatePlan(
        from_batch=tuned.batch,
        batch=batch,
        ratio=batch / tuned.batch,
        optimizer=tuned.optimizer,
        rules={name: _ruled(RULES_OF_THUMB[name], whole, batch, default, audits) for name in names},
        claims=list(
            claims_about_rates(
                tuned.optimizer,
                max(batch, tuned.batch),
                {RULES_OF_THUMB[name].rate or default for name in names},
                decays=tuned.weight_decay > 0,
            )
        ),
    )


def _ruled(
    rule: RuleOfThumb, tuned: Tuned, batch: int, default: LearningRateRule, audits: Sequence[AuditedRule]
) -> RuledConfiguration:
    rate_rule = default if rule.rate is None else rule.rate
    factor = learning_rate_factor(rate_rule, batch, tuned.batch)
    ratio = batch / tuned.batch
    names = ("beta1", "beta2", "epsilon", "ema_decay", "weight_decay")
    carried = BatchRules.model_validate(rule.batch_rules).carried(
        {name: getattr(tuned, name) for name in names}, ratio, factor
    )
    warms_up = rule.rate is not NONE and is_said_to_need_warmup(batch, tuned.batch)
    return RuledConfiguration(
        learning_rate=tuned.learning_rate * factor,
        warmup_epochs=max(tuned.warmup_epochs, WARMUP_EPOCHS) if warms_up else tuned.warmup_epochs,
        dropout=sqrt_dropout(tuned.dropout, batch, tuned.batch) if rule.scales_dropout else tuned.dropout,
        label_smoothing=max(tuned.label_smoothing, LABEL_SMOOTHING) if rule.smooths_labels else tuned.label_smoothing,
        **carried,
        holds=rule.holds,
        breaks=rule.breaks,
        source=rule.source,
        caveats=_caveats(rule, tuned, ratio, rate_rule),
        audits=[one for one in audits if one.rule in rule.audited_as],
    )


def _caveats(rule: RuleOfThumb, tuned: Tuned, ratio: float, rate_rule: LearningRateRule) -> list[str]:
    """Return why a rule is known to break, or changes nothing, in this very case."""
    found = []
    if ratio > 1 and rate_rule is LINEAR and tuned.optimizer in ADAM_LIKE:
        found.append(f"the linear rule is for SGD; the optimizer is {tuned.optimizer}")
    if rule.is_about_adam and not tuned.has_betas:
        found.append(f"it is about Adam's β, and {tuned.optimizer} has none")
    if rule.batch_rules.get("betas") == "sde" and tuned.beta1 is not None and tuned.beta2 is not None:
        reached = max(ratio * (1 - tuned.beta1), ratio * (1 - tuned.beta2))
        if reached > 1 - ROUNDING:
            found.append(f"κ(1 − β) = {reached:.3g} is not below 1: the rule does not hold here")
    if "weight_decay" in rule.batch_rules and tuned.optimizer != "adamw":
        found.append(f"it is about AdamW; the optimizer is {tuned.optimizer}")
    if rule.needs is not None and not getattr(tuned, rule.needs):
        found.append(f"no {rule.needs} is given: there is nothing to scale")
    return found
