"""What the figures of a study's page show is what its answer and its records say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from bssearch import registry
from bssearch.analysis.answer import Answer
from bssearch.analysis.numbers import number
from bssearch.analysis.objectives.base import objective_of
from bssearch.analysis.objectives.time_to_target import TIME
from bssearch.analysis.report import build_answer
from bssearch.pages import plots, trial_plots
from bssearch.pages.axes import PADDING, Figure, batch_axis, label, round_numbers, value_axis
from bssearch.records import (
    Configuration,
    Observation,
    Phase,
    StudyRecord,
    TrialRecord,
    TrialState,
)
from bssearch.spec import StudySpec
from tests.factories import EPOCH, make_curve, make_environment, make_probe, make_spec, make_trial

SIZES = (8, 16, 32, 64, 128)
S_MIN, B_CRIT = 50, 32
NOISE = (0.97, 1.0, 1.04)


def study_of(spec: StudySpec, **environment: Any) -> StudyRecord:
    return StudyRecord.created(spec.new_study("test"), EPOCH, make_environment(**environment))


def steps_at(size: int) -> int:
    return round(S_MIN * (1 + B_CRIT / size))


def law_trials(sizes: Sequence[int] = SIZES, **changes: Any) -> list[TrialRecord]:
    """Return three confirmation runs at each batch size on the law, with a step of 10 ms + 0.2 ms a sample."""
    trials: list[TrialRecord] = []
    for size in sizes:
        for seed, factor in enumerate(NOISE):
            steps = steps_at(size) * factor
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


def named(figure: Figure | None, name: str) -> dict[str, Any]:
    assert figure is not None
    found: list[dict[str, Any]] = [trace for trace in figure["data"] if name in trace.get("name", "")]
    assert len(found) == 1, [trace.get("name") for trace in figure["data"]]
    return found[0]


def names(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [trace["name"] for trace in figure["data"]]


def all_figures(answer: Answer, trials: Sequence[TrialRecord], spec: StudySpec) -> Iterator[Figure | None]:
    curves = {size: make_curve((0.0, 0.1), (0.5, 0.8), (1.0, 0.9), batch_size=size) for size in SIZES}
    yield plots.objective_figure(answer, spec.default.batch_size)
    yield plots.time_figure(answer)
    yield plots.steps_figure(answer)
    yield plots.samples_figure(answer)
    yield plots.front_figure(answer, priced=False)
    yield trial_plots.curves_figure(answer, curves)
    yield trial_plots.learning_rate_figure(trials, objective_of(spec), spec.default_configuration)
    yield plots.throughput_figure(answer)
    yield plots.memory_figure(answer)


def trained_to_its_limit(trial: TrialRecord) -> TrialRecord:
    assert trial.outcome is not None
    return replace(trial, outcome=replace(trial.outcome, train_seconds=trial.train_seconds_limit))


@pytest.mark.parametrize("objective", [one for one in registry.names("objectives") if one != "energy_to_target"])
def test_plotly_knows_every_property_of_every_figure(objective: str) -> None:
    spec = make_spec(objective=objective, price_per_device_hour=2.0)
    trials = law_trials(peak_memory_bytes=6 * 2**30)
    if objective == "metric_in_budget":
        trials = [trained_to_its_limit(trial) for trial in trials]
    drawn = [one for one in all_figures(answer_of(trials, spec), trials, spec) if one is not None]
    assert len(drawn) == (8 if objective == "time_to_target" else 9)
    for figure in drawn:
        go.Figure(figure)


def test_medians_and_intervals_are_those_of_the_answer(answer: Answer) -> None:
    figure = plots.objective_figure(answer)
    others, best = named(figure, "confirmed"), named(figure, "optimal")
    drawn = {}
    for trace in (others, best):
        ends = zip(trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
        for size, median, (below, above) in zip(trace["x"], trace["y"], ends, strict=True):
            drawn[size] = (median, median - below, median + above)
    for row in answer.batches:
        assert row.time_to_target_s is not None
        known = (row.time_to_target_s.median, row.time_to_target_s.low, row.time_to_target_s.high)
        assert drawn[row.batch_size] == pytest.approx(known)
    assert best["x"] == [answer.optimal.batch_size]


def test_a_single_search_trial_is_hollow_and_has_no_interval() -> None:
    trials = [make_trial(0, batch_size=32, seconds=1.0), make_trial(1, batch_size=64, seconds=2.0)]
    trace = named(plots.objective_figure(answer_of(trials)), "single search trial")
    assert (trace["x"], trace["error_y"]["array"], trace["error_y"]["arrayminus"]) == ([64], [0], [0])
    assert trace["marker"]["color"] == "var(--page)"


def test_a_stopped_run_is_an_arrow_upward_at_its_bound() -> None:
    trials = [make_trial(0, batch_size=32), make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.5)]
    trace = named(plots.objective_figure(answer_of(trials)), "target not reached")
    assert (trace["x"], trace["y"], trace["marker"]["symbol"]) == ([8], [7.5], "arrow-up")


@pytest.mark.parametrize(("objective", "bound"), [("samples_to_target", 8 * 300), ("cost_to_target", 7.2 * 2 / 3600)])
def test_an_arrow_is_in_the_unit_of_the_objective(objective: str, bound: float) -> None:
    missed = make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300)
    spec = make_spec(objective=objective, price_per_device_hour=2.0)
    trace = named(plots.objective_figure(answer_of([make_trial(0, batch_size=32), missed], spec)), "not reached")
    assert (trace["x"], trace["y"], trace["name"]) == (
        [8],
        [pytest.approx(bound)],
        "more than this: target not reached",
    )


def test_the_law_runs_from_the_smallest_to_the_largest_that_reached(answer: Answer) -> None:
    trace = named(plots.objective_figure(answer), "law × step time")
    assert trace["name"] == "law × step time"
    assert trace["line"]["dash"] == "solid"
    assert answer.fit is not None
    assert (trace["x"][0], trace["x"][-1]) == (pytest.approx(8), pytest.approx(128))
    at_128 = answer.fit.s_min * (1 + answer.fit.b_crit.estimate / 128) * (0.01 + 0.0002 * 128)
    assert trace["y"][-1] == pytest.approx(at_128)


def test_the_law_is_not_drawn_beyond_the_batch_sizes_run() -> None:
    trace = named(plots.objective_figure(answer_of(law_trials(SIZES[:4]))), "law × step time")
    assert max(trace["x"]) == pytest.approx(64)


def test_a_law_that_does_not_fit_is_dashed_and_called_poor(answer: Answer) -> None:
    assert answer.fit is not None
    poor = answer.model_copy(update={"fit": answer.fit.model_copy(update={"verdict": "poor"})})
    for figure in (plots.objective_figure(poor), plots.steps_figure(poor), plots.samples_figure(poor)):
        trace = named(figure, "law")
        assert "(poor fit)" in trace["name"]
        assert trace["line"]["dash"] == "dash"


def test_a_law_of_too_few_batch_sizes_is_not_drawn(answer: Answer) -> None:
    assert answer.fit is not None
    few = answer_of(law_trials((8, 16)))
    assert few.fit is not None and few.fit.verdict == "too_few_points"
    for without in (few, answer.model_copy(update={"fit": None})):
        for figure in (plots.objective_figure(without), plots.steps_figure(without), plots.samples_figure(without)):
            assert not any("law" in name for name in names(figure))


def test_the_range_the_default_and_the_largest_are_marked(answer: Answer) -> None:
    figure = plots.objective_figure(answer, 32)
    assert figure is not None
    low, high = answer.flat_range
    band = named(figure, "within 5 %")
    assert min(band["x"]) < low <= high < max(band["x"])
    assert str(low) in band["name"] and str(high) in band["name"]
    ratio, best = answer.speedup.over_default, answer.optimal.objective_value
    largest = figure["layout"]["shapes"][0]
    assert (largest["x0"], largest["x1"]) == (128, 128)
    assert "largest tried: 128" in figure["layout"]["annotations"][0]["text"]
    assert ratio is None  # the default, with another learning rate, never ran
    assert "your default" not in names(figure)
    default = make_spec().default_configuration
    ran = answer_of([*law_trials(), make_trial(99, configuration=default, seconds=5.0)])
    assert ran.speedup.over_default is not None and best is not None
    mark = named(plots.objective_figure(ran, 32), "your default")
    assert (mark["x"], mark["y"]) == ([32], [pytest.approx(5.0)])


def test_steps_and_samples_show_the_regimes(answer: Answer) -> None:
    figure = plots.steps_figure(answer)
    assert figure is not None
    drawn = {
        size: (steps, trace["name"])
        for trace in figure["data"]
        if trace["mode"] == "markers"
        for size, steps in zip(trace["x"], trace["y"], strict=True)
    }
    assert drawn == {row.batch_size: (row.steps_to_target, row.regime or "smallest") for row in answer.batches}
    assert {regime for _, regime in drawn.values()} >= {"diminishing"}
    perfect = named(figure, "perfect scaling")
    assert perfect["y"][-1] == pytest.approx(perfect["y"][0] * 8 / 128)
    level = named(plots.samples_figure(answer), "perfect scaling")
    assert level["y"][0] == level["y"][-1] == answer.batches[0].samples_to_target


def test_the_front_is_that_of_the_answer(answer: Answer) -> None:
    figure = plots.front_figure(answer, priced=True)
    best, beaten = named(figure, "best trade-offs"), named(figure, "beaten")
    assert set(best["text"]) == {str(one.batch_size) for one in answer.front if one.on_front}
    assert set(beaten["text"]) == {str(one.batch_size) for one in answer.front if not one.on_front}
    assert best["x"] == sorted(best["x"])
    assert figure is not None and "price" in figure["layout"]["yaxis"]["title"]["text"]
    recommended = named(figure, "recommended")
    own = next(one for one in answer.front if one.batch_size == answer.optimal.batch_size)
    assert (recommended["x"], recommended["y"]) == ([own.time_to_target_s], [own.cost])
    assert plots.front_figure(answer.model_copy(update={"front": []}), priced=True) is None


def test_a_single_search_trial_stands_apart_from_the_front_of_confirmed_batch_sizes(answer: Answer) -> None:
    best = answer.optimal.batch_size
    rows = [row.model_copy(update={"confirmed": row.batch_size == best}) for row in answer.batches]
    front = [one.model_copy(update={"on_front": one.batch_size == best}) for one in answer.front]
    figure = plots.front_figure(answer.model_copy(update={"batches": rows, "front": front}), priced=False)
    others = {str(one.batch_size) for one in front} - {str(best)}
    assert set(named(figure, "a single search trial, not compared")["text"]) == others
    assert figure is not None and not [trace for trace in figure["data"] if trace["name"].startswith("beaten")]


def test_each_batch_size_has_the_curve_of_its_best_run_or_the_nearest_one() -> None:
    trials = [
        make_trial(0, batch_size=32, seconds=2.0),
        make_trial(1, batch_size=32, seconds=1.0),
        make_trial(2, batch_size=8, state=TrialState.CAPPED, best_metric=0.5),
        make_trial(3, batch_size=8, state=TrialState.CAPPED, best_metric=0.7),
        make_trial(4, batch_size=16, state=TrialState.FAILED, best_metric=None),
    ]
    assert trial_plots.curve_trials(answer_of(trials), trials) == {8: 3, 32: 1}
    low = {"metric": "loss", "value": 0.9, "goal": "minimize"}
    assert trial_plots.curve_trials(answer_of(trials, make_spec(target=low)), trials)[8] == 2


def long_curve(points: int) -> list[Observation]:
    return make_curve(*((float(n), math.nan if n == 7 else n / points) for n in range(points)))


def test_curves_are_thinned_and_end_where_they_ended(answer: Answer) -> None:
    figure = trial_plots.curves_figure(answer, {32: long_curve(5000), 64: long_curve(20), 16: []})
    assert figure is not None
    thinned, whole = named(figure, "32"), named(figure, "64")
    assert len(thinned["x"]) == trial_plots.CURVE_POINTS
    assert (thinned["x"][0], thinned["x"][-1]) == (1.0, 4999.0)
    assert len(whole["x"]) == 18  # neither step 0 nor the metric that was no number
    assert all(map(math.isfinite, whole["y"]))
    target = figure["layout"]["shapes"][0]
    assert (target["y0"], target["y1"]) == (0.9, 0.9)
    assert trial_plots.curves_figure(answer, {16: []}) is None


def test_the_curve_of_the_optimum_stands_out_and_one_that_missed_is_dotted() -> None:
    trials = [make_trial(0, batch_size=32), make_trial(1, batch_size=64, state=TrialState.EXHAUSTED)]
    figure = trial_plots.curves_figure(answer_of(trials), {32: long_curve(20), 64: long_curve(20)})
    best, other = named(figure, "32"), named(figure, "64")
    assert (best["name"], other["name"]) == ("32 (optimal)", "64")
    assert (best["line"]["dash"], other["line"]["dash"]) == ("solid", "dot")
    assert (best["line"]["width"] > other["line"]["width"], best["zorder"], other["zorder"]) == (True, 1, 0)
    assert (best["line"]["color"], other["line"]["color"]) == ("var(--seq-0)", "var(--seq-100)")
    assert figure is not None and "≥ 0.9" in figure["layout"]["annotations"][0]["text"]


def test_a_curve_of_a_single_evaluation_is_no_line(answer: Answer) -> None:
    assert trial_plots.curves_figure(answer, {32: make_curve((0.0, 0.1), (1.0, 0.9))}) is None
    drawn = trial_plots.curves_figure(answer, {32: make_curve((0.0, 0.1), (1.0, 0.9), (2.0, 0.95))})
    assert named(drawn, "32")["x"] == [1.0, 2.0]


def rates(trials: Sequence[TrialRecord], default: Configuration | None = None) -> Figure | None:
    return trial_plots.learning_rate_figure(trials, TIME, default)


def test_every_trial_that_says_something_is_on_the_map_by_how_it_ended() -> None:
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
    figure = rates(trials)
    for state, name in states.items():
        trial = next(one for one in trials if one.state is state)
        assert trial.configuration.learning_rate in named(figure, name)["y"]
    assert figure is not None
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(states)


def test_colours_are_the_logarithm_of_the_figure_and_the_best_lies_on_top() -> None:
    trials = [make_trial(0, seconds=1.0), make_trial(1, seconds=100.0), make_trial(2, seconds=10.0)]
    trace = named(rates(trials), "reached")
    assert trace["marker"]["color"] == pytest.approx([math.log(100), math.log(10), 0.0])
    bar = trace["marker"]["colorbar"]
    shown = dict(zip(bar["ticktext"], bar["tickvals"], strict=True))
    assert shown["10"] == pytest.approx(math.log(10))


def test_the_rules_lead_from_the_default() -> None:
    default = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1)
    figure = rates([make_trial(0, batch_size=8), make_trial(1, batch_size=128)], default)
    linear, root = named(figure, "linear rule"), named(figure, "sqrt rule")
    assert (linear["x"], linear["y"]) == ([8, 32, 128], pytest.approx([0.025, 0.1, 0.4]))
    assert root["y"] == pytest.approx([0.05, 0.1, 0.2])
    assert not any("rule" in name for name in names(rates([make_trial(0)])))


def test_a_learning_rate_that_nobody_knows_is_not_drawn() -> None:
    unknown = Configuration(batch_size=8, micro_batch_size=8, learning_rate=1.0, parameters={"learning_rate": None})
    assert rates([make_trial(0, configuration=unknown)]) is None


def test_memory_is_shown_beside_the_devices_where_it_comes_near() -> None:
    near = plots.memory_figure(answer_of(law_trials(peak_memory_bytes=6 * 2**30)))
    assert near is not None
    assert near["data"][0]["y"] == [6.0] * len(SIZES)
    assert near["layout"]["shapes"][0]["y0"] == 8.0
    assert (near["layout"]["shapes"][0]["x0"], near["layout"]["shapes"][0]["x1"]) == (0, 1)
    low, high = near["layout"]["yaxis"]["range"]
    assert (low, high > 8.0) == (0.0, True)
    a_quarter = plots.memory_figure(answer_of(law_trials(peak_memory_bytes=2 * 2**30)))
    assert a_quarter is not None and "shapes" in a_quarter["layout"]
    far = plots.memory_figure(answer_of(law_trials(peak_memory_bytes=2**28)))
    assert far is not None and "shapes" not in far["layout"]
    assert far["layout"]["yaxis"]["range"][0] == 0.0
    assert far["layout"]["yaxis"]["title"]["text"] == "peak memory, MiB"
    assert far["data"][0]["y"] == [256.0] * len(SIZES)
    assert near["layout"]["yaxis"]["title"]["text"] == "peak memory, GiB"
    assert plots.memory_figure(answer_of(law_trials())) is None


def test_throughput_is_batch_size_over_step_time(answer: Answer) -> None:
    figure = plots.throughput_figure(answer)
    assert figure is not None
    assert figure["data"][0]["y"] == pytest.approx([size / (0.01 + 0.0002 * size) for size in SIZES])


def test_names_of_users_are_cut_and_shown_as_they_are(answer: Answer) -> None:
    assert label("<b>a & b</b>\n c") == "&lt;b&gt;a &amp; b&lt;/b&gt; c"
    assert len(label("x" * 1000)) == 40
    assert label("x" * 40) == "x" * 40 != label("x" * 41)
    evil = answer.model_copy(update={"target": replace(answer.target, metric='<a href="https://evil">click</a>')})
    figure = trial_plots.curves_figure(evil, {32: long_curve(9)})
    assert "<a" not in str(figure)
    assert "&lt;a" in str(figure)


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


@pytest.mark.parametrize("ends", [(0.9, 12.0), (1e-9, 1e9), (41.0, 89.0), (1.0, 1.0001), (3.0, 3.2)])
def test_logarithmic_axes_have_round_ticks_inside(ends: tuple[float, float]) -> None:
    found = round_numbers(*ends)
    assert 2 <= len(found) <= 10
    assert all(ends[0] <= tick <= ends[1] for tick in found)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((0.9, 120.0), [1, 10, 100]),
        ((0.9, 12.0), [1, 3, 10]),
        ((1.0, 100.0), [1, 10, 100]),
        ((1e-9, 1e7), [1e-9, 1e-7, 1e-5, 1e-3, 1e-1, 1e1, 1e3, 1e5, 1e7]),
        ((1e-9, 1.0), [1e-9, 1e-7, 1e-5, 1e-3, 1e-1]),
        ((1.0, 1e8), [10**power for power in range(9)]),
        ((2.0, 7.0), [2, 3, 4, 5, 7]),
        ((4.05, 4.39), [4.1, 4.2, 4.3]),
        ((3.01, 3.02), [3.01, 3.02]),
    ],
)
def test_ticks_are_the_roundest_numbers_of_which_there_are_three_to_nine(
    ends: tuple[float, float], ticks: list[float]
) -> None:
    assert round_numbers(*ends) == pytest.approx(ticks)
    axis = value_axis("", ends, log=True, room=0.0)
    low, high = math.log10(ends[0]) - 0.04, math.log10(ends[1]) + 0.04
    assert axis["range"] == pytest.approx([low, high])
    assert axis["tickvals"] == round_numbers(10**low, 10**high)
    assert axis["ticktext"] == [number(tick) for tick in axis["tickvals"]]


def test_axes_hold_everything_that_is_drawn(answer: Answer) -> None:
    figure = plots.objective_figure(answer, 32)
    assert figure is not None
    low, high = figure["layout"]["yaxis"]["range"]
    for trace in figure["data"]:
        errors: Mapping[str, Any] = trace.get("error_y", {"array": [0] * len(trace["y"])})
        for value, above in zip(trace["y"], errors["array"], strict=True):
            assert 10**low <= (value + above) * (1 + 1e-9) and (value + above) * (1 - 1e-9) <= 10**high


@pytest.mark.parametrize(("sizes", "every"), [(1, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_at_most_twelve_batch_sizes_are_named_on_an_axis(sizes: int, every: int) -> None:
    ran = [2**power for power in range(sizes)]
    axis = batch_axis(ran)
    assert axis["tickvals"] == ran[::every]
    assert axis["ticktext"] == [str(size) for size in ran[::every]]
    length = math.log10(ran[-1])
    room = max(0.1, PADDING * length)
    assert axis["range"] == pytest.approx([-room, length + room])
    assert batch_axis([8, 2**20])["range"][0] == pytest.approx(math.log10(8) - PADDING * math.log10(2**17))


def test_axes_leave_their_padding_on_both_sides_and_begin_at_zero_where_that_is_the_least() -> None:
    assert value_axis("", [1.0, 3.0], log=False)["range"] == pytest.approx([1.0 - 2 * PADDING, 3.0 + 2 * PADDING])
    assert value_axis("", [0.0, 3.0], log=False)["range"] == pytest.approx([0.0, 3.0 + 3 * PADDING])
    assert value_axis("", [5.0, 5.0], log=False)["range"] == pytest.approx([5.0 - 5 * PADDING, 5.0 + 5 * PADDING])
    assert value_axis("", [0.0], log=False)["range"] == pytest.approx([0.0, PADDING])
    assert value_axis("", [1.0, 1e4], log=True, room=0.5)["range"] == pytest.approx([-2.0, 6.0])
    one = value_axis("", [10.0, 0.0, -1.0, math.inf], log=True)["range"]
    assert one[0] < 1.0 < one[1], "what no logarithmic axis can show does not count"


def test_colours_of_equal_figures_have_a_scale_all_the_same() -> None:
    marker = named(rates([make_trial(0, seconds=2.0), make_trial(1, seconds=2.0)]), "reached")["marker"]
    assert marker["cmin"] == pytest.approx(math.log(2.0)) and marker["cmax"] > marker["cmin"]
    spread = named(rates([make_trial(0, seconds=2.0), make_trial(1, seconds=8.0)]), "reached")["marker"]
    assert (spread["cmin"], spread["cmax"]) == pytest.approx((math.log(2.0), math.log(8.0)))
    shades = [(share, colour) for share, colour in spread["colorscale"]]
    assert (shades[0], shades[-1]) == ((0.0, "var(--seq-0)"), (1.0, "var(--seq-100)"))


def test_what_is_not_tuned_is_hollow_in_the_figures_of_the_law(answer: Answer) -> None:
    rows = [row.model_copy(update={"untuned": row.batch_size == 128}) for row in answer.batches]
    figure = plots.steps_figure(answer.model_copy(update={"batches": rows}))
    assert figure is not None
    symbols = {
        size: symbol
        for trace in figure["data"]
        if trace["mode"] == "markers"
        for size, symbol in zip(trace["x"], trace["marker"]["symbol"], strict=True)
    }
    assert {size for size, symbol in symbols.items() if symbol.endswith("-open")} == {128}


def test_the_default_that_never_reached_is_an_arrow_and_the_mark_of_one_that_did_is_not() -> None:
    default = make_spec().default_configuration
    missed = make_trial(99, configuration=default, state=TrialState.EXHAUSTED, seconds=9.0)
    mark = named(plots.objective_figure(answer_of([*law_trials(), missed]), 32), "your default")
    assert (mark["y"], mark["marker"]["symbol"]) == ([pytest.approx(9.0)], "arrow-up-open")
    reached = answer_of([*law_trials(), make_trial(99, configuration=default, seconds=9.0)])
    assert named(plots.objective_figure(reached, 32), "your default")["marker"]["symbol"] == "diamond-open"
    assert "your default" not in names(plots.objective_figure(reached))


def test_of_a_study_for_samples_the_seconds_are_drawn_apart(answer: Answer) -> None:
    assert plots.time_figure(answer) is None, "they are the objective"
    figure = plots.time_figure(answer_of(law_trials(), make_spec(objective="samples_to_target")))
    drawn = named(figure, "best tuned")
    medians = {row.batch_size: row.time_to_target_s.median for row in answer.batches if row.time_to_target_s}
    assert dict(zip(drawn["x"], drawn["y"], strict=True)) == pytest.approx(medians)
