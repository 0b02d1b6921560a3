"""The rules of thumb that what was measured settles: memory, noise scale, generalisation, accumulation."""

import math
from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.rules.audit import (
    RuleFinding,
    about_accumulation,
    about_epochs,
    about_generalisation,
    about_memory,
    about_noise_scale,
    command,
    is_result,
    learning_rate_slope,
    runs_of,
    tuned_optima,
)
from bssearch.analysis.rules.rule_book import CHANGED_PARAMETER, NONE, RULES, Rule
from bssearch.analysis.shape import Interval
from bssearch.records import FROM_90_TO_95, LARGEST_DROPOUT, WARMUP_RATIO, Configuration, Phase, StepTime, TrialState
from bssearch.spec import IMPORTED, MemoryBoundary, SearchSpace
from tests.analysis.test_rules import (
    AT_32,
    DEFAULT,
    SPACE,
    SPEC,
    TUNED,
    answer_to_base,
    base,
    runs_of as made_runs,
    with_gap,
    with_law,
)
from tests.factories import make_spec, make_trial, not_none

TRIALS = base()


@pytest.fixture
def answer() -> Answer:
    return answer_to_base()


def of_memory(answer: Answer, fits: int, too_large: int | None = None, samples: int | None = None) -> RuleFinding:
    return about_memory(
        SPEC, answer, tuned_optima(SPEC, TRIALS), {}, MemoryBoundary(fits=fits, too_large=too_large), samples
    )


@pytest.mark.parametrize(("fits", "size"), [(40, 32), (79, 32), (80, 32), (81, None), (159, None), (160, 128)])
def test_a_batch_size_stands_for_80_percent_of_memory_up_to_an_octave_below(
    answer: Answer, fits: int, size: int | None
) -> None:
    found = of_memory(answer, fits, fits + 1)
    assert found.batch_size == size
    assert (found.verdict == "not_run") is (size is None)


@pytest.mark.parametrize(("samples", "is_known"), [(None, False), (40, True), (39, True), (41, False)])
def test_what_never_ran_out_fills_memory_only_where_it_is_the_whole_training_part(
    answer: Answer, samples: int | None, is_known: bool
) -> None:
    assert (of_memory(answer, 40, samples=samples).verdict != "not_run") is is_known


def test_the_optimum_itself_fills_memory_as_well_as_it_can(answer: Answer) -> None:
    found = of_memory(answer, 170, 171)
    assert (found.verdict, found.regret, found.trial_numbers) == ("held", NONE, [10, 11, 12])
    slower = of_memory(answer, 40, 41)
    assert slower.regret is not None and slower.regret.value == pytest.approx(2.0, rel=0.1)
    assert slower.trial_numbers == [20, 21, 22]


def test_a_batch_size_without_confirmation_is_not_compared(answer: Answer) -> None:
    searched = [replace(one, phase=Phase.SEARCH) if one.configuration == AT_32 else one for one in TRIALS]
    optima = {**tuned_optima(SPEC, TRIALS), 32: tuned_optima(SPEC, searched[-1:])[32]}
    found = about_memory(SPEC, answer, optima, {}, MemoryBoundary(fits=40, too_large=41), None)
    assert (found.batch_size, found.verdict) == (32, "not_run")


def verdict(
    noise: dict[str, Any], b_crit: tuple[float, float | None, float | None], optimizer: str = "sgd"
) -> RuleFinding:
    found = with_law(noise, b_crit)
    parameters = {**found.optimal.parameters, "optimizer": optimizer}
    return about_noise_scale(
        SPEC, found.model_copy(update={"optimal": found.optimal.model_copy(update={"parameters": parameters})})
    )


EXACT = (100.0, 100.0, 100.0)


@pytest.mark.parametrize(
    ("scale", "finding"),
    [
        (125.0, "undecided"),
        (100.0, "held"),
        (200.0, "undecided"),
        (201.0, "broke"),
        (50.0, "undecided"),
        (49.0, "broke"),
    ],
)
def test_exact_estimates_are_equal_within_a_quarter_and_apart_beyond_twice(scale: float, finding: str) -> None:
    assert verdict({"scale": scale, "low": scale, "high": scale}, EXACT).verdict == finding


@pytest.mark.parametrize(("scale", "low", "high"), [(110.0, 105.0, 115.0), (90.0, 85.0, 95.0)])
def test_intervals_that_do_not_meet_are_not_equal(scale: float, low: float, high: float) -> None:
    assert verdict({"scale": scale, "low": low, "high": high}, (100.0, 98.0, 102.0)).verdict == "undecided"
    assert verdict({"scale": scale, "low": low, "high": high}, (100.0, 95.0, 105.0)).verdict == "held"


@pytest.mark.parametrize(
    ("optimizer", "adam_low", "ratio"), [("adamw", 250.0, 3.0), ("sgd", 250.0, 1.0), ("adamw", None, 1.0)]
)
def test_under_adamw_the_noise_scale_is_that_of_preconditioned_gradients(
    optimizer: str, adam_low: float | None, ratio: float
) -> None:
    noise = {"scale": 100.0, "low": 90.0, "high": 110.0, "adam_scale": 300.0, "adam_low": adam_low, "adam_high": 350.0}
    found = verdict(noise, (100.0, 90.0, 110.0), optimizer)
    assert found.regret is not None and found.regret.value == pytest.approx(ratio)
    assert found.verdict == ("broke" if ratio == 3.0 else "held")


def test_a_noise_scale_with_a_lower_bound_alone_bounds_the_ratio_from_below() -> None:
    regret = not_none(verdict({"low": 300.0}, (100.0, 90.0, 120.0)).regret)
    assert regret.value == pytest.approx(3.0)
    assert (regret.low, regret.high, regret.at_least) == (2.5, None, True)
    unbounded = verdict({"low": 300.0}, (100.0, 90.0, None)).regret
    assert unbounded is not None and unbounded.low is None
    nothing = verdict({"low": 0.0}, (100.0, 90.0, 120.0))
    assert (nothing.verdict, nothing.regret) == ("undecided", None)


def test_the_errors_of_both_are_added_each_to_its_side() -> None:
    regret = not_none(verdict({"scale": 100.0, "low": 50.0, "high": 400.0}, (100.0, 40.0, 110.0)).regret)
    below = math.hypot(math.log(2), FROM_90_TO_95 * math.log(1.1))
    above = math.hypot(math.log(4), FROM_90_TO_95 * math.log(2.5))
    assert (regret.low, regret.high) == pytest.approx((math.exp(-below), math.exp(above)))


@pytest.mark.parametrize(("low", "high"), [(None, 110.0), (90.0, None)])
def test_a_critical_batch_size_open_on_one_side_leaves_the_ratio_open_there(
    low: float | None, high: float | None
) -> None:
    regret = not_none(verdict({"scale": 100.0, "low": 95.0, "high": 105.0}, (100.0, low, high)).regret)
    assert (regret.low is None, regret.high is None) == (high is None, low is None)


def timed(
    micro: int, seconds: float | None, low: float | None = None, high: float | None = None, **more: Any
) -> StepTime:
    return StepTime(
        batch_size=128, micro_batch_size=micro, step_seconds=seconds, evaluation_seconds=0.1, steps_timed=9,
        peak_memory_bytes=None, step_seconds_low=low, step_seconds_high=high, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "finding"),
    [
        (1.5, 2.0, "held"),
        (1.49, 2.0, "undecided"),
        (1.5, 2.01, "undecided"),
        (1.2, 1.49, "broke"),
        (1.2, 1.5, "undecided"),
        (2.01, 2.5, "broke"),
        (2.0, 2.5, "undecided"),
    ],
)
def test_what_accumulation_costs_lies_within_the_rules_factors_or_outside(
    low: float, high: float, finding: str
) -> None:
    (found,) = about_accumulation(SPEC, [timed(128, 1.0, 1.0, 1.0), timed(32, (low + high) / 2, low, high)])
    assert found.verdict == finding
    assert (not_none(found.regret).low, not_none(found.regret).high) == (low, high)


@pytest.mark.parametrize(("ratio", "finding"), [(1.75, "held"), (1.2, "broke"), (2.0, "undecided"), (3.0, "broke")])
def test_four_times_the_batch_is_said_to_take_up_to_twice_the_epochs(ratio: float, finding: str) -> None:
    trials = [
        make_trial(
            10 * size + seed,
            batch_size=size,
            seconds=1.0,
            steps=round(factor * 100_000 / size * (1 + 0.02 * seed)),
            seed=seed,
            phase=Phase.CONFIRM,
        )
        for size, factor in ((32, 1.0), (128, ratio))
        for seed in range(4)
    ]
    (found,) = about_epochs(SPEC, tuned_optima(SPEC, trials))
    assert (found.batch_size, found.verdict) == (128, finding)
    assert found.regret is not None and found.regret.value == pytest.approx(ratio, rel=1e-2)
    (alone,) = about_epochs(SPEC, tuned_optima(SPEC, trials[:4]))
    assert alone.verdict == "not_run"


def test_the_interval_of_a_cost_is_from_the_ends_that_lie_farthest_apart() -> None:
    (found,) = about_accumulation(SPEC, [timed(128, 1.0, 0.8, 1.25), timed(32, 2.0, 1.5, 2.4)])
    assert found.regret is not None
    assert (found.regret.low, found.regret.value, found.regret.high) == pytest.approx((1.5 / 1.25, 2.0, 2.4 / 0.8))
    (bare,) = about_accumulation(SPEC, [timed(128, 1.0), timed(32, 2.0)])
    assert not_none(bare.regret).low == not_none(bare.regret).high == 2.0


def test_the_smallest_micro_batches_tell_and_those_timed_alone_come_first() -> None:
    whole, split = timed(128, 1.0), timed(32, 1.7)
    (smallest,) = about_accumulation(SPEC, [whole, timed(64, 9.0), split])
    assert not_none(smallest.regret).value == 1.7
    (alone,) = about_accumulation(
        SPEC, [timed(128, 5.0, contended=True), timed(32, 50.0, contended=True), whole, split]
    )
    assert not_none(alone.regret).value == 1.7
    for one in ([timed(128, None), split], [timed(128, 1.0, contended=True), split]):
        (untold,) = about_accumulation(SPEC, one)
        assert untold.verdict == "not_run"


@pytest.mark.parametrize(
    ("low", "high", "finding"), [(0.02, 0.05, "undecided"), (0.0, 0.02, "undecided"), (0.021, 0.05, "held")]
)
def test_a_gap_of_exactly_two_points_is_neither_more_nor_less(low: float, high: float, finding: str) -> None:
    found = about_generalisation(SPEC, with_gap(Interval(value=0.02, low=low, high=high)))
    assert (found.verdict, found.trial_numbers) == (finding, [128])


def test_an_imported_study_is_told_no_command() -> None:
    assert command(SPEC, "probe noise") == "; run `bssearch probe noise toy`"
    assert command(make_spec(space=SPACE, default=DEFAULT, workload=IMPORTED), "probe noise") == ""


# The runs of a rule ---------------------------------------------------------------------------------------------------


def test_each_seed_of_a_configuration_counts_once_and_its_confirmation_first() -> None:
    confirmed = made_runs(TUNED, 1.0, 1.1, start=10)
    audited = made_runs(TUNED, 2.0, 2.1, 2.2, start=20, phase=Phase.AUDIT)
    searched = [make_trial(1, configuration=TUNED, seed=9)]
    assert [one.number for one in runs_of(SPEC, [*searched, *audited, *confirmed], TUNED)] == [10, 11, 22]


@pytest.mark.parametrize(
    ("state", "limit", "counts"),
    [
        (TrialState.REACHED, 1.0, True),
        (TrialState.DIVERGED, 1.0, True),
        (TrialState.EXHAUSTED, SPEC.budget.trial_train_seconds, True),
        (TrialState.EXHAUSTED, SPEC.budget.trial_train_seconds - 0.1, False),
        (TrialState.FAILED, 100.0, False),
        (TrialState.OOM, 100.0, False),
        (TrialState.RUNNING, 100.0, False),
    ],
)
def test_a_run_counts_that_ended_by_itself_or_had_the_whole_limit(
    state: TrialState, limit: float, counts: bool
) -> None:
    assert is_result(SPEC, replace(make_trial(1, state=state), train_seconds_limit=limit)) is counts


def test_a_learning_rate_that_the_space_fixes_has_no_slope(answer: Answer) -> None:
    rows = [
        row.model_copy(update={"batch_size": 2**place, "untuned": False, "best": answer.batches[-1].best})
        for place, row in enumerate(answer.batches[:3])
    ]
    level = answer.model_copy(update={"batches": rows})
    slope = not_none(learning_rate_slope(SPEC, level))
    assert slope.excludes == [0.5, 1.0]
    assert slope.estimate == pytest.approx(0.0)
    assert learning_rate_slope(make_spec(space={**SPACE, "learning_rate": 0.1}, default=DEFAULT), level) is None
    assert learning_rate_slope(SPEC, level.model_copy(update={"batches": rows[:2]})) is None


# The rules as the answer has them -------------------------------------------------------------------------------------


BOOK_SPACE = SearchSpace.model_validate({"batch_size": [16, 256], "learning_rate": 0.1, "warmup_epochs": [0.0, 1.0]})
NO_WARMUP = SearchSpace.model_validate({"batch_size": [16, 256], "learning_rate": 0.1})
BASE = Configuration(
    batch_size=16, micro_batch_size=16, learning_rate=0.1, weight_decay=1e-4, dropout=0.1, optimizer="adamw"
)
BOOK_TUNED = replace(
    BASE, batch_size=256, micro_batch_size=256, learning_rate=0.3, weight_decay=1e-3, dropout=0.2, warmup_epochs=1.0
)


def given(rule: Rule, base: dict[str, Any] | None = None, tuned: dict[str, Any] | None = None) -> Configuration | str:
    return RULES[rule](BOOK_SPACE, replace(BASE, **(base or {})), replace(BOOK_TUNED, **(tuned or {})))


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Rule.LINEAR_RATE, 1.6),
        (Rule.SQRT_RATE, 0.4),
        (Rule.WARMUP, 0.0),
        (Rule.WEIGHT_DECAY, 4e-4),
        (Rule.TIMESCALE, 1e-4 * 16 / 3),
        (Rule.DROPOUT, 0.4),
    ],
)
def test_a_rule_changes_one_parameter_of_the_optimum_by_the_ratio_of_the_batch_sizes(rule: Rule, value: float) -> None:
    found = given(rule)
    assert isinstance(found, Configuration)
    name = CHANGED_PARAMETER[rule]
    assert getattr(found, name) == pytest.approx(value)
    assert replace(found, **{name: getattr(BOOK_TUNED, name)}) == BOOK_TUNED


def test_every_rule_that_gives_a_configuration_says_which_parameter_it_changes() -> None:
    assert set(CHANGED_PARAMETER) == {*RULES, Rule.LAYERWISE, Rule.SGD_OR_ADAM, Rule.SMALL_BATCH} - {Rule.SDE}


@pytest.mark.parametrize("rule", [Rule.LINEAR_RATE, Rule.SQRT_RATE, Rule.WEIGHT_DECAY, Rule.TIMESCALE])
def test_what_depends_on_the_optimizer_is_not_carried_from_one_to_another(rule: Rule) -> None:
    assert isinstance(given(rule, {"optimizer": "sgd"}), str)
    assert isinstance(given(rule, tuned={"optimizer": "sgd"}), str)


def test_the_timescale_is_adamws() -> None:
    assert isinstance(given(Rule.TIMESCALE, {"optimizer": "sgd"}, {"optimizer": "sgd"}), str)
    assert isinstance(given(Rule.WEIGHT_DECAY, {"optimizer": "sgd"}, {"optimizer": "sgd"}), Configuration)


@pytest.mark.parametrize(
    ("rule", "without"),
    [
        (Rule.WEIGHT_DECAY, {"weight_decay": 0.0}),
        (Rule.TIMESCALE, {"weight_decay": 0.0}),
        (Rule.DROPOUT, {"dropout": 0.0}),
    ],
)
def test_what_the_default_has_not_cannot_be_scaled(rule: Rule, without: dict[str, float]) -> None:
    assert isinstance(given(rule, without), str)
    assert isinstance(given(rule, tuned=without), Configuration), "the optimum may be without"


@pytest.mark.parametrize(("ratio", "is_about"), [(WARMUP_RATIO, True), (WARMUP_RATIO - 1, False)])
def test_a_warmup_is_advised_from_its_ratio_on(ratio: int, is_about: bool) -> None:
    found = given(Rule.WARMUP, tuned={"batch_size": ratio * 16, "micro_batch_size": ratio * 16})
    assert isinstance(found, Configuration) is is_about


def test_there_is_no_warmup_to_do_without_where_neither_the_space_nor_the_optimum_has_one() -> None:
    without = replace(BOOK_TUNED, warmup_epochs=0.0)
    assert isinstance(RULES[Rule.WARMUP](NO_WARMUP, BASE, without), str)
    assert RULES[Rule.WARMUP](BOOK_SPACE, BASE, without) == without
    assert RULES[Rule.WARMUP](NO_WARMUP, BASE, BOOK_TUNED) == without


def test_no_rule_asks_for_so_much_dropout_that_nothing_trains() -> None:
    found = given(Rule.DROPOUT, {"dropout": 0.5})
    assert isinstance(found, Configuration) and found.dropout == LARGEST_DROPOUT


@pytest.mark.parametrize("rule", list(RULES))
def test_a_parameter_that_imported_runs_do_not_say_is_no_ground_for_a_rule(rule: Rule) -> None:
    unknown = {"parameters": {CHANGED_PARAMETER.get(rule, "learning_rate"): None}}
    assert isinstance(given(rule, unknown), str)
    assert isinstance(given(rule, tuned=unknown), str)
