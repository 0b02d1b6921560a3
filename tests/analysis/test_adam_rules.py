"""Rules about Adam's betas and averages, and the belief in LARS and LAMB, held against a study's runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.rules.audit import RuleFinding, audit
from bssearch.analysis.rules.rule_book import Rule
from bssearch.records import Configuration, Phase, TrialRecord
from tests.analysis.test_rules import DEFAULT, SPACE, TUNED, answer_to, of, runs_of
from tests.factories import make_spec, make_trial

ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


def found(rule: Rule, tuned: Configuration, extra: list[TrialRecord] | None = None, **default: Any) -> RuleFinding:
    spec = make_spec(
        space={**SPACE, "optimizer": {"name": "adamw"}, "ema_decay": [0.9, 0.99]}, default={**DEFAULT, **default}
    )
    trials = [
        make_trial(1, configuration=spec.default_configuration),
        *runs_of(tuned, 0.5, 0.6, 0.4, start=10),
        *(extra or []),
    ]
    return of(audit(spec, trials, answer_to(trials, spec)), rule, tuned.batch_size)


def adamw(**parameters: Any) -> Configuration:
    return replace(TUNED, optimizer="adamw", parameters={**ADAM, "ema_decay": 0.99, **parameters})


def test_rules_about_adam_give_the_optimum_with_its_betas_and_averages_at_the_batch() -> None:
    half = found(Rule.BETA_HALF_LIFE, adamw(), ema_decay=0.99).configuration
    assert half is not None and half["beta2"] == pytest.approx(0.999**8) and half["beta1"] == 0.9
    sde = found(Rule.SDE, adamw(), ema_decay=0.99).configuration
    assert sde is not None and sde["beta2"] == pytest.approx(0.992) and sde["beta1"] == pytest.approx(0.2)
    assert sde["epsilon"] == pytest.approx(1e-8 / 8**0.5) and sde["learning_rate"] == pytest.approx(0.1 * 8**0.5)
    ema = found(Rule.EMA_HALF_LIFE, adamw(), ema_decay=0.99).configuration
    assert ema is not None and ema["ema_decay"] == pytest.approx(0.99**8)


def test_what_the_rules_about_adam_are_not_about_is_not_run() -> None:
    assert "is about Adam's betas" in found(Rule.SDE, replace(adamw(), parameters={}), ema_decay=0.9).reason
    assert "averages no weights" in found(Rule.EMA_HALF_LIFE, replace(adamw(), parameters=ADAM), ema_decay=0.9).reason


def layerwise(
    plain: tuple[float, ...], others: tuple[float, ...], size: int = 8192, *, best: str = "plain", default: int = 16
) -> RuleFinding:
    """Hold the belief against runs without and with LAMB; the ``best`` of them is the tuned optimum."""
    at = replace(adamw(), batch_size=size, micro_batch_size=size)
    lamb = replace(at, optimizer="lamb")
    tuned, other = (at, lamb) if best == "plain" else (lamb, at)
    tuned_seconds, other_seconds = (plain, others) if best == "plain" else (others, plain)
    spec = make_spec(
        space={**SPACE, "batch_size": [16, size], "optimizer": {"name": "adamw"}},
        default={**DEFAULT, "batch_size": default},
    )
    trials = [
        make_trial(1, configuration=spec.default_configuration, seconds=9.0),
        make_trial(2, configuration=other, seconds=1.0),
        *runs_of(tuned, *tuned_seconds, start=10),
        *runs_of(other, *other_seconds, start=20, phase=Phase.AUDIT),
    ]
    return of(audit(spec, trials, answer_to(trials, spec)), Rule.LAYERWISE, size)


def test_the_belief_in_layerwise_rates_holds_where_one_loses_without_and_breaks_where_not() -> None:
    needed = layerwise((1.0, 1.2, 0.9), (0.5, 0.6, 0.45), best="lamb")
    assert (needed.verdict, needed.trial_numbers) == ("held", [20, 21, 22])
    assert needed.regret is not None and needed.regret.value == pytest.approx(2.0, rel=0.01)
    assert "adamw against lamb" in needed.reason
    assert layerwise((0.5, 0.6, 0.45), (1.0, 1.2, 0.9)).verdict == "broke"
    assert layerwise((0.5, 0.6, 0.45), (0.5, 0.7, 0.45)).verdict == "undecided"


def test_below_8192_samples_the_belief_is_undecided() -> None:
    one = layerwise((1.0, 1.2, 0.9), (0.5, 0.6, 0.45), 512, best="lamb")
    assert one.verdict == "undecided" and "batch 512 is below 8,192" in one.reason
    assert one.regret is not None and one.regret.value == pytest.approx(2.0, rel=0.01)


def test_without_a_trial_of_the_other_kind_the_belief_is_not_run() -> None:
    assert "with lars or lamb reached the target" in found(Rule.LAYERWISE, adamw(), ema_decay=0.99).reason
