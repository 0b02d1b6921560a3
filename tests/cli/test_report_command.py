"""``bssearch report`` writes whole files or none; ``bssearch study compare`` puts studies side by side."""

import csv
import io
import json
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bssearch import Store, StudySpec, open_store, trials_frame
from bssearch.cli.study import MEANINGS
from bssearch.exchange.exporters import exports
from bssearch.records import Lease, Phase, TrialRecord, TrialState
from tests.cli.task import bssearch, ran, refused
from tests.factories import (
    make_curve,
    make_environment,
    make_plan,
    make_probe,
    make_spec,
    make_trial,
    not_none,
    store_study,
)
from tests.figures.test_plots import SIZES, law_trials

FEW = (16, 32, 64)
TABLES = ("trials.csv", "batches.csv", "observations.csv")


def add_study(store: Store, spec: StudySpec, trials: Sequence[TrialRecord], **environment: Any) -> None:
    """Store a study with trials as they are, each with a curve of three observations."""
    place = make_environment(**environment)
    store_study(store, spec, place)
    for size in SIZES:
        store.probes.add_step_time(spec.name, place, make_probe(size, step_seconds=0.01 + 0.0002 * size), 1)
    for trial in trials:
        assert trial.outcome is not None
        limit = {} if spec.objective != "metric_in_budget" else {"train_seconds_limit": trial.outcome.train_seconds}
        started = not_none(
            store.trials.start(
                spec.name,
                make_plan(
                    configuration=trial.configuration,
                    phase=trial.phase,
                    seed=trial.seed,
                    sampled=trial.sampled,
                    **limit,
                ),
                environment=place,
                lease=Lease(owner="test/1/1.00/x", seconds=60.0),
            )
        )
        curve = make_curve((0.0, 0.1), (0.5, 0.8), (1.0, 0.9))
        store.trials.append_observations(spec.name, [(started.number, one) for one in curve])
        store.trials.finish(spec.name, started.number, trial.outcome, steps_x_step_time_s=None)


def slower(trials: Sequence[TrialRecord], factor: float) -> list[TrialRecord]:
    """Return the same runs on a device on which each takes so many times the seconds."""
    return [
        make_trial(
            one.number,
            batch_size=one.configuration.batch_size,
            phase=Phase.CONFIRM,
            seed=one.seed,
            steps=one.outcome.steps_to_target or 0,
            seconds=factor * (one.outcome.time_to_target_s or 0.0),
            configuration=one.configuration,
        )
        for one in trials
        if one.outcome is not None
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    missed = [make_trial(0, state=TrialState.EXHAUSTED, best_metric=0.7)]
    harder = {"metric": "accuracy", "value": 0.95}
    with open_store(f"sqlite:///{place}/bssearch.db") as store:
        add_study(store, make_spec(), law_trials())
        add_study(store, make_spec(name="slow"), slower(law_trials(), 3.0), device_name="Old CPU", precision="bf16")
        add_study(store, make_spec(name="harder", target=harder), law_trials(FEW))
        add_study(store, make_spec(name="single"), [make_trial(0, batch_size=64, seconds=4.0)])
        add_study(store, make_spec(name="missed"), missed)
        for name, objective, price in OTHERS:
            spec = make_spec(name=name, objective=objective, price_per_device_hour=price)
            add_study(store, spec, slower(law_trials(FEW), 3.0 if name == "cost" else 1.0))
        add_study(store, make_spec(name="better", objective="metric_in_budget"), law_trials(FEW, best_metric=0.99))
        add_study(store, make_spec(name="two"), law_trials((16, 32)))
    return place


OTHERS = (
    ("samples", "samples_to_target", None),
    ("cost", "cost_to_target", 7.2),
    ("cheap", "cost_to_target", 3.6),
    ("hours", "cost_to_target", None),
    ("metric", "metric_in_budget", None),
)


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


@pytest.mark.parametrize(
    ("option", "name", "begins", "holds", "ends"),
    [
        ("--html", "report.html", "<!doctype html>", "<title>toy", "</html>"),
        ("--svg", "picture.svg", "<svg ", "study toy, ", "</svg>\n"),
    ],
)
def test_a_page_or_a_picture_is_written_and_its_path_printed(
    folder: Path, tmp_path: Path, option: str, name: str, begins: str, holds: str, ends: str
) -> None:
    path = tmp_path / name
    done = bssearch("report", "toy", option, path, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
    assert files(tmp_path) == {name}
    text = path.read_text(encoding="utf-8")
    assert text.startswith(begins) and holds in text and text.endswith(ends)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("Umask"))
    return int(line.split()[1], 8)


def test_an_earlier_page_is_replaced_and_a_link_to_it_kept(folder: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old")
    link.symlink_to(real)
    assert bssearch("report", "toy", "--html", link, cwd=folder).returncode == 0
    assert link.is_symlink() and real.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("option", ["--html", "--svg", "--csv"])
def test_what_cannot_be_written_is_named_and_nothing_is_left(folder: Path, tmp_path: Path, option: str) -> None:
    taken = tmp_path / "taken"
    taken.mkdir() if option != "--csv" else taken.write_text("mine")
    for path in (tmp_path / "nowhere" / "out", taken, tmp_path / ("x" * 300), Path("/dev/null"), Path("/proc/x")):
        assert str(path) in refused(folder, "report", "toy", option, path, code=2)
    assert files(tmp_path) == {"taken"}
    assert Path("/dev/null").is_char_device()


def test_a_page_that_fails_leaves_the_earlier_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", _full_disk)
    assert f"{path} cannot be written: No space left" in refused(folder, "report", "toy", "--html", path, code=2)
    assert (files(tmp_path), path.read_text()) == ({"report.html"}, "old")


def _full_disk(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("option", ["--html", "--svg", "--csv"])
def test_an_empty_path_is_refused(folder: Path, option: str) -> None:
    assert "the path is empty" in refused(folder, "report", "toy", option, "", code=2)
    assert files(folder) == {"bssearch.db"}


@pytest.mark.parametrize("name", TABLES)
def test_where_one_table_cannot_be_written_none_is_and_that_one_is_named(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    assert f"{tmp_path / name} cannot be written: the path is a folder" in refused(
        folder, "report", "toy", "--csv", tmp_path, code=2
    )
    assert files(tmp_path) == {name}


def test_earlier_tables_are_replaced_and_nothing_else_is_left(folder: Path, tmp_path: Path) -> None:
    for name in TABLES:
        (tmp_path / name).write_text("old")
    assert bssearch("report", "toy", "--csv", tmp_path, cwd=folder).returncode == 0
    assert files(tmp_path) == set(TABLES)
    assert all((tmp_path / name).read_text().count("\n") > 5 for name in TABLES)


def test_a_table_that_does_not_fit_on_the_disk_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "observed_rows", _full_disk)
    done = bssearch("report", "toy", "--csv", tmp_path, cwd=folder)
    assert f"{tmp_path / 'observations.csv'} cannot be written: No space left" in done.stderr
    assert (done.returncode, files(tmp_path)) == (2, set())
    bssearch("report", "toy", "--csv", tmp_path / "new", cwd=folder)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["--html", "--svg", "--csv"])
def test_without_a_reached_trial_nothing_is_written(folder: Path, tmp_path: Path, option: str) -> None:
    assert "nearest: trial 1 (batch 32) with 0.7" in refused(
        folder, "report", "missed", option, tmp_path / "out", code=5
    )
    assert files(tmp_path) == set()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_data_frame_has_the_columns_and_values_of_the_table_of_trials(tmp_path: Path) -> None:
    coordinates = {"reference_learning_rate": 0.05, "dropout": 0.1}
    searched = [make_trial(number, seed=number, sampled=coordinates) for number in (1, 2)]
    url = f"sqlite:///{tmp_path / 'bssearch.db'}"
    with open_store(url) as store:
        add_study(store, make_spec(), [*searched, make_trial(3, phase=Phase.CONFIRM, seed=3)])
    assert bssearch("report", "toy", "--csv", tmp_path, cwd=tmp_path).returncode == 0
    rows = read(tmp_path / "trials.csv")
    frame = trials_frame("toy", db=url)
    assert {"sampled.dropout", "steps_x_step_time_s", "threads", "eval_every_steps", "retry_of"} <= set(rows[0])
    assert {*frame.columns} == {*rows[0], "sampled", "traceback"}
    assert list(frame.columns[:6]) == [
        "number",
        "state",
        "time_to_target_s",
        "batch_size",
        "learning_rate",
        "weight_decay",
    ]
    assert [float(row["sampled.dropout"]) for row in rows[:2]] == list(frame["sampled.dropout"][:2]) == [0.1, 0.1]
    assert list(frame["sampled"]) == [coordinates, coordinates, None]
    assert list(frame["number"]) == [int(row["number"]) for row in rows] == [1, 2, 3]


def test_the_tables_hold_every_row(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "tables"
    done = bssearch("report", "toy", "--csv", place, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(place / name) for name in TABLES]
    assert files(place) == set(TABLES)
    trials, batches, observations = (read(place / name) for name in TABLES)
    listed = json.loads(bssearch("trial", "list", "toy", "--format", "json", cwd=folder).stdout)
    assert [(int(one["number"]), float(one["time_to_target_s"]), one["state"]) for one in trials] == [
        (one["number"], one["time_to_target_s"], one["state"]) for one in listed
    ]
    answer = json.loads(bssearch("best", "toy", "--format", "json", cwd=folder).stdout)
    assert [(int(one["batch_size"]), float(one["time_to_target_s.median"])) for one in batches] == [
        (one["batch_size"], one["time_to_target_s"]["median"]) for one in answer["batches"]
    ]
    assert batches[0]["ended.reached"] == "3"
    assert len(observations) == 3 * len(trials)
    assert [(one["trial"], one["step"], float(one["metric"])) for one in observations[:3]] == [
        ("1", "0", 0.1),
        ("1", "10", 0.8),
        ("1", "20", 0.9),
    ]


def test_without_an_option_it_prints_the_answer_and_how_to_get_the_page(folder: Path) -> None:
    done = bssearch("report", "toy", cwd=folder)
    assert done.stdout == bssearch("best", "toy", cwd=folder).stdout
    assert "bssearch report toy --html report.html" in done.stderr


def compared(folder: Path, *studies: str) -> list[dict[str, Any]]:
    done = bssearch("study", "compare", *studies, "--format", "json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_studies_stand_side_by_side_each_on_its_own_device(folder: Path) -> None:
    first, second = compared(folder, "toy", "slow")
    answer = json.loads(bssearch("best", "toy", "--format", "json", cwd=folder).stdout)
    assert (first["device"], first["precision"]) == ("Test CPU", "fp32")
    assert (second["device"], second["precision"]) == ("Old CPU", "bf16")
    assert first["optimal_batch_size"] == answer["optimal"]["batch_size"]
    assert first["time_to_target_s"] == answer["optimal"]["time_to_target_s"]
    assert (first["flat_range"], first["b_crit"]) == (answer["flat_range"], answer["fit"]["b_crit"])
    assert first["largest_that_fits"] == answer["largest_that_fits"]["batch_size"]
    assert first["ratio_to_first"] == {"value": 1.0, "at_least": False, "low": None, "high": None}
    assert first["warnings"] == answer["warnings"]
    ratio: Mapping[str, float] = second["ratio_to_first"]
    assert ratio["value"] == pytest.approx(3.0)
    assert ratio["low"] < 3.0 < ratio["high"]
    assert ratio["low"] * ratio["high"] == pytest.approx(9.0, rel=1e-3)


def test_a_ratio_has_no_interval_below_three_runs_and_there_is_none_for_another_target(folder: Path) -> None:
    first, single, harder, missed = compared(folder, "toy", "single", "harder", "missed")
    assert single["ratio_to_first"]["value"] == pytest.approx(4.0 / first["time_to_target_s"]["median"])
    assert (single["ratio_to_first"]["low"], single["ratio_to_first"]["high"]) == (None, None)
    assert (harder["ratio_to_first"], harder["note"]) == (None, "other target")
    assert missed["optimal_batch_size"] is None
    assert "nearest: trial 1" in missed["note"]


@pytest.mark.parametrize("other", ["samples", "cost", "metric"])
def test_there_is_no_ratio_between_studies_of_other_objectives(folder: Path, other: str) -> None:
    first, second = compared(folder, "toy", other)
    assert (first["objective"], first["objective_value"]["median"]) == (
        "time_to_target",
        first["time_to_target_s"]["median"],
    )
    best = json.loads(bssearch("best", other, "--format", "json", cwd=folder).stdout)
    assert (second["objective"], second["objective_value"]) == (
        best["objective"],
        best["optimal"]["objective_value"],
    )
    assert (second["ratio_to_first"], second["note"]) == (None, "other objective")


def test_a_ratio_is_of_the_figure_of_the_objective(folder: Path) -> None:
    cost, cheap, hours = compared(folder, "cost", "cheap", "hours")
    ratio = cheap["ratio_to_first"]
    assert ratio["value"] == pytest.approx(cheap["objective_value"]["median"] / cost["objective_value"]["median"])
    assert ratio["value"] == pytest.approx(1 / 6)
    assert ratio["low"] < 1 / 6 < ratio["high"]
    assert (hours["ratio_to_first"], hours["note"]) == (None, "other unit of cost")
    _, better = compared(folder, "metric", "better")
    assert better["objective_value"]["median"] == pytest.approx(0.99)
    assert better["ratio_to_first"] == pytest.approx({"value": 1.1, "at_least": False, "low": 1.1, "high": 1.1})
    shown = bssearch("study", "compare", "samples", "toy", cwd=folder).stdout
    assert "samples to target" in shown and "other objective" in shown


def test_of_too_few_batch_sizes_no_critical_one_is_compared(folder: Path) -> None:
    _, two = compared(folder, "toy", "two")
    assert (two["b_crit"], two["fit_verdict"]) == (None, "too_few_points")
    shown = bssearch("study", "compare", "toy", "two", cwd=folder).stdout
    assert "too few points" not in shown.partition("note on")[0]
    single = json.loads(bssearch("best", "single", "--format", "json", cwd=folder).stdout)["warnings"][0]
    assert f"note on single: {single['message']}" in " ".join(
        bssearch("study", "compare", "toy", "single", cwd=folder).stdout.split()
    )


def test_the_comparison_for_people_and_for_spreadsheets(folder: Path) -> None:
    done = ran(folder, "study", "compare", "toy", "harder", "missed")
    assert "other target" in done.stdout and "target not reached" in done.stdout
    assert "missed: 0 of 1 trial reached accuracy 0.9" in done.stderr
    text = bssearch("study", "compare", "toy", "slow", "--format", "csv", cwd=folder).stdout
    assert [row["study"] for row in csv.DictReader(io.StringIO(text))] == ["toy", "slow"]


def test_wrong_comparisons_say_so(folder: Path) -> None:
    assert "nobody" in refused(folder, "study", "compare", "toy", "nobody", code=3)
    assert bssearch("study", "compare", "toy", cwd=folder).returncode == 2
    assert bssearch("report", "nobody", "--html", "x.html", cwd=folder).returncode == 3


# Paused trials --------------------------------------------------------------------------------------------------------


SIZE = 64


def stopped(state: TrialState) -> list[TrialRecord]:
    return [
        make_trial(900 + seed, batch_size=SIZE, seconds=0.4, seed=seed, state=state, best_metric=0.5)
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[TrialState, Path]:
    """Two both, each with the same study, but for the state of three of its trials."""
    places = {state: tmp_path_factory.mktemp(state) for state in (TrialState.PRUNED, TrialState.PAUSED)}
    for state, place in places.items():
        with open_store(f"sqlite:///{place}/bssearch.db") as store:
            add_study(store, make_spec(), [*law_trials(), *stopped(state)])
    return places


def said(place: Path, *arguments: str) -> str:
    done = bssearch(*arguments, cwd=place)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return re.sub(r"20\d\d-\d\d-\d\d[T ][\d:.]+\S*", "then", done.stdout + done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("best", "toy", "--format", "json"),
        ("best", "toy"),
        ("trial", "list", "toy"),
        ("trial", "list", "toy", "--format", "json"),
        ("study", "show", "toy"),
        ("study", "show", "toy", "--format", "json"),
        ("report", "toy"),
        ("trial", "show", "toy", "1"),
    ],
    ids=" ".join,
)
def test_it_counts_as_a_pruned_one(both: dict[TrialState, Path], arguments: tuple[str, ...]) -> None:
    pruned, paused = (re.sub(r"[-─\s]+", " ", said(place, *arguments)) for place in both.values())
    assert paused.replace(MEANINGS["paused"], MEANINGS["pruned"]).replace("paused", "pruned") == pruned
