from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.rules.audit import Audit, RuleFinding, about_fine_tuning, audit
from bssearch.analysis.rules.rule_book import Rule
from bssearch.analysis.shape import CriticalBatch, Fit, Interval
from bssearch.records import Configuration, Phase, StepTime, StudyRecord, TrialRecord, TrialState
from bssearch.spec import IMPORTED, StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary
from tests.factories import EPOCH, make_environment, make_probe, make_spec, make_trial, not_none, with_outcome

DEFAULT = {"batch_size": 16, "learning_rate": 0.1, "weight_decay": 1e-4, "dropout": 0.1, "warmup_epochs": 0.0}
SPACE = {
    "batch_size": {"low": 8, "high": 128},
    "learning_rate": {"reference_batch": 16, "low": 0.01, "high": 1.0, "rule": "sqrt"},
    "warmup_epochs": [0.0, 1.0],
    "weight_decay": [0.0, 1e-4, 1e-3],
    "dropout": {"low": 0.0, "high": 0.5},
}
SPEC = make_spec(space=SPACE, default=DEFAULT)
TUNED = Configuration(
    batch_size=128, micro_batch_size=128, learning_rate=0.3, warmup_epochs=1.0, weight_decay=1e-3, dropout=0.2
)
AT_32 = replace(TUNED, batch_size=32, micro_batch_size=32, learning_rate=0.12)


def runs_of(
    configuration: Configuration, *seconds: float, start: int, phase: Phase = Phase.CONFIRM, **changes: Any
) -> list[TrialRecord]:
    return [
        make_trial(start + n, configuration=configuration, seconds=value, seed=n, phase=phase, **changes)
        for n, value in enumerate(seconds)
    ]


def base(spec: StudySpec = SPEC) -> list[TrialRecord]:
    """The optimum is batch 128, tuned and confirmed; 32 is confirmed, and slower."""
    return [
        make_trial(1, configuration=spec.default_configuration, seconds=9.0),
        *runs_of(TUNED, 1.0, 1.2, 0.9, start=10),
        *runs_of(AT_32, 2.0, 2.2, 1.9, start=20),
    ]


def answer_to(trials: list[TrialRecord], spec: StudySpec = SPEC, memory: MemoryBoundary = UNKNOWN) -> Answer:
    study = StudyRecord(
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        spec_hash=spec.question_hash,
        objective=spec.objective,
        target=spec.record_target,
        created_by="tester",
        created_at=EPOCH,
        environment=make_environment(),
    )
    return build_answer(study, spec, trials, {size: make_probe(size) for size in (16, 32, 128)}, memory)


@cache
def answer_to_base() -> Answer:
    return answer_to(base())


def judged(extra: list[TrialRecord], spec: StudySpec = SPEC, memory: MemoryBoundary = UNKNOWN, **known: Any) -> Audit:
    trials = [*base(spec), *extra]
    return audit(spec, trials, answer_to(trials, spec, memory), memory=memory, **known)


def audited(*runs: TrialRecord, spec: StudySpec = SPEC) -> Audit:
    """Audit of some runs beside the default's search trial."""
    trials = [make_trial(1, configuration=spec.default_configuration, seconds=50.0), *runs]
    return audit(spec, trials, answer_to(trials, spec))


def of(found: Audit, rule: Rule, batch_size: int | None = 128) -> RuleFinding:
    return next(one for one in found.rules if one.rule is rule and one.batch_size == batch_size)


def by_rule(rule: Rule, *seconds: float, configuration: dict[str, Any], **changes: Any) -> RuleFinding:
    return of(judged(runs_of(replace(TUNED, **configuration), *seconds, start=100, phase=Phase.AUDIT, **changes)), rule)


def test_rules_are_audited_at_the_optimum_and_the_largest_with_confirmation_only() -> None:
    found = audited(*runs_of(TUNED, 1, 1.2, 0.9, start=10), *runs_of(AT_32, 0.5, 0.55, 0.45, start=40))
    assert [one.batch_size for one in found.rules if one.rule is Rule.LINEAR_RATE] == [32, 128]
    assert [one.batch_size for one in judged([]).rules if one.rule is Rule.LINEAR_RATE] == [128]


def test_at_the_defaults_own_batch_size_there_is_nothing_to_audit() -> None:
    own = replace(TUNED, batch_size=16, micro_batch_size=16)
    one = of(audited(*runs_of(own, 1.0, 1.1, 0.9, start=10)), Rule.LINEAR_RATE, 16)
    assert one.verdict == "not_run"
    assert "changes nothing" in one.reason


@pytest.mark.parametrize(
    ("seconds", "verdict", "regret"),
    [
        ((1.01, 1.2, 0.9), "held", 1.0033),
        ((2.0, 2.4, 1.8), "broke", 2.0),
        ((1.0, 1.5, 0.9), "undecided", 1.0772),
        ((1.08, 1.296, 0.972), "undecided", 1.08),
        ((1.0, 1.3, 0.85), "undecided", 1.0077),
        ((1.0, 1.8, 1.1), "undecided", 1.2239),
    ],
)
def test_the_interval_of_the_regret_decides(seconds: tuple[float, ...], verdict: str, regret: float) -> None:
    one = by_rule(Rule.LINEAR_RATE, *seconds, configuration={"learning_rate": 0.8})
    assert one.verdict == verdict
    assert not_none(one.regret).value == pytest.approx(regret, rel=1e-3)
    assert one.reason == "paired by 3 seeds; learning rate 0.8 instead of 0.3"
    assert one.trial_numbers == [100, 101, 102]


def test_runs_stopped_short_of_the_full_limit_say_nothing() -> None:
    runs = runs_of(
        replace(TUNED, learning_rate=0.8), 2.0, 2.0, 2.0, start=100, phase=Phase.AUDIT, state=TrialState.EXHAUSTED
    )
    assert of(judged([replace(run, train_seconds_limit=2.0) for run in runs]), Rule.LINEAR_RATE).verdict == "not_run"


@pytest.mark.parametrize(("seconds", "verdict"), [((2.0, 2.4, 1.8), "held"), ((1.0, 1.2, 0.9), "broke")])
def test_warmup_is_needed_where_going_without_costs_and_not_where_it_does_not(
    seconds: tuple[float, ...], verdict: str
) -> None:
    assert by_rule(Rule.WARMUP, *seconds, configuration={"warmup_epochs": 0.0}).verdict == verdict


def test_an_optimum_without_warmup_breaks_the_rule_where_the_space_has_one() -> None:
    def verdict(space: dict[str, Any]) -> RuleFinding:
        tuned = runs_of(replace(TUNED, warmup_epochs=0.0), 0.5, 0.6, 0.4, start=10)
        return of(audited(*tuned, spec=make_spec(space={**SPACE, **space}, default=DEFAULT)), Rule.WARMUP)

    one = verdict({})
    assert one.verdict == "broke"
    assert one.regret is not None and one.regret.value == 1.0
    assert "the tuned optimum has no warmup" in one.reason
    assert verdict({"warmup_epochs": 0.0}).verdict == "not_run"


def test_a_rule_that_gives_the_tuned_configuration_holds() -> None:
    tuned = runs_of(replace(TUNED, learning_rate=0.1 * 128 / 16), 0.5, 0.6, 0.4, start=10)
    one = of(audited(*tuned), Rule.LINEAR_RATE)
    assert (one.verdict, one.trial_numbers) == ("held", [10, 11, 12])


def test_what_a_rule_is_not_about_is_not_run() -> None:
    spec = make_spec(space=SPACE, default={**DEFAULT, "weight_decay": 0.0, "dropout": 0.0, "batch_size": 32})
    tuned = runs_of(TUNED, 0.5, 0.6, 0.4, start=10)
    reasons = {one.rule: one.reason for one in audited(*tuned, spec=spec).rules if one.batch_size == 128}
    assert reasons[Rule.WEIGHT_DECAY] == "the default has no weight decay"
    assert reasons[Rule.DROPOUT] == "the default has no dropout"
    other = make_spec(
        space={**SPACE, "optimizer": [{"name": "adamw"}, {"name": "sgd"}]},
        default={**DEFAULT, "batch_size": 32, "optimizer": {"name": "adamw"}},
    )
    one = of(audited(*tuned, spec=other), Rule.LINEAR_RATE)
    assert one.verdict == "not_run" and "adamw" in one.reason
    assert reasons[Rule.TIMESCALE] == "the rule is about AdamW, but batch 128 trains best with sgd"
    assert reasons[Rule.WARMUP] == "batch 128 is 4× the default batch size, below 8×"


def test_adamw_keeps_its_timescale() -> None:
    spec = make_spec(space={**SPACE, "optimizer": {"name": "adamw"}}, default=DEFAULT)
    one = of(audited(*runs_of(replace(TUNED, optimizer="adamw"), 0.5, 0.6, 0.4, start=10), spec=spec), Rule.TIMESCALE)
    assert not_none(one.configuration)["weight_decay"] == pytest.approx(1e-4 * 8 * 0.1 / 0.3)


def test_without_confirmation_nothing_is_judged_and_it_says_what_to_do() -> None:
    one = of(audited(make_trial(2, configuration=TUNED, seconds=0.5)), Rule.LINEAR_RATE)
    assert (one.verdict, one.reason) == ("not_run", "confirmation is incomplete; run `bssearch study confirm toy`")


def test_an_imported_study_is_judged_and_says_that_nothing_can_be_run() -> None:
    known = make_spec(space=SPACE, default=DEFAULT, workload=IMPORTED, workload_settings={"default_known": True})
    assert "imported" in of(judged([], known), Rule.LINEAR_RATE).reason
    unknown = make_spec(space=SPACE, default=DEFAULT, workload=IMPORTED)
    assert "the default is unknown" in of(judged([], unknown), Rule.LINEAR_RATE).reason


def test_a_spent_budget_and_failures_are_named() -> None:
    rule = replace(TUNED, learning_rate=0.8)
    found = judged(runs_of(rule, 2.0, start=100, phase=Phase.AUDIT), train_seconds=1.5)
    assert found.spent_train_seconds == 2.0
    assert "the budget of 1.5 train seconds is spent" in of(found, Rule.LINEAR_RATE).reason
    assert "the budget of 1.5 train seconds is spent" in of(found, Rule.DROPOUT).reason
    failed = runs_of(rule, 0.0, 0.0, start=100, phase=Phase.AUDIT, state=TrialState.FAILED)
    assert of(judged(failed), Rule.LINEAR_RATE).reason == "trial 101 failed: as the test has it"


@pytest.mark.parametrize(("phase", "spent"), [(Phase.AUDIT, 2.0), (Phase.TO_BUDGET, 0.0)])
def test_an_audit_spent_its_own_runs_whatever_rule_gives_them_now(phase: Phase, spent: float) -> None:
    elsewhere = replace(TUNED, batch_size=32, micro_batch_size=32, learning_rate=0.7)
    assert judged(runs_of(elsewhere, 2.0, start=100, phase=phase)).spent_train_seconds == spent


@pytest.mark.parametrize(
    ("memory", "train_samples", "batch_size", "verdict", "reason"),
    [
        (UNKNOWN, None, None, "not_run", "no known micro-batch size fits"),
        (MemoryBoundary(fits=40), None, None, "not_run", "no micro-batch ran out of memory; 40 is the largest"),
        (MemoryBoundary(fits=1000, too_large=1100), None, None, "not_run", "80 % of memory is batch 800; the nearest"),
        (MemoryBoundary(fits=40, too_large=44), None, 32, "broke", "paired by 3 seeds; 80 % of the 40 samples"),
        (MemoryBoundary(fits=40), 40, 32, "broke", "paired by 3 seeds; 80 % of the 40 samples that fit is 32"),
        (MemoryBoundary(fits=200, too_large=220), None, 128, "held", "160; the nearest batch size is the optimum"),
    ],
)
def test_eighty_percent_of_memory(
    memory: MemoryBoundary, train_samples: int | None, batch_size: int | None, verdict: str, reason: str
) -> None:
    # A bound above 128 leaves the optimum as it is.
    bound = replace(memory, too_large=None if memory.too_large is None else max(memory.too_large, 129))
    one = of(audit(SPEC, base(), answer_to_base(), memory=bound, train_samples=train_samples), Rule.MEMORY, batch_size)
    assert one.verdict == verdict
    assert reason in one.reason


def with_law(noise: dict[str, Any], b_crit: tuple[float, float | None, float | None], verdict: str = "fits") -> Answer:
    found = answer_to_base()
    values: dict[str, Any] = {
        "s_min": 100.0,
        "b_crit": CriticalBatch(estimate=b_crit[0], low=b_crit[1], high=b_crit[2]),
        "max_residual": 0.02,
        "verdict": verdict,
        "residuals": {},
        **dict.fromkeys(("alpha_s", "beta_s", "b_star", "predicted", "including_untuned", "noise_scale_ratio")),
    }
    scale = NoiseAnswer(
        **{
            "batch_size": 128, "scale": None, "low": 1.0, "high": None, "adam_scale": None, "adam_low": None,
            "adam_high": None, "passes": 9, "step": 5, "trial": None, "far_from_target": None, **noise,
        }
    )  # fmt: skip
    return found.model_copy(
        update={"measured": found.measured.model_copy(update={"noise_scale": scale}), "fit": Fit(**values)}
    )


def test_a_law_that_does_not_fit_has_no_critical_batch() -> None:
    found = audit(SPEC, base(), with_law({"scale": 100.0, "low": 90.0, "high": 110.0}, (100.0, 90.0, 110.0), "poor"))
    one = of(found, Rule.NOISE_SCALE, None)
    assert one.verdict == "not_run"
    assert "the law fits poorly" in one.reason


def with_gap(gap: Interval | None, best: int = 32, *, smaller: Interval | None = None) -> Answer:
    def final(batch_size: int, its_gap: Interval | None) -> FinalMetrics:
        return FinalMetrics(
            batch_size=batch_size, parameters={}, runs=3, ended_early=0, contended=0, final_metric=0.9, test_metric=0.9,
            gap=its_gap, trial_numbers=[batch_size],
        )  # fmt: skip

    found = Generalisation(
        train_seconds=10.0, best_batch_size=best, notable_gap=0.02, batches=[final(32, smaller), final(128, gap)],
        more_regularised=None, closed=None,
    )  # fmt: skip
    return answer_to_base().model_copy(update={"generalisation": found})


def test_a_largest_batch_that_ends_best_breaks_it_and_without_runs_the_command_is_named() -> None:
    for gap, verdict in (
        (Interval(value=0.01, low=-0.01, high=0.03), "broke"),
        (Interval(value=0.01, low=-0.03, high=0.05), "undecided"),
        (Interval(value=0.01, low=None, high=None), "undecided"),
    ):
        assert (
            of(audit(SPEC, base(), with_gap(None, best=128, smaller=gap)), Rule.GENERALISATION, 128).verdict == verdict
        )
    assert "bssearch study confirm toy --to-budget" in of(judged([]), Rule.GENERALISATION, None).reason


@pytest.mark.parametrize(
    ("milliseconds", "interval", "verdict"),
    [(1.7, 0.01, "held"), (1.1, 0.01, "broke"), (4.0, 0.01, "broke"), (1.52, 0.05, "undecided")],
)
def test_accumulation_costs_what_was_timed(milliseconds: float, interval: float, verdict: str) -> None:
    def timed(micro: int, seconds: float) -> StepTime:
        return StepTime(
            batch_size=128, micro_batch_size=micro, step_seconds=seconds, evaluation_seconds=0.1, steps_timed=9,
            peak_memory_bytes=None, step_seconds_low=seconds * (1 - interval),
            step_seconds_high=seconds * (1 + interval),
        )  # fmt: skip

    one = of(judged([], step_times=[timed(128, 1e-3), timed(32, 1e-3 * milliseconds)]), Rule.ACCUMULATION)
    assert one.verdict == verdict
    assert not_none(one.regret).value == pytest.approx(milliseconds)
    assert "4 micro-batches of 32" in one.reason
    assert of(judged([], step_times=[timed(128, 1e-3)]), Rule.ACCUMULATION, None).verdict == "not_run"


def slope_of(rates: dict[int, float]) -> Any:
    trials = []
    for number, (size, rate) in enumerate(rates.items()):
        one = replace(TUNED, batch_size=size, micro_batch_size=size, learning_rate=rate)
        slower = replace(one, dropout=0.3)  # a second one that reached: the batch size counts as tuned
        trials += [
            make_trial(10 * number + 10, configuration=one, seconds=1.0, steps=5000 // size),
            make_trial(10 * number + 11, configuration=slower, seconds=2.0, steps=9000 // size),
        ]
    return audited(*trials).learning_rate_slope


def test_the_slope_of_the_tuned_rate_excludes_what_it_is_not() -> None:
    exact = slope_of({size: 0.05 * (size / 16) ** 0.5 for size in (16, 32, 64, 128)})
    assert (exact.estimate, exact.excludes) == (pytest.approx(0.5), [0.0, 1.0])
    linear = slope_of({size: 0.1 * size / 64 for size in (64, 128, 256, 512)})
    assert linear.excludes == [0.0, 0.5], "the exact rule is not excluded by rounding"
    # By scipy.stats.linregress and t(0.975, 2) = 4.3027.
    rough = slope_of({16: 0.05, 32: 0.06, 64: 0.11, 128: 0.12})
    assert rough.estimate == pytest.approx(0.4663, abs=1e-3)
    assert rough.high - rough.estimate == pytest.approx(4.3027 * 0.09862, abs=1e-4)
    assert slope_of({16: 0.05, 32: 0.06}) is None


def test_a_batch_size_that_is_not_tuned_has_no_part_in_the_slope() -> None:
    tuned = {size: 0.05 * (size / 16) ** 0.5 for size in (16, 32, 64)}
    assert slope_of({**tuned, 128: 0.01 * (128 / 16) ** 0.5}) == slope_of(tuned)


@pytest.mark.parametrize(
    ("last_miss_step", "verdict", "regret"),
    [(700, "broke", 7.0), (111, "broke", 1.11), (110, "undecided", 1.1), (90, "undecided", 0.9)],
)
def test_a_shared_device_shows_by_its_steps_how_far_a_rule_missed(
    last_miss_step: int, verdict: str, regret: float
) -> None:
    rule = replace(TUNED, learning_rate=0.8)
    tuned = [
        replace(run, steps_x_step_time_s=1.0)
        for run in runs_of(TUNED, 1.0, 1.2, 0.9, start=10, steps=100, contended=True)
    ]
    missed = runs_of(
        rule, 10.0, 10.0, 10.0, start=100, phase=Phase.AUDIT, state=TrialState.EXHAUSTED, last_miss_step=last_miss_step,
        contended=True,
    )  # fmt: skip
    one = of(audited(*tuned, *missed), Rule.LINEAR_RATE)
    assert one.verdict == verdict
    assert one.regret is not None and one.regret.at_least
    assert one.regret.value == pytest.approx(regret)


@pytest.mark.parametrize(("contended", "verdict"), [(False, "broke"), (True, "undecided")])
def test_misses_of_a_rule_with_known_slowdowns_break_it_unless_other_work_used_the_device(
    contended: bool, verdict: str
) -> None:
    known: dict[str, Any] = {"undelayed_train_seconds": 1.0, "reference_seconds": 1e-4}
    missed = runs_of(
        replace(TUNED, learning_rate=0.8), 1.0, 1.0, 1.0, start=100, phase=Phase.AUDIT, state=TrialState.EXHAUSTED,
        last_miss_step=90, contended=contended, **known,
    )  # fmt: skip
    runs = [*runs_of(TUNED, 1.0, 1.2, 0.9, start=10, **known), *missed]
    one = of(audited(*(with_outcome(run, steps=100) for run in runs)), Rule.LINEAR_RATE)
    assert one.verdict == verdict
    assert not_none(one.regret).value < 1.1, "the bound alone does not break the rule"


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (Interval(value=0.04, low=0.03, high=0.05), "held"),
        (Interval(value=0.01, low=0.00, high=0.015), "broke"),
        (Interval(value=0.03, low=0.01, high=0.05), "undecided"),
        (Interval(value=0.01, low=0.00, high=0.03), "undecided"),
        (Interval(value=0.04, low=None, high=None), "not_run"),
        (None, "not_run"),
    ],
)
def test_two_points_worse_is_shown_or_not(gap: Interval | None, verdict: str) -> None:
    assert of(audit(SPEC, base(), with_gap(gap)), Rule.GENERALISATION, 128).verdict == verdict


ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


def found(rule: Rule, tuned: Configuration, **default: Any) -> RuleFinding:
    spec = make_spec(
        space={**SPACE, "optimizer": {"name": "adamw"}, "ema_decay": [0.9, 0.99]}, default={**DEFAULT, **default}
    )
    return of(audited(*runs_of(tuned, 0.5, 0.6, 0.4, start=10), spec=spec), rule, tuned.batch_size)


def adamw(**parameters: Any) -> Configuration:
    return replace(TUNED, optimizer="adamw", parameters={**ADAM, "ema_decay": 0.99, **parameters})


def test_rules_about_adam_give_the_optimum_with_its_betas_and_averages_at_the_batch() -> None:
    for rule, expected in (
        (Rule.BETA_HALF_LIFE, {"beta1": 0.9, "beta2": 0.999**8}),
        (Rule.SDE, {"beta1": 0.2, "beta2": 0.992, "epsilon": 1e-8 / 8**0.5, "learning_rate": 0.1 * 8**0.5}),
        (Rule.EMA_HALF_LIFE, {"ema_decay": 0.99**8}),
    ):
        configuration = not_none(found(rule, adamw(), ema_decay=0.99).configuration)
        assert {name: configuration[name] for name in expected} == pytest.approx(expected)


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
    found = audited(
        make_trial(2, configuration=other, seconds=1.0),
        *runs_of(tuned, *tuned_seconds, start=10),
        *runs_of(other, *other_seconds, start=20, phase=Phase.AUDIT),
        spec=spec,
    )
    return of(found, Rule.LAYERWISE, size)


def test_the_belief_in_layerwise_rates_holds_where_one_loses_without_and_breaks_where_not() -> None:
    needed = layerwise((1.0, 1.2, 0.9), (0.5, 0.6, 0.45), best="lamb")
    assert (needed.verdict, needed.trial_numbers) == ("held", [20, 21, 22])
    assert needed.regret is not None and needed.regret.value == pytest.approx(2.0, rel=0.01)
    assert "adamw against lamb" in needed.reason
    assert layerwise((0.5, 0.6, 0.45), (1.0, 1.2, 0.9)).verdict == "broke"
    assert layerwise((0.5, 0.6, 0.45), (0.5, 0.7, 0.45)).verdict == "undecided"


def test_below_8192_samples_the_belief_is_undecided() -> None:
    one = layerwise((1.0, 1.2, 0.9), (0.5, 0.6, 0.45), 512, best="lamb")
    assert one.verdict == "undecided" and "≥ 8,192, not 512" in one.reason
    assert one.regret is not None and one.regret.value == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("size", "sgd", "adam", "state", "verdict"),
    [
        (128, 0.5, 1.0, TrialState.REACHED, "held"),
        (128, 1.0, 0.5, TrialState.REACHED, "broke"),
        (128, 0.5, 1.0, TrialState.DIVERGED, "held"),
        (256, 0.5, 1.0, TrialState.REACHED, "not_run"),
        (1024, 0.5, 1.0, TrialState.REACHED, "broke"),
        (1024, 1.0, 0.5, TrialState.REACHED, "held"),
    ],
)
def test_sgd_is_said_to_win_up_to_batch_128_and_adam_above_512(
    size: int, sgd: float, adam: float, state: TrialState, verdict: str
) -> None:
    seconds = {"sgd": sgd, "adamw": adam}
    tuned, other = (
        replace(TUNED, batch_size=size, micro_batch_size=size, optimizer=name, parameters=ADAM if name != "sgd" else {})
        for name in sorted(seconds, key=lambda one: seconds[one])
    )
    later = seconds[other.optimizer]
    spec = make_spec(
        space={**SPACE, "batch_size": [16, size], "optimizer": [{"name": "sgd"}, {"name": "adamw"}]},
        default={**DEFAULT, "optimizer": {"name": "sgd"}},
    )
    one = of(
        audited(
            make_trial(2, configuration=other, seconds=later),
            *runs_of(tuned, *(later / 2 * one for one in (1.0, 1.1, 0.9)), start=10),
            *runs_of(other, *(later * one for one in (1.0, 1.1, 0.9)), start=20, phase=Phase.AUDIT, state=state),
            spec=spec,
        ),
        Rule.SGD_OR_ADAM,
        size,
    )
    assert one.verdict == verdict
    if verdict != "not_run" and state is TrialState.REACHED:
        assert not_none(one.regret).value == pytest.approx(0.5 if verdict == "held" else 2.0)


def small_batch(
    *seconds: float, default: int = 16, confirmed: float | None = None, parameters: dict[str, Any] = ADAM
) -> RuleFinding:
    """Hold runs with one micro-batch per step against the optimum, which accumulates four.

    ``confirmed``: learning rate of the confirmed optimum at one micro-batch per step.
    """
    optimizer = {"name": "adamw"} if parameters else {"name": "sgd"}
    spec = make_spec(
        space={**SPACE, "batch_size": [default, 64], "max_micro_batch_size": 16, "optimizer": optimizer},
        default={**DEFAULT, "batch_size": default},
    )
    tuned = replace(
        TUNED, batch_size=64, micro_batch_size=16, accumulation_steps=4, parameters=parameters,
        optimizer=optimizer["name"],
    )  # fmt: skip
    near = replace(tuned, batch_size=16, accumulation_steps=1, learning_rate=confirmed or 0.15)
    given = replace(near, parameters={**parameters, "beta2": 0.999**0.25})
    found = audited(
        *runs_of(tuned, 1.0, 1.1, 0.9, start=10),
        *(runs_of(near, 5.0, 5.1, 4.9, start=30) if confirmed else ()),
        *runs_of(given, *seconds, start=20, phase=Phase.AUDIT),
        spec=spec,
    )
    return next(one for one in found.rules if one.rule is Rule.SMALL_BATCH)


@pytest.mark.parametrize("confirmed", [None, 0.07])
@pytest.mark.parametrize(("seconds", "verdict"), [((0.5, 0.55, 0.45), "held"), ((2.0, 2.2, 1.8), "broke")])
def test_accumulation_is_held_against_one_micro_batch_with_the_half_life_of_beta2(
    seconds: tuple[float, ...], verdict: str, confirmed: float | None
) -> None:
    one = small_batch(*seconds, confirmed=confirmed)
    assert (one.verdict, one.batch_size, one.trial_numbers) == (verdict, 16, [20, 21, 22])
    assert not_none(one.configuration)["learning_rate"] == pytest.approx(confirmed or 0.15)
    assert "batch 16 instead of 64" in one.reason


def test_without_accumulation_or_beta2_the_small_batch_is_not_run() -> None:
    for found, reason in (
        (small_batch(parameters={}), "is about Adam's betas"),
        (small_batch(default=32), "lacks the micro-batch size 16"),
        (of(judged([]), Rule.SMALL_BATCH), "with accumulation"),
    ):
        assert found.verdict == "not_run" and reason in found.reason


@pytest.mark.parametrize(
    ("from_scratch", "flat", "provisional", "verdict"),
    [
        (2048, [2048, 2048], False, "held"),
        (2048, [2048, 2048], True, "undecided"),
        (2048, [512, 2048], False, "undecided"),
        (512, [512, 1024], False, "broke"),
        (4096, [4096, 8192], False, "broke"),
        (8, [8, 8], False, "broke"),
        (4, [4, 4], False, "broke"),
        (9999, [9999, 9999], False, "broke"),
        (2048, [4, 2048], False, "undecided"),
        (2048, [2048, 9999], False, "undecided"),
    ],
)
def test_fine_tuning_is_compared_with_studies_from_scratch(
    from_scratch: int, flat: list[int], provisional: bool, verdict: str
) -> None:
    answer = answer_to_base().model_copy(update={"provisional": False})
    rows = [answer.batches[0].model_copy(update={"batch_size": size}) for size in (4, 128, 9999)]
    answer = answer.model_copy(update={"batches": rows})
    optimal = answer.optimal.model_copy(update={"batch_size": from_scratch})
    scratch = answer.model_copy(update={"optimal": optimal, "flat_range": flat, "provisional": provisional})
    spec = SPEC.from_preset("fine_tuning")
    (one,) = about_fine_tuning(spec, answer, {"long": scratch})
    assert answer.flat_range == [128, 128]
    assert (one.verdict, one.batch_size, not_none(one.regret).value) == (verdict, 128, from_scratch / 128)
    at_an_end = answer.model_copy(update={"batches": rows[1:]})
    if from_scratch < 2048:  # smaller batch sizes may be better for fine-tuning
        assert about_fine_tuning(spec, at_an_end, {"long": scratch})[0].verdict == "undecided"
    assert about_fine_tuning(spec, answer, {})[0].verdict == "not_run"
    assert about_fine_tuning(SPEC, answer, {"long": scratch})[0].verdict == "not_run"


def test_a_rule_without_runs_says_what_they_would_cost() -> None:
    assert of(judged([]), Rule.LINEAR_RATE).reason.endswith("about 3 train seconds for 3 runs")
    one_made = runs_of(replace(TUNED, learning_rate=0.8), 1.0, start=100, phase=Phase.AUDIT)
    assert of(judged(one_made), Rule.LINEAR_RATE).reason.endswith("about 2 train seconds for 2 runs")


def test_without_a_trial_of_the_other_kind_the_belief_is_not_run() -> None:
    assert "with lars or lamb reached the target" in found(Rule.LAYERWISE, adamw(), ema_decay=0.99).reason
