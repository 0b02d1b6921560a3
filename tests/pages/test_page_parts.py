"""The tiles, tables and sentences of a study's page say the figures of the answer, and nothing that is unknown."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from bssearch.analysis.answer import Figure, Ratio
from bssearch.analysis.law.fitted import CriticalBatch, Fit, Law, Predicted
from bssearch.analysis.measured import MemoryAnswer, NoiseAnswer, StepTimeAnswer
from bssearch.analysis.rules.rule_book import Rule
from bssearch.analysis.shape import Interval
from bssearch.pages import page
from bssearch.pages.html import Row, Section, Tile
from bssearch.pages.page import SHORT_SPEC, StudyPicture, reproduction_of, tiles_of
from bssearch.pages.words import NOTHING, in_words
from bssearch.records import TrialState
from tests.factories import make_environment, make_spec, make_trial
from tests.pages.test_page import picture

FIT = Fit(
    s_min=50.0,
    b_crit=CriticalBatch(estimate=321.0, low=222.0, high=444.0),
    max_residual=0.0123,
    verdict="fits",
    residuals={},
    alpha_s=0.01,
    beta_s=0.0002,
    b_star=64.0,
    predicted=None,
    including_untuned=None,
    noise_scale_ratio=None,
)
NOISE = NoiseAnswer(
    batch_size=32, scale=777.0, low=666.0, high=888.0, adam_scale=None, adam_low=None, adam_high=None, passes=9
)


@pytest.fixture(scope="module")
def whole() -> StudyPicture:
    return picture()


def changed(whole: StudyPicture, **update: Any) -> StudyPicture:
    """Return the picture with fields of its answer changed."""
    return replace(whole, answer=whole.answer.model_copy(update=update))


def optimal(whole: StudyPicture, **update: Any) -> StudyPicture:
    return changed(whole, optimal=whole.answer.optimal.model_copy(update=update))


def tiles(found: StudyPicture) -> dict[str, Tile]:
    return {tile.name: tile for tile in tiles_of(found.answer, found.spec)}


def with_critical(whole: StudyPicture, low: float | None, high: float | None, **update: Any) -> StudyPicture:
    fit = FIT.model_copy(update={"b_crit": CriticalBatch(estimate=321.0, low=low, high=high), **update})
    return changed(whole, fit=fit)


def test_the_critical_batch_size_stands_with_its_interval(whole: StudyPicture) -> None:
    tile = tiles(with_critical(whole, 222.0, 444.0))["Critical batch size"]
    assert tile.value == "321"
    assert "222" in tile.note and "444" in tile.note


@pytest.mark.parametrize(("low", "high"), [(222.0, None), (None, 444.0), (None, None)])
def test_a_critical_batch_size_that_is_only_bounded_stands_as_its_bound(
    whole: StudyPicture, low: float | None, high: float | None
) -> None:
    tile = tiles(with_critical(whole, low, high))["Critical batch size"]
    assert tile.value == CriticalBatch(estimate=321.0, low=low, high=high).in_words
    assert "321" not in tile.value + tile.note and "None" not in tile.note


def test_a_law_that_fits_is_told_from_a_poor_one(whole: StudyPicture) -> None:
    for ends in ((222.0, 444.0), (222.0, None)):
        good, poor = (
            tiles(with_critical(whole, *ends, verdict=one))["Critical batch size"].note for one in ("fits", "poor")
        )
        assert good != poor and "poor" in poor and "poor" not in good


def test_without_a_law_there_is_no_critical_batch_size(whole: StudyPicture) -> None:
    for found in (changed(whole, fit=None), with_critical(whole, 222.0, 444.0, verdict="too_few_points")):
        assert "Critical batch size" not in tiles(found)


def with_noise(whole: StudyPicture, **update: Any) -> StudyPicture:
    measured = whole.answer.measured.model_copy(update={"noise_scale": NOISE.model_copy(update=update)})
    return changed(whole, measured=measured)


def test_the_noise_scale_stands_with_its_interval_or_as_its_lower_bound(whole: StudyPicture) -> None:
    assert "Gradient noise scale" not in tiles(whole)
    known = tiles(with_noise(whole))["Gradient noise scale"]
    assert known.value == "777" and "666 to 888" in known.note
    bound = tiles(with_noise(whole, scale=None, high=None))["Gradient noise scale"]
    assert bound.value == "≥ 666" and "666" not in bound.note
    without_end = tiles(with_noise(whole, high=None))["Gradient noise scale"]
    assert without_end.value == "777" and "666" not in without_end.note


def test_the_metric_on_the_test_part_and_the_memory_stand_where_they_are_known(whole: StudyPicture) -> None:
    found = tiles(optimal(whole, test_metric=0.8765, peak_memory_bytes=3 * 2**30))
    assert (found["Test accuracy"].value, found["Peak memory"].value) == ("0.876", "3 GiB")
    unknown = tiles(optimal(whole, test_metric=None, peak_memory_bytes=None))
    assert not {"Test accuracy", "Peak memory"} & set(unknown)


def test_further_metrics_stand_with_their_intervals(whole: StudyPicture) -> None:
    figures = {"forgetting": Figure(median=0.031, low=0.028, high=0.036, runs=3)}
    tile = tiles(optimal(whole, further_metrics=figures))["Test forgetting"]
    assert tile.value == "0.031" and "[0.028, 0.036]" in tile.note


def test_a_batch_size_in_micro_batches_says_how_many_of_what_size(whole: StudyPicture) -> None:
    assert tiles(optimal(whole, accumulation_steps=1))["Optimal batch size"].note == ""
    found = tiles(optimal(whole, batch_size=4096, accumulation_steps=2, micro_batch_size=2048))["Optimal batch size"]
    assert (found.value, found.note) == ("4,096", "2 × 2048")


@pytest.mark.parametrize(("flat", "value"), [([64, 64], "64"), ([64, 2048], "64 to 2,048")])
def test_the_range_within_5_percent_is_one_batch_size_or_from_one_to_another(
    whole: StudyPicture, flat: list[int], value: str
) -> None:
    assert tiles(changed(whole, flat_range=flat))["Within 5 %"].value == value


def with_speedup(whole: StudyPicture, **update: Any) -> StudyPicture:
    return changed(whole, speedup=whole.answer.speedup.model_copy(update=update))


def test_the_default_stands_with_how_many_times_longer_it_takes(whole: StudyPicture) -> None:
    ratio = Ratio(value=2.34, at_least=False, low=2.11, high=2.55)
    note = tiles(with_speedup(whole, over_default=ratio))["Your default"].note
    assert note.startswith("2.34×") and "[2.11, 2.55]" in note
    at_least = ratio.model_copy(update={"at_least": True, "low": None, "high": None})
    bound = tiles(with_speedup(whole, over_default=at_least))["Your default"].note
    assert "2.34×" in bound and not bound.startswith("2.34") and "[" not in bound
    assert "×" not in tiles(with_speedup(whole, over_default=None))["Your default"].note


def test_the_largest_batch_size_stands_with_its_reason_and_its_ratio(whole: StudyPicture) -> None:
    largest = whole.answer.largest_that_fits.model_copy(update={"reason": "256 ran out", "batch_size": 1024})
    ratio = Ratio(value=1.23, at_least=False)
    found = changed(with_speedup(whole, over_largest=ratio), largest_that_fits=largest)
    name = largest.in_words.capitalize()
    assert tiles(found)[name].value == "1,024"
    assert tiles(found)[name].note.startswith("1.23×") and tiles(found)[name].note.endswith("256 ran out")
    assert tiles(with_speedup(found, over_largest=None))[name].note == "256 ran out"


def test_the_figure_of_the_optimum_has_its_interval_where_there_is_one(whole: StudyPicture) -> None:
    figure = Figure(median=1.234, low=1.111, high=1.333, runs=3)
    label = page._figure_tile(whole.answer).name
    note = tiles(optimal(whole, objective_value=figure))[label].note
    assert "1.11 to 1.33" in note and note.endswith("3 runs")
    for ends in ({"low": None}, {"high": None}):
        single = figure.model_copy(update={**ends, "runs": 1})
        assert tiles(optimal(whole, objective_value=single))[label].note == "1 run"


# Sentences ---------------------------------------------------------------------------------------------------------


def about_law(**update: Any) -> str:
    return " ".join(page._about_law(FIT.model_copy(update=update)))


def test_the_law_is_said_with_its_figures_and_what_rests_on_it() -> None:
    said = about_law()
    assert all(one in said for one in ("50 steps", "B_crit = 321 [222, 444]", "1.23 %"))
    predicted = Predicted(batch_size=96, micro_batch_size=96, time_to_target_s=1.5, flat_range=[64, 128])
    untuned = Law(
        s_min=60.0, b_crit=CriticalBatch(estimate=555.0, low=None, high=None), max_residual=0.1, verdict="poor",
        residuals={},
    )  # fmt: skip
    whole = about_law(predicted=predicted, including_untuned=untuned, noise_scale_ratio=0.789)
    for number in (predicted.in_words, "555", "0.789"):
        assert number in whole and number not in said


def test_a_bound_of_the_critical_batch_size_is_no_equation() -> None:
    for low, high in ((222.0, None), (None, 444.0)):
        critical = CriticalBatch(estimate=321.0, low=low, high=high)
        said = about_law(b_crit=critical)
        assert critical.in_words in said and f"= {critical.in_words}" not in said and "321" not in said


def test_each_reason_for_no_law_is_its_own() -> None:
    none, too_few = page._about_law(None), page._about_law(FIT.model_copy(update={"verdict": "too_few_points"}))
    assert len(none) == len(too_few) == 1
    assert none != too_few
    assert "321" not in none[0] + too_few[0]


def about_device(whole: StudyPicture, **update: Any) -> list[str]:
    return page._about_device(changed(whole, measured=whole.answer.measured.model_copy(update=update)).answer)


def test_the_device_is_said_with_its_step_time_in_milliseconds_and_its_memory_boundary(whole: StudyPicture) -> None:
    step = StepTimeAnswer(alpha_s=0.0123, beta_s=0.000456, max_residual=0.01, throughput_knee=176)
    memory = MemoryAnswer(largest_that_fits=1536, smallest_that_does_not=1792, fixed_bytes=None, bytes_per_sample=None)
    (said,) = about_device(whole, step_time=step, memory=memory)
    assert all(one in said for one in ("12.3 ms", "0.456 ms", "batch 176", "1536", "1792"))
    (without_step,) = about_device(whole, step_time=None, memory=memory)
    assert "ms" not in without_step and "1792" in without_step
    for unbounded in (None, memory.model_copy(update={"smallest_that_does_not": None})):
        (without_boundary,) = about_device(whole, step_time=step, memory=unbounded)
        assert "1536" not in without_boundary and "None" not in without_boundary
    assert about_device(whole, step_time=None, memory=None) == []


def test_the_default_is_drawn_only_where_it_is_known(whole: StudyPicture) -> None:
    compared = with_speedup(whole, over_default=Ratio(value=2.0, at_least=False))
    imported = replace(compared, spec=make_spec(workload="imported"))
    assert page._known_default(compared) == whole.spec.default_configuration
    assert page._known_default(imported) is None
    assert "Your default" not in tiles(imported)
    for section in (page._objective, page._learning_rate):
        known, unknown = (
            sum(len(chart.series) for chart in section(found).drawn.values()) for found in (compared, imported)
        )
        assert known > unknown


# Tables ------------------------------------------------------------------------------------------------------------


def cells(whole: StudyPicture, **update: Any) -> dict[str, str]:
    row = whole.answer.batches[0].model_copy(update=update)
    section = page._batches(whole.answer.model_copy(update={"batches": [row]}))
    assert section.table is not None
    return dict(zip(section.table.headings, section.table.rows[0].cells, strict=True))


def figure_of(whole: StudyPicture, **update: Any) -> str:
    return cells(whole, **update)[page._figure_heading(whole.answer)]


def test_a_row_of_the_batch_sizes_has_their_figures_in_the_units_of_the_headings(whole: StudyPicture) -> None:
    first = whole.answer.batches[0]
    shown = cells(
        whole,
        objective_value=Figure(median=1.5, low=1.25, high=1.75, runs=1),
        steps_to_target=12_345,
        samples_to_target=98_765.4,
        step_time_s=0.0123,
        ended={"reached": 3, "diverged": 1},
    )
    assert shown["Batch"] == f"{first.batch_size}"
    assert shown[page._figure_heading(whole.answer)] == "1.5 s [1.25, 1.75], 1 run"
    assert (shown["Steps"], shown["Samples"], shown["ms/step"]) == ("12,345", "98,800", "12.3")
    assert shown["Trials"] == "3 reached, 1 diverged"
    assert first.best is not None
    assert shown["Learning rate"] == f"{first.best.parameters['learning_rate']:.4g}"


def test_the_host_bound_share_is_a_column_where_it_is_known(whole: StudyPicture) -> None:
    assert "Host-bound" not in cells(whole)
    assert cells(whole, host_bound_share=0.256)["Host-bound"] == "26%"


def test_what_a_batch_size_has_not_stands_as_a_dash(whole: StudyPicture) -> None:
    nothing = dict.fromkeys(
        ("objective_value", "objective_lower_bound", "steps_to_target", "samples_to_target", "step_time_s", "best",
         "regime", "slope")
    )  # fmt: skip
    shown = cells(whole, **nothing, ended={}, untuned=False)
    assert {value for name, value in shown.items() if name != "Batch"} == {NOTHING}


def test_a_batch_size_that_never_reached_has_its_lower_bound(whole: StudyPicture) -> None:
    assert figure_of(whole, objective_value=None, objective_lower_bound=7.25) == "> 7.25 s"
    figure = Figure(median=1.5, low=None, high=None, runs=2)
    assert figure_of(whole, objective_value=figure, objective_lower_bound=7.25) == "1.5 s, 2 runs"


def regime_of(whole: StudyPicture, **update: Any) -> str:
    return cells(whole, untuned=False, **{"regime": "perfect", **update})["Regime"]


def test_a_regime_stands_with_the_slope_of_the_steps_where_that_has_an_interval(whole: StudyPicture) -> None:
    slope = Interval(value=-0.987, low=-1.234, high=-0.765)
    shown = regime_of(whole, slope=slope)
    assert all(one in shown for one in ("perfect", "−0.99", "−1.23", "−0.77"))
    for without in (None, *(slope.model_copy(update={end: None}) for end in ("low", "high"))):
        assert regime_of(whole, slope=without) == "perfect"


def test_a_batch_size_that_is_not_well_tuned_says_why(whole: StudyPicture) -> None:
    why = {"untuned_because": ["first reason", "second reason"], "slope": None, "regime": "maximal"}
    tuned, untuned = (cells(whole, untuned=one, **why)["Regime"] for one in (False, True))
    assert tuned == "maximal"
    assert untuned.startswith("maximal") and "first reason" in untuned and "second reason" in untuned


def marked(section: Section) -> list[str]:
    assert section.table is not None
    return [row.cells[0] for row in section.table.rows if row.marked]


def test_the_optimum_alone_is_marked(whole: StudyPicture) -> None:
    assert marked(page._batches(whole.answer)) == [str(whole.answer.optimal.batch_size)]


def recipe(found: StudyPicture) -> dict[str, str]:
    table = page._recipe(found.answer).table
    assert table is not None
    return {row.cells[0]: row.cells[1] for row in table.rows}


def test_the_recipe_names_micro_batches_only_where_steps_accumulate(whole: StudyPicture) -> None:
    parameters = {"learning_rate": 0.123456, "optimizer": "sgd", "nesterov": True, "dropout": None}
    plain = recipe(optimal(whole, batch_size=64, accumulation_steps=1, parameters=parameters))
    assert plain == {"batch_size": "64", "learning_rate": "0.1235", "optimizer": "sgd", "nesterov": "True"}
    split = recipe(optimal(whole, batch_size=64, accumulation_steps=2, micro_batch_size=32, parameters=parameters))
    assert split == {**plain, "micro_batch_size": "32", "accumulation_steps": "2"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (9_999, "9999"), (10_000, "10,000"), (0.000123456, "0.0001235"), (True, "True"), ("sgd", "sgd")],
)
def test_values_of_every_kind_are_shown(value: object, shown: str) -> None:
    assert in_words(value) == shown


# The rules ---------------------------------------------------------------------------------------------------------


def rule(**update: Any) -> dict[str, Any]:
    found = {
        "rule": str(Rule.LINEAR_RATE),
        "batch_size": 128,
        "configuration": {"learning_rate": 0.4, "dropout": 0.1},
        "regret": {"value": 1.234, "low": 1.15, "high": 1.33, "at_least": False},
        "verdict": "broke",
        "reason": "three runs",
    }
    return {**found, **update}


def rule_rows(*rules: dict[str, Any], **audit: Any) -> list[Row]:
    section = page._audit({"rules": list(rules), **audit})
    assert section is not None and section.table is not None
    return section.table.rows


def test_a_rule_shows_the_one_parameter_that_it_gives() -> None:
    for about, given in (
        (Rule.LINEAR_RATE, "learning_rate 0.4"),
        (Rule.DROPOUT, "dropout 0.1"),
        (Rule.WARMUP, NOTHING),
        ("one_of_a_package", "learning_rate 0.4, dropout 0.1"),
    ):
        (row,) = rule_rows(rule(rule=str(about)))
        assert row.cells[4] == given


@pytest.mark.parametrize(
    ("regret", "shown"),
    [
        ({"value": 1.234, "low": 1.15, "high": 1.33, "at_least": False}, "1.23 [1.15, 1.33]"),
        ({"value": 1.234, "low": None, "high": 1.33, "at_least": False}, "1.23"),
        ({"value": 1.234, "low": 1.15, "high": None, "at_least": False}, "1.23"),
        ({"value": 1.234, "at_least": True}, "≥ 1.23"),
        (None, NOTHING),
    ],
)
def test_a_regret_is_an_interval_a_bound_or_nothing(regret: dict[str, Any] | None, shown: str) -> None:
    (row,) = rule_rows(rule(regret=regret))
    assert row.cells[3] == shown


def test_rules_that_were_not_run_come_last_in_their_order() -> None:
    verdicts = ["not_run", "held", "not_run", "broke", "undecided"]
    rows = rule_rows(*(rule(verdict=one, batch_size=8 * index) for index, one in enumerate(verdicts)))
    assert [row.cells[1] for row in rows] == ["8", "24", "32", "0", "16"]


def test_a_rule_without_configuration_or_reason_has_dashes() -> None:
    (row,) = rule_rows(rule(configuration=None, reason=None, batch_size=None))
    assert [row.cells[place] for place in (1, 4, 5)] == [NOTHING] * 3


def test_an_audit_that_has_found_nothing_is_not_shown() -> None:
    assert page._audit(None) is None
    assert page._audit({"rules": []}) is None
    assert page._audit({}) is None


def test_the_slope_of_the_learning_rate_stands_with_what_its_interval_excludes() -> None:
    slope = {"estimate": 0.52, "low": 0.31, "high": 0.73, "excludes": [0, 1]}

    def note(**update: Any) -> list[str]:
        section = page._audit({"rules": [rule()], "learning_rate_slope": {**slope, **update}})
        assert section is not None
        return list(section.notes)

    (excluding,), (excluding_none,) = note(), note(excludes=[])
    assert "0.52" in excluding and "[0.31, 0.73]" in excluding
    assert excluding.removesuffix(".").endswith("0, 1") and excluding.startswith(excluding_none.removesuffix("."))
    without = page._audit({"rules": [rule()]})
    assert without is not None and list(without.notes) == []


# Where it ran ------------------------------------------------------------------------------------------------------


def test_the_last_day_of_a_study_and_its_device_stand_above_its_headline(whole: StudyPicture) -> None:
    ends = [datetime(2026, 3, day, tzinfo=UTC) for day in (4, 9, 7)]
    trials = [replace(make_trial(number), ended_at=end) for number, end in enumerate(ends)]
    running = replace(make_trial(9, state=TrialState.RUNNING), ended_at=None)
    above = page._kicker(replace(whole, trials=[*trials, running]))
    assert "09 March 2026" in above and "4 trials" in above and whole.answer.device.name in above
    assert "2026" not in page._kicker(replace(whole, trials=[running]))
    unknown = whole.answer.device.model_copy(update={"precision": None})
    assert "None" not in page._kicker(changed(whole, device=unknown))


def test_a_study_whose_name_the_shell_would_split_is_quoted(whole: StudyPicture) -> None:
    name = "two words; rm -r x"
    found = reproduction_of(replace(whole.study, name=name), whole.spec)
    run, report = (shlex.split(line) for line in found["commands"].splitlines())
    assert (run, report[:3]) == (["bssearch", "run", f"./{name}.yaml"], ["bssearch", "report", name])
    assert found["spec_is_short"] is (found["spec"].count("\n") <= SHORT_SPEC)


def test_the_facts_are_those_that_are_known_with_memory_in_gib() -> None:
    assert page._facts(None) == []
    facts = dict(page._facts(make_environment(device_memory_bytes=3 * 2**29, cuda_version=None)))
    assert (facts["Device"], facts["Device memory"]) == ("Test CPU", "1.5 GiB")
    assert "CUDA" not in facts and "None" not in facts.values()
    assert "Device memory" not in dict(page._facts(make_environment(device_memory_bytes=None)))


def test_batch_sizes_with_a_figure_or_a_bound_are_drawn_and_not_named_as_missing(whole: StudyPicture) -> None:
    rows = list(whole.answer.batches[:3])
    without = {"objective_value": None, "objective_lower_bound": None}
    rows[0] = rows[0].model_copy(update={**without, "ended": {"diverged": 2}})
    rows[1] = rows[1].model_copy(update={**without, "objective_lower_bound": 5.0})
    (said,) = page._without_figure(whole.answer.model_copy(update={"batches": rows}))
    assert f"{rows[0].batch_size} (2 diverged)" in said
    assert f" {rows[1].batch_size} (" not in said and f" {rows[2].batch_size} (" not in said
    assert page._without_figure(whole.answer.model_copy(update={"batches": rows[1:]})) == []
