"""Rules of thumb at a batch size, and the regret of following a rule.

Regret is the ratio of two configurations' objective values. κ is batch size / default batch size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Literal

from bssearch.analysis.optimum import Candidate, ratio_interval
from bssearch.analysis.shape import Interval, parameters_of
from bssearch.records import (
    FEWEST_RUNS,
    FLAT_RATIO,
    WARMUP_RATIO,
    Configuration,
    LearningRateRule,
    ParameterValue,
    StepSeconds,
    TrialState,
    half_life,
    is_said_to_need_warmup,
    learning_rate_factor,
    sde_beta,
    sde_epsilon,
    sqrt_dropout,
    sqrt_weight_decay,
    student_t,
    timescale_weight_decay,
)
from bssearch.spec import SearchSpace, bounds


class Rule(StrEnum):
    """A rule of thumb."""

    LINEAR_RATE = "learning rate ∝ batch"
    SQRT_RATE = "learning rate ∝ √batch"
    WARMUP = f"warmup is needed from {WARMUP_RATIO}× the batch on"
    WEIGHT_DECAY = "weight decay ∝ √batch"
    TIMESCALE = "AdamW's timescale stays: weight decay ∝ batch / learning rate"
    DROPOUT = "dropout ∝ √batch"
    BETA_HALF_LIFE = "Adam's β₂ keeps its half-life in samples"
    SDE = "Adam's SDE stays: learning rate ∝ √batch, 1 − β ∝ batch, ε ∝ 1/√batch"
    EMA_HALF_LIFE = "the weights' average keeps its half-life in samples"
    LAYERWISE = "large batches need LARS or LAMB"
    SGD_OR_ADAM = "SGD up to batch 128, Adam above 512"
    SMALL_BATCH = "a small batch with β₂'s half-life replaces accumulation"
    MEMORY = "fill 80 % of memory"
    NOISE_SCALE = "the noise scale is the critical batch"
    EPOCHS = "4× the batch takes 1.5 to 2× the epochs"
    GENERALISATION = "larger batches generalise worse by over 2 points"
    ACCUMULATION = "accumulation costs 1.5 to 2×"
    GROWING = "growing the batch saves time"
    FINE_TUNING = "fine-tuning takes a batch 10 to 20× smaller"


def _unknown(base: Configuration, tuned: Configuration, *names: str) -> str | None:
    known = parameters_of(base), parameters_of(tuned)
    missing = next((name for name in names if any(one[name] is None for one in known)), None)
    return None if missing is None else f"{missing.replace('_', ' ')} of the runs is unknown"


def _unused(base: Configuration, name: str) -> str | None:
    return None if getattr(base, name) else f"the default has no {name.replace('_', ' ')}"


def _other_optimizer(base: Configuration, tuned: Configuration) -> str | None:
    if base.optimizer == tuned.optimizer:
        return None
    return f"the default trains with {base.optimizer}, but batch {tuned.batch_size} trains best with {tuned.optimizer}"


def _scaled_rate(
    rule: LearningRateRule, space: SearchSpace, base: Configuration, tuned: Configuration
) -> Configuration | str:
    # η0·κ (Goyal et al. 2017, arXiv 1706.02677) or η0·√κ (Hoffer et al. 2017, 1705.08741)
    if reason := _unknown(base, tuned, "learning_rate") or _other_optimizer(base, tuned):
        return reason
    return replace(
        tuned, learning_rate=base.learning_rate * learning_rate_factor(rule, tuned.batch_size, base.batch_size)
    )


def _no_warmup(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # The tuned configuration without the warmup of Goyal et al. 2017, § 2.2
    if reason := _unknown(base, tuned, "warmup_epochs"):
        return reason
    if not is_said_to_need_warmup(tuned.batch_size, base.batch_size):
        ratio = f"{tuned.batch_size / base.batch_size:.3g}×"
        return f"batch {tuned.batch_size} is {ratio} the default batch size, below {WARMUP_RATIO}×"
    if tuned.warmup_epochs == 0 and bounds(space.warmup_epochs)[1] == 0:
        return "the space has no warmup"
    return replace(tuned, warmup_epochs=0.0)


def _sqrt_weight_decay(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # λ0·√κ (folklore)
    reason = _unknown(base, tuned, "weight_decay") or _other_optimizer(base, tuned) or _unused(base, "weight_decay")
    if reason:
        return reason
    return replace(tuned, weight_decay=sqrt_weight_decay(base.weight_decay, tuned.batch_size / base.batch_size))


def _timescale(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # λ0·κ·η0/η for equal averaging times of AdamW (Wang & Aitchison 2024, arXiv 2405.13698)
    if reason := _unknown(base, tuned, "learning_rate", "weight_decay", "optimizer") or _other_optimizer(base, tuned):
        return reason
    if tuned.optimizer != "adamw":
        return f"the rule is about AdamW, but batch {tuned.batch_size} trains best with {tuned.optimizer}"
    if reason := _unused(base, "weight_decay"):
        return reason
    ratio, rate_ratio = tuned.batch_size / base.batch_size, base.learning_rate / tuned.learning_rate
    return replace(tuned, weight_decay=timescale_weight_decay(base.weight_decay, ratio, rate_ratio))


def _sqrt_dropout(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # p0·√κ (folklore)
    if reason := _unknown(base, tuned, "dropout") or _unused(base, "dropout"):
        return reason
    return replace(tuned, dropout=sqrt_dropout(base.dropout, tuned.batch_size, base.batch_size))


def _beta_half_life(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # β₂^κ (Marek et al. 2025, arXiv 2507.07101)
    if reason := _without_beta2(base, tuned):
        return reason
    beta2 = half_life(_number(base, "beta2"), tuned.batch_size / base.batch_size)
    return replace(tuned, parameters={**tuned.parameters, "beta2": beta2})


def small_batch(space: SearchSpace, accumulated: Configuration, near: Configuration | None) -> Configuration | str:
    """Return the configuration with one micro-batch per step and β₂^(1 / accumulation steps), or the reason for none.

    Marek et al. 2025 (arXiv 2507.07101) propose the rule. ``near`` is the tuned configuration at the micro-batch size.
    If ``near`` is None or has another optimizer, the learning rate follows the space's rule.
    """
    if reason := _without_beta2(accumulated, accumulated) or _unknown(accumulated, accumulated, "learning_rate"):
        return reason
    size, steps = accumulated.batch_size // accumulated.accumulation_steps, accumulated.accumulation_steps
    if near is None or near.optimizer != accumulated.optimizer:
        factor = learning_rate_factor(space.rate_rule(accumulated.optimizer), size, accumulated.batch_size)
        near = replace(accumulated, batch_size=size, learning_rate=accumulated.learning_rate * factor)
    beta2 = half_life(_number(accumulated, "beta2"), 1 / steps)
    return replace(near, parameters={**near.parameters, "beta2": beta2}).in_micro_batches(accumulated.micro_batch_size)


def _sde(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # The full square-root scaling rule (Malladi et al. 2022, arXiv 2205.10287)
    if reason := _without_beta2(base, tuned) or _unknown(base, tuned, "learning_rate"):
        return reason
    ratio = tuned.batch_size / base.batch_size
    own: dict[str, ParameterValue] = {name: sde_beta(_number(base, name), ratio) for name in ("beta1", "beta2")}
    if base.parameters.get("epsilon") is not None:
        own["epsilon"] = sde_epsilon(_number(base, "epsilon"), ratio)
    rate = base.learning_rate * learning_rate_factor(LearningRateRule.SQRT, tuned.batch_size, base.batch_size)
    return replace(tuned, learning_rate=rate, parameters={**tuned.parameters, **own})


def _ema_half_life(space: SearchSpace, base: Configuration, tuned: Configuration) -> Configuration | str:
    # ρ^κ (Busbridge et al. 2023, arXiv 2307.13813)
    for name, one in (("default", base), ("tuned optimum", tuned)):
        if one.parameters.get("ema_decay") is None:
            return f"the {name} averages no weights"
    decay = half_life(_number(base, "ema_decay"), tuned.batch_size / base.batch_size)
    return replace(tuned, parameters={**tuned.parameters, "ema_decay": decay})


def _without_beta2(base: Configuration, tuned: Configuration) -> str | None:
    if reason := _unknown(base, tuned, "optimizer") or _other_optimizer(base, tuned):
        return reason
    for name in ("beta1", "beta2"):
        if any(one.parameters.get(name) is None for one in (base, tuned)):
            return f"the rule is about Adam's betas, but runs with {tuned.optimizer} have no {name}"
    return None


def _number(configuration: Configuration, name: str) -> float:
    return float(configuration.parameters[name] or 0.0)


# Each rule takes the space, the default and the optimum, and returns a configuration or the reason against the rule
RULES: Mapping[Rule, Callable[[SearchSpace, Configuration, Configuration], Configuration | str]] = {
    Rule.LINEAR_RATE: partial(_scaled_rate, LearningRateRule.LINEAR),
    Rule.SQRT_RATE: partial(_scaled_rate, LearningRateRule.SQRT),
    Rule.WARMUP: _no_warmup,
    Rule.WEIGHT_DECAY: _sqrt_weight_decay,
    Rule.TIMESCALE: _timescale,
    Rule.DROPOUT: _sqrt_dropout,
    Rule.BETA_HALF_LIFE: _beta_half_life,
    Rule.SDE: _sde,
    Rule.EMA_HALF_LIFE: _ema_half_life,
}

# without the rules that set several parameters
CHANGED_PARAMETER: Mapping[Rule, str] = {
    Rule.LINEAR_RATE: "learning_rate",
    Rule.SQRT_RATE: "learning_rate",
    Rule.WARMUP: "warmup_epochs",
    Rule.WEIGHT_DECAY: "weight_decay",
    Rule.TIMESCALE: "weight_decay",
    Rule.DROPOUT: "dropout",
    Rule.BETA_HALF_LIFE: "beta2",
    Rule.EMA_HALF_LIFE: "ema_decay",
    Rule.LAYERWISE: "optimizer",
    Rule.SGD_OR_ADAM: "optimizer",
    Rule.SMALL_BATCH: "beta2",
}


Finding = Literal["held", "broke", "undecided", "not_run"]

HELD = FLAT_RATIO  # a rule holds if the regret's upper end is below HELD

BROKE = 1.10  # a rule breaks if the regret's lower end is above BROKE, twice the 5 %

SGD, ADAM = ("sgd",), ("adam", "adamw")
SGD_UP_TO, ADAM_ABOVE = 128, 512


class Regret(Interval):
    """A measured ratio, mostly of two objective values; ``at_least`` is true for a lower bound."""

    at_least: bool


NONE = Regret(value=1.0, low=1.0, high=1.0, at_least=False)


@dataclass(frozen=True)
class Judgement:
    """The finding on a rule of thumb, with the reason."""

    finding: Finding
    reason: str
    regret: Regret | None = None

    def reversed(self) -> Judgement:
        other: dict[Finding, Finding] = {"held": "broke", "broke": "held"}
        return Judgement(other.get(self.finding, self.finding), self.reason, self.regret)


def judge(
    rule: Candidate, tuned: Candidate, step_seconds: StepSeconds = MappingProxyType({}), *, wanted: int, limit: float
) -> Judgement:
    """Judge a rule's configuration against the tuned configuration.

    The rule held if the regret's upper end is below `HELD`. The rule broke if the lower end is above `BROKE`, or if all
    ``wanted`` runs missed the target. Contended missed runs with a common step time break the rule only if all runs
    diverged or the regret is above `BROKE`.
    """
    objective = tuned.objective.between((*rule.runs, *tuned.runs), step_seconds)
    rule, tuned = replace(rule, objective=objective), replace(tuned, objective=objective)
    basis = "" if objective.common is None else f", compared by {objective.common.in_words}"
    made, reached = len(rule.runs), rule.estimate.reached
    if not reached:
        regret = _at_least(rule, tuned, limit)
        counted = f"0 of {made} runs reached the target" if made > 1 else "the only run missed the target"
        if made < wanted:
            return Judgement("undecided", f"{counted}; {made} of {wanted} runs exist", regret)
        shared = any(run.outcome is not None and run.outcome.contended for run in rule.runs)
        if basis and shared and not _has_diverged(rule) and (regret is None or regret.value <= BROKE):
            return Judgement("undecided", f"{counted}, but other work used the device", regret)
        return Judgement("broke", counted, regret)
    missed = [
        f"{one.estimate.runs - one.estimate.reached} of {one.estimate.runs} runs {of} missed the target"
        for one, of in ((rule, "of the rule"), (tuned, "of the tuned optimum"))
        if one.estimate.reached < one.estimate.runs
    ]
    if missed:
        return Judgement(
            "undecided", f"{' and '.join(missed)}, so the interval is unknown", _medians(rule, tuned, limit)
        )
    regret, method = _regret(rule, tuned)
    method += basis
    if regret.low is None or regret.high is None:
        return Judgement("undecided", f"{method}; {made} of {wanted} runs exist" if made < wanted else method, regret)
    if regret.high < HELD:
        return Judgement("held", method, regret)
    return Judgement("broke" if regret.low > BROKE else "undecided", method, regret)


def _regret(rule: Candidate, tuned: Candidate) -> tuple[Regret, str]:
    # A paired t-test with three common seeds, else Welch's
    mine, theirs = _log_figures(rule), _log_figures(tuned)
    pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if len(pairs) >= FEWEST_RUNS:
        mean = statistics.fmean(pairs)
        half = student_t(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        regret = Regret(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), at_least=False)
        return regret, f"paired by {len(pairs)} seeds"
    value = math.exp(rule.estimate.log_mean - tuned.estimate.log_mean)
    if (interval := ratio_interval(rule.estimate, tuned.estimate)) is None:
        reason = f"{len(mine)} against {len(theirs)} runs, too few or too alike for an interval"
        return Regret(value=value, low=None, high=None, at_least=False), reason
    low, high = interval
    return (
        Regret(value=value, low=low, high=high, at_least=False),
        f"{len(mine)} against {len(theirs)} runs, by Welch's t-test",
    )


def _log_figures(candidate: Candidate) -> dict[int, float]:
    return {run.seed: log for run in candidate.runs if (log := candidate.objective.log_figure(run)) is not None}


def _medians(rule: Candidate, tuned: Candidate, limit: float) -> Regret | None:
    if not math.isfinite(tuned.value):
        return None
    if not math.isfinite(rule.value):
        return _at_least(rule, tuned, limit)
    return Regret(value=tuned.objective.ratio(rule.value, tuned.value), low=None, high=None, at_least=False)


def _at_least(rule: Candidate, tuned: Candidate, limit: float) -> Regret | None:
    objective, bound = rule.objective, rule.lower_bound
    if bound is None:
        bound = min([known for run in rule.runs if (known := objective.bound(run)) is not None], default=None)
    figure = tuned.value
    if _has_diverged(rule) and objective.trials_race:
        bound, figure = limit, tuned.time.median or math.inf
    if bound is None or not math.isfinite(figure) or bound <= 0:
        return None
    return Regret(value=bound / figure, low=None, high=None, at_least=True)


def _has_diverged(rule: Candidate) -> bool:
    return all(run.state is TrialState.DIVERGED for run in rule.runs)
