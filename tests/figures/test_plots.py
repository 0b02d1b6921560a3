"""The charts of a study's page show its answer and its records."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.growing import typical_run
from bssearch.analysis.objectives import TIME, objective_of
from bssearch.figures import plots
from bssearch.figures.page import StudyPicture
from bssearch.figures.svg import (
    PADDING,
    Chart,
    Series,
    batch_axis,
    linear_ticks,
    round_numbers,
    sequence_colour,
    short_name,
    value_axis,
)
from bssearch.records import (
    BatchSchedule,
    Configuration,
    GradientNoise,
    LearningRateRule,
    Observation,
    Phase,
    Stage,
    StudyRecord,
    TrialRecord,
    TrialState,
    with_batch_schedule,
)
from bssearch.records.text import number
from bssearch.spec import StudySpec
from tests.factories import (
    EPOCH,
    make_curve,
    make_environment,
    make_probe,
    make_spec,
    make_trial,
    not_none,
    with_outcome,
)
from tests.records.test_batch_schedule import milestones

SIZES = (8, 16, 32, 64, 128)
S_MIN, B_CRIT = 50, 32
NOISE = (0.97, 1.0, 1.04)


def study_of(spec: StudySpec, **environment: Any) -> StudyRecord:
    return StudyRecord.created(spec.new_study("test"), EPOCH, make_environment(**environment))


def law_trials(sizes: Sequence[int] = SIZES, **changes: Any) -> list[TrialRecord]:
    """Three confirmation runs at each batch size on the law; a step takes 10 ms + 0.2 ms a sample."""
    trials: list[TrialRecord] = []
    for size in sizes:
        for seed, factor in enumerate(NOISE):
            steps = round(S_MIN * (1 + B_CRIT / size)) * factor
            trials.append(
                make_trial(
                    len(trials),
                    batch_size=size,
                    phase=Phase.CONFIRM,
                    seed=seed,
                    steps=round(steps),
                    seconds=steps * (0.01 + 0.0002 * size),
                    learning_rate=0.1 * math.sqrt(size / 32),
                    **changes,
                )
            )
    return trials


def answer_of(trials: Sequence[TrialRecord], spec: StudySpec | None = None) -> Answer:
    spec = spec or make_spec()
    probes = {size: make_probe(size, step_seconds=0.01 + 0.0002 * size) for size in SIZES}
    return build_answer(study_of(spec), spec, trials, probes)


@pytest.fixture(scope="module")
def answer() -> Answer:
    return answer_of(law_trials())


def named(chart: Chart | None, name: str) -> Series:
    (found,) = [series for series in not_none(chart).series if name in series.name]
    return found


def names(chart: Chart | None) -> list[str]:
    return [series.name for series in not_none(chart).series]


def xs(series: Series) -> list[float]:
    return [point.x for point in series.points]


def ys(series: Series) -> list[float]:
    return [point.y for point in series.points]


def all_charts(answer: Answer, trials: Sequence[TrialRecord], spec: StudySpec) -> Iterator[Chart | None]:
    curves = {size: make_curve((0.0, 0.1), (0.5, 0.8), (1.0, 0.9), batch_size=size) for size in SIZES}
    yield plots.objective_chart(answer, spec.default.batch_size)
    yield plots.time_chart(answer)
    yield plots.steps_chart(answer)
    yield plots.samples_chart(answer)
    yield plots.front_chart(answer, priced=False)
    yield plots.curves_chart(answer, curves)
    yield plots.learning_rate_chart(trials, objective_of(spec), spec.default_configuration)
    yield plots.throughput_chart(answer)
    yield plots.memory_chart(answer)


def trained_to_its_limit(trial: TrialRecord) -> TrialRecord:
    return with_outcome(trial, train_seconds=trial.train_seconds_limit)


def test_the_law_spans_the_batch_sizes_that_reached_the_target(answer: Answer) -> None:
    law = named(plots.objective_chart(answer), "law × step time")
    assert answer.fit is not None and law.dash == "solid"
    assert (xs(law)[0], xs(law)[-1]) == pytest.approx((8, 128))
    at_128 = answer.fit.s_min * (1 + answer.fit.b_crit.estimate / 128) * (0.01 + 0.0002 * 128)
    assert ys(law)[-1] == pytest.approx(at_128)
    shorter = named(plots.objective_chart(answer_of(law_trials(SIZES[:4]))), "law × step time")
    assert max(xs(shorter)) == pytest.approx(64)


def test_a_law_of_too_few_batch_sizes_is_not_drawn(answer: Answer) -> None:
    few = answer_of(law_trials((8, 16)))
    assert few.fit is not None and few.fit.verdict == "too_few_points"
    for without in (few, answer.model_copy(update={"fit": None})):
        for chart in (plots.objective_chart(without), plots.steps_chart(without), plots.samples_chart(without)):
            assert not any("law" in name for name in names(chart))


@pytest.mark.parametrize(("state", "symbol"), [(TrialState.REACHED, "diamond"), (TrialState.EXHAUSTED, "arrow")])
def test_the_default_is_a_diamond_or_an_arrow_if_it_missed_the_target(state: TrialState, symbol: str) -> None:
    trial = make_trial(99, configuration=make_spec().default_configuration, state=state, seconds=9.0)
    ran = answer_of([*law_trials(), trial])
    mark = named(plots.objective_chart(ran, 32), "your default")
    assert (xs(mark), mark.symbol) == ([32], symbol)
    assert ys(mark) == pytest.approx([9.0])
    assert not any("your default" in name for name in names(plots.objective_chart(ran)))


def test_a_default_that_missed_the_target_takes_more_samples_not_longer() -> None:
    default = make_spec().default_configuration
    trial = make_trial(99, configuration=default, state=TrialState.EXHAUSTED, seconds=9.0, last_miss_step=10_000)
    ran = answer_of([*law_trials(), trial], make_spec(objective="samples_to_target"))
    assert named(plots.objective_chart(ran, 32), "your default").name == "your default (lower bound)"


def labels(chart: Chart | None, name: str) -> set[str]:
    return {point.label for point in named(chart, name).points}


def test_a_single_search_trial_is_drawn_apart_from_confirmed_batch_sizes(answer: Answer) -> None:
    best = answer.optimal.batch_size
    rows = [row.model_copy(update={"confirmed": row.batch_size == best}) for row in answer.batches]
    front = [one.model_copy(update={"on_front": one.batch_size == best}) for one in answer.front]
    chart = plots.front_chart(answer.model_copy(update={"batches": rows, "front": front}), priced=False)
    assert labels(chart, "single search trial") == {str(one.batch_size) for one in front} - {str(best)}
    assert not any("beaten" in name for name in names(chart))


def test_each_batch_size_has_the_curve_of_its_best_run_or_the_nearest_one() -> None:
    trials = [
        make_trial(0, batch_size=32, seconds=2.0),
        make_trial(1, batch_size=32, seconds=1.0),
        make_trial(2, batch_size=8, state=TrialState.CAPPED, best_metric=0.5),
        make_trial(3, batch_size=8, state=TrialState.CAPPED, best_metric=0.7),
        make_trial(4, batch_size=16, state=TrialState.FAILED, best_metric=None),
    ]
    assert plots.curve_trials(answer_of(trials), trials) == {8: 3, 32: 1}
    low = {"metric": "loss", "value": 0.9, "goal": "minimize"}
    assert plots.curve_trials(answer_of(trials, make_spec(target=low)), trials)[8] == 2


def long_curve(points: int) -> list[Observation]:
    return make_curve(*((float(n), math.nan if n == 7 else n / points) for n in range(points)))


def test_thinned_curves_keep_their_last_point(answer: Answer) -> None:
    chart = not_none(plots.curves_chart(answer, {32: long_curve(5000), 64: long_curve(20), 16: []}))
    thinned, whole = named(chart, "32"), named(chart, "64")
    assert len(thinned.points) == plots.CURVE_POINTS
    assert (xs(thinned)[0], xs(thinned)[-1]) == (1.0, 4999.0)
    assert len(whole.points) == 18  # without step 0 and the metric that is NaN
    assert all(map(math.isfinite, ys(whole)))
    assert [rule.at for rule in chart.rules] == [0.9]


def test_a_single_evaluation_is_no_line_and_a_circle_while_the_trial_runs(answer: Answer) -> None:
    curve = make_curve((0.0, 0.1), (1.0, 0.9))
    assert plots.curves_chart(answer, {32: curve, 16: []}) is None
    recent = named(plots.recent_curves_chart(study_of(make_spec()).target, [(make_trial(7), curve)]), "trial 7")
    assert (recent.symbol, xs(recent)) == ("circle", [1.0])
    drawn = plots.curves_chart(answer, {32: make_curve((0.0, 0.1), (1.0, 0.9), (2.0, 0.95))})
    assert xs(named(drawn, "32")) == [1.0, 2.0]


def rates(trials: Sequence[TrialRecord], default: Configuration | None = None) -> Chart | None:
    return plots.learning_rate_chart(trials, TIME, default)


def test_the_map_shows_trials_by_how_they_ended() -> None:
    states = {
        TrialState.REACHED: "reached the target",
        TrialState.PRUNED: "stopped",
        TrialState.PAUSED: "stopped",
        TrialState.CAPPED: "stopped",
        TrialState.EXHAUSTED: "stopped",
        TrialState.DIVERGED: "diverged",
        TrialState.OOM: "out of memory",
    }
    trials = [make_trial(n, state=state, learning_rate=0.01 * (n + 1)) for n, state in enumerate(TrialState)]
    chart = not_none(rates(trials))
    for trial in trials:
        if (name := states.get(trial.state)) is not None:
            assert trial.configuration.learning_rate in ys(named(chart, name))
    assert sum(len(series.points) for series in chart.series) == len(states)


def test_colours_follow_the_logarithm_and_the_best_is_on_top() -> None:
    chart = rates([make_trial(0, seconds=1.0), make_trial(1, seconds=100.0), make_trial(2, seconds=10.0)])
    assert [point.colour for point in named(chart, "reached").points] == [sequence_colour(at) for at in (1, 0.5, 0)]
    assert chart is not None and chart.colours is not None
    assert {text: share for share, text in chart.colours.ticks}["10"] == pytest.approx(0.5)
    equal = rates([make_trial(0, seconds=2.0), make_trial(1, seconds=2.0)])
    assert {point.colour for point in named(equal, "reached").points} == {sequence_colour(0)}


def test_an_unknown_learning_rate_is_not_drawn() -> None:
    unknown = Configuration(batch_size=8, micro_batch_size=8, learning_rate=1.0, parameters={"learning_rate": None})
    assert rates([make_trial(0, configuration=unknown)]) is None


@pytest.mark.parametrize(
    ("peak", "shown", "unit", "limits"),
    [(6 * 2**30, 6.0, "GiB", [8.0]), (2 * 2**30, 2.0, "GiB", [8.0]), (2**28, 256.0, "MiB", [])],
)
def test_memory_is_shown_beside_the_devices_if_it_comes_near(
    peak: int, shown: float, unit: str, limits: list[float]
) -> None:
    chart = not_none(plots.memory_chart(answer_of(law_trials(peak_memory_bytes=peak))))
    assert ys(chart.series[0]) == [shown] * len(SIZES)
    assert [rule.at for rule in chart.rules] == limits
    assert (chart.y.low, chart.y.high > max([shown, *limits]), unit in chart.y.title) == (0.0, True, True)


def test_names_of_users_are_cut_and_on_one_line() -> None:
    assert short_name("<b>a & b</b>\n c") == "<b>a & b</b> c"
    assert len(short_name("x" * 1000)) == 40
    assert short_name("x" * 40) == "x" * 40 != short_name("x" * 41)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.0, "1"),
        (0.23456, "0.235"),
        (999.4, "999"),
        (999.7, "1,000"),
        (12345.6, "12,300"),
        (-4096, "-4,100"),
        (2e-5, "2e-05"),
        (3.21e12, "3.21e+12"),
    ],
)
def test_numbers_have_three_digits_and_no_needless_exponent(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((0.9, 120.0), [1, 10, 100]),
        ((0.9, 12.0), [1, 3, 10]),
        ((1.0, 100.0), [1, 10, 100]),
        ((1e-9, 1e7), [1e-9, 1e-7, 1e-5, 1e-3, 1e-1, 1e1, 1e3, 1e5, 1e7]),
        ((1.0, 1e8), [10**power for power in range(9)]),
        ((2.0, 7.0), [2, 3, 4, 5, 7]),
        ((4.05, 4.39), [4.1, 4.2, 4.3]),
        ((3.01, 3.02), [3.01, 3.02]),
    ],
)
def test_a_logarithmic_axis_has_three_to_nine_round_numbers(ends: tuple[float, float], ticks: list[float]) -> None:
    assert round_numbers(*ends) == pytest.approx(ticks)
    axis = value_axis("", ends, log=True, room=0.0)
    assert (axis.low, axis.high) == pytest.approx((ends[0] / 10**0.04, ends[1] * 10**0.04))
    assert list(axis.ticks) == [(tick, number(tick)) for tick in round_numbers(axis.low, axis.high)]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.0, 10.0, ["0", "2", "4", "6", "8", "10"]),
        (-0.11, 0.12, ["−0.10", "−0.05", "0.00", "0.05", "0.10"]),
        (0.0, 42_000.0, ["0", "10,000", "20,000", "30,000", "40,000"]),
        (0.973, 1.006, ["0.975", "0.980", "0.985", "0.990", "0.995", "1.000", "1.005"]),
    ],
)
def test_a_linear_axis_has_round_numbers(low: float, high: float, shown: list[str]) -> None:
    assert [text for _, text in linear_ticks(low, high)] == shown


@pytest.mark.parametrize(
    ("values", "log", "ends"),
    [
        ([1.0, 3.0], False, (1.0 - 2 * PADDING, 3.0 + 2 * PADDING)),
        ([0.0, 3.0], False, (0.0, 3.0 + 3 * PADDING)),
        ([5.0, 5.0], False, (5.0 - 5 * PADDING, 5.0 + 5 * PADDING)),
        ([0.0], False, (0.0, PADDING)),
        ([1.0, 1e4], True, (10 ** (-4 * PADDING), 10 ** (4 + 4 * PADDING))),
        ([10.0, 0.0, -1.0, math.inf], True, (10**0.96, 10**1.04)),  # the positive, finite values
    ],
)
def test_axes_leave_room_at_both_ends_unless_they_start_at_zero(
    values: list[float], log: bool, ends: tuple[float, float]
) -> None:
    axis = value_axis("", values, log=log)
    assert (axis.low, axis.high) == pytest.approx(ends)
    assert batch_axis([8, 2**20]).low == pytest.approx(8 / 2 ** (17 * PADDING))


# Growing batches ------------------------------------------------------------------------------------------------------


BASE = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1)
PLANNED = milestones((0, 32), (640, 64, 32), (1600, 128))
BY_NOISE = BatchSchedule(
    name="noise_scale",
    stages=(Stage(0, 32, 32), Stage(0, 64, 64), Stage(0, 128, 128)),
    rate_rule=LearningRateRule.SQRT,
    noise_share=0.5,
)
CURVE = [(0, 0, 0.0), (20, 640, 0.2), (35, 1600, 0.5), (40, 2240, 0.6)]
SPEC = make_spec()
PROBES = {size: make_probe(size, step_seconds=0.01 + 0.0002 * size) for size in SIZES}


def grown(schedule: BatchSchedule, first: int, *, runs: int = 3, steps: int = 40, **changes: Any) -> list[TrialRecord]:
    """Search trial of a schedule, and its repeats with the confirmation's seeds."""
    trials = [
        make_trial(
            first + place,
            configuration=with_batch_schedule(BASE, schedule),
            phase=phase,
            seed=place - 1,
            steps=steps + place,
            seconds=0.6 + 0.01 * place,
            samples=2240,
            **changes,
        )
        for place, phase in enumerate([Phase.GROWTH] + runs * [Phase.AUDIT])
    ]
    return [with_outcome(trial, steps=40) for trial in trials]


def curve(points: Sequence[tuple[int, int, float]] = CURVE) -> list[Observation]:
    rates = {0: 0.1, 20: 0.1, 35: 0.1 * 2**0.5, 40: 0.2}
    return [
        Observation(step=step, samples=samples, train_seconds=at, metric=0.5, loss=None, learning_rate=rates[step])
        for step, samples, at in points
    ]


def picture(schedule: BatchSchedule = PLANNED, **changes: Any) -> StudyPicture:
    trials = law_trials(noise=GradientNoise(scale=90.0, low=50.0, high=200.0, passes=9, trace=90.0, square=1.0))
    trials += grown(schedule, len(trials), **changes)
    answer = build_answer(study_of(SPEC), SPEC, trials, PROBES)
    run = not_none(typical_run(not_none(answer.batch_schedule), trials))
    best = answer.optimal.batch_size
    return StudyPicture(
        study=study_of(SPEC),
        spec=SPEC,
        answer=answer,
        trials=trials,
        curves={best: [replace(one, samples=one.step * best, learning_rate=0.3) for one in curve()]},
        grown=(run, curve()),
    )


def test_a_trial_whose_batch_grows_does_not_count_for_its_first_batch_size() -> None:
    found = picture()
    first = with_batch_schedule(replace(BASE, batch_size=48, micro_batch_size=48), milestones((0, 48), (480, 96)))
    trials = [*found.trials, make_trial(99, configuration=first, phase=Phase.GROWTH)]
    assert plots.curve_trials(found.answer, trials) == plots.curve_trials(found.answer, found.trials)


def test_growing_batches_change_neither_the_law_nor_the_rows_of_the_batch_sizes() -> None:
    found = picture()
    alone = build_answer(study_of(SPEC), SPEC, [one for one in found.trials if not one.configuration.grows], PROBES)
    assert alone.batch_schedule is None
    same = {"fit", "batches", "optimal", "front"}
    assert found.answer.model_dump(include=same) == alone.model_dump(include=same)
