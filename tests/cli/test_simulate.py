"""A study's curves exported and simulated, and tables searched, from the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch.cli.simulate import _count, _with_ends
from bssearch.recorded import RecordedTable, RecordedTrial, read_table, write_table
from bssearch.records import Target
from bssearch.simulation import searching, studies
from bssearch.simulation.processes import run_pairs as run_in_processes
from bssearch.simulation.pruning import Interval
from tests.cli.task import INLINE, bssearch, space_of, write_task
from tests.simulation.lines import Seconds, grid


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("simulate")
    trials = tuple(
        RecordedTrial(
            number,
            {},
            0,
            tuple(range(1, 11)),
            tuple(0.1 * (number + 1) * step for step in range(1, 11)),
            tuple(step / 10 for step in range(1, 11)),
        )
        for number in range(12)
    )
    write_table(RecordedTable("lines", Target(metric="accuracy", value=0.9), 12.0, trials), place / "lines.csv.gz")
    ended = [
        replace(one, steps=one.steps[:9], train_seconds=one.train_seconds[:9], metrics=one.metrics[:9])
        for one in trials
    ]
    ended[0] = replace(ended[0], metrics=(*ended[0].metrics[:8], 0.96))  # beyond its target when it ended
    write_table(
        RecordedTable("ended", Target(metric="accuracy", value=0.9), 12.0, tuple(ended)), place / "ended.csv.gz"
    )
    cells: Seconds = {(size, rate): [6 + size // 8, 9] for size in (8, 16, 32) for rate in (0.01, 0.1)}
    write_table(grid(cells), place / "cells.csv.gz")
    return place


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations run here: to start processes takes longer than what they do."""

    def run_pairs(*arguments: Any, processes: int, **options: Any) -> Any:
        return run_in_processes(*arguments, processes=0, **options)

    for module in (searching, studies):
        monkeypatch.setattr(module, "run_pairs", run_pairs)


SEARCH = ("cells.csv.gz", "--sampler", "random", "--budget", "9")


def test_policies_are_compared_on_the_same_draws(folder: Path) -> None:
    done = bssearch(
        *("simulate", "lines.csv.gz", "--pruner", "none", "--pruner", "safe", "--draws", "20", "--trials", "6"),
        *("--format", "json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["policies"]) == ["none", "safe"]
    assert found["tables"] == {"lines": found["policies"]}
    none, safe = found["policies"].values()
    assert (none["relative_cost"], none["miss_rate"], none["regret"], none["draws"]) == (1.0, 0.0, 1.0, 20)
    assert safe["relative_cost_low"] <= safe["relative_cost"] <= safe["relative_cost_high"] < 1.0
    assert 0 < safe["cost_to_within"] <= safe["relative_cost"]
    told = bssearch("simulate", "lines.csv.gz", "--draws", "5", "--trials", "6", cwd=folder)
    assert all(name in told.stdout for name in ("relative cost", "none", "lag-2", "safe", "balanced", "fast"))


def draws_of(folder: Path, *arguments: str, table: str = "lines.csv.gz") -> tuple[dict[str, Any], str]:
    """Return the figures of the policy ``safe``, and what was told beside them."""
    options = ("--pruner", "safe", "--draws", "5", "--format", "json")
    done = bssearch("simulate", table, *options, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["policies"]["safe"], done.stderr


def test_that_draws_with_one_winner_have_no_interval_is_told_and_only_then(folder: Path) -> None:
    one_winner, told = draws_of(folder, "--trials", "12")
    assert (one_winner["relative_cost_low"], one_winner["miss_rate_high"]) == (None, None)
    assert len(told.splitlines()) == 1
    several, told = draws_of(folder, "--trials", "3")
    assert several["miss_rate_low"] is not None
    assert told == ""


def test_a_draw_has_two_thirds_of_a_small_table_unless_it_is_said(folder: Path) -> None:
    assert draws_of(folder) == draws_of(folder, "--trials", "8") != draws_of(folder, "--trials", "7")


def test_trials_that_ended_before_another_target_are_told(folder: Path) -> None:
    options = ("--trials", "3")
    assert draws_of(folder, "--target", "0.5", *options)[1] == draws_of(folder, *options)[1] == ""
    _, told = draws_of(folder, "--target", "0.95", *options, table="ended.csv.gz")
    assert "11 of 12" in told and "0.95" in told


def test_a_policy_that_is_named_twice_is_played_once(folder: Path) -> None:
    done = bssearch(
        *("simulate", "lines.csv.gz", "--pruner", "safe", "--pruner", "none", "--pruner", "safe"),
        *("--draws", "3", "--trials", "3", "--format", "csv"),
        cwd=folder,
    )
    assert [row.split(",")[0] for row in done.stdout.splitlines()] == ["pruner", "safe", "none"]


@pytest.mark.parametrize(
    ("figure", "unit", "digits", "shown"),
    [
        (Interval(0.5, 0.25, 0.75), 1.0, "{:.3f}", "0.500 [0.250, 0.750]"),
        (Interval(0.5, 0.25, 0.75), 100.0, "{:.1f}", "50.0 [25.0, 75.0]"),
        (Interval(0.5, None, None), 100.0, "{:.1f}", "50.0"),
    ],
)
def test_a_figure_stands_with_its_interval_in_its_unit(figure: Interval, unit: float, digits: str, shown: str) -> None:
    assert _with_ends(figure, unit, digits) == shown


def test_counts_are_told_in_the_number_of_their_noun() -> None:
    assert [_count(number, "draw") for number in (0, 1, 2, 1200)] == ["0 draws", "1 draw", "2 draws", "1,200 draws"]


def searched(folder: Path, *arguments: str) -> str:
    done = bssearch("simulate", "cells.csv.gz", "--budget", "40", "--repeats", "3", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_table_is_searched_with_every_sampler_and_pruner(folder: Path) -> None:
    arguments = ("--sampler", "auto", "--sampler", "random", "--pruner", "none", "--pruner", "cap")
    first = ("--default", "batch_size=8,learning_rate=0.1")
    found = json.loads(searched(folder, *arguments, *first, "--format", "json"))
    assert list(found) == ["samplers"]
    assert list(found["samplers"]) == ["auto+none", "auto+cap", "random+none", "random+cap"]
    for one in found["samplers"].values():
        assert {
            *("cost_to_within_25", "found_25", "cost_to_within_10", "found_10", "recommended_within_10", "trials")
        } <= set(one)
        assert 0 <= one["found_10"] <= one["found_25"] <= 1
        assert (one["cost_to_within_25"] is None) == (one["found_25"] < 0.5)
        assert one["repeats"] == 3
    assert json.loads(searched(folder, *arguments, *first, "--format", "json")) == found
    assert found["samplers"]["auto+none"]["probes_s"] > 0 == found["samplers"]["random+none"]["probes_s"]


def test_a_search_is_told_as_a_table_or_as_rows_and_prunes_by_pace_where_nothing_is_said(folder: Path) -> None:
    told = searched(folder, "--sampler", "random", "--workers", "2")
    assert all(words in told for words in ("s to within 25 %", "found 10 %", "right batch size", "random+balanced"))
    head, row = searched(folder, "--sampler", "random", "--format", "csv").splitlines()
    assert head.startswith("sampler,pruner,cost_to_within_25,found_25")
    assert row.startswith("random,balanced,")


def test_another_target_takes_another_time(folder: Path) -> None:
    """Half the way takes half the time, and so half the budget."""
    whole, half = (
        json.loads(searched(folder, "--sampler", "random", "--pruner", "none", "--format", "json", *target))
        for target in ((), ("--target", "0.5"))
    )
    assert half["samplers"]["random+none"]["trials"] > 1.5 * whole["samplers"]["random+none"]["trials"]


STUDY = ("--study", "--repeats", "2", "--budget", "60")


def studied(folder: Path, *arguments: str) -> str:
    done = bssearch("simulate", "cells.csv.gz", *STUDY, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whole_studies_are_run_and_told_as_json(folder: Path) -> None:
    found = json.loads(studied(folder, "--sampler", "random", "--pruner", "cap", "--format", "json"))
    assert list(found) == ["studies"]
    assert list(found["studies"]) == ["random+cap"]
    (one,) = found["studies"].values()
    shares = {"recommended_within_5", "recommended_within_10", "claimed_within_5", "covered_95", "provisional"}
    assert shares | {"cost_s", "runs"} <= set(one)
    assert all(one[share] is None or 0 <= one[share] <= 1 for share in shares)
    assert one["recommended_within_5"] <= one["recommended_within_10"]
    assert (one["repeats"], sum(one["recommended"].values())) == (2, 2)


def test_whole_studies_are_told_as_a_table_or_as_rows_and_are_ours_where_nothing_is_said(folder: Path) -> None:
    told = studied(folder)
    assert all(words in told for words in ("auto+balanced", "within 5 %", "95 % covered", "provisional"))
    head, *rows = studied(folder, "--sampler", "random", "--sampler", "grid", "--format", "csv").splitlines()
    assert head.startswith("sampler,pruner,recommended_within_5")
    assert [row.split(",")[:2] for row in rows] == [["random", "balanced"], ["grid", "balanced"]]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("lines.csv.gz", "--pruner", "saf"), 2, "pruner = 'saf'"),
        (("nothing.csv.gz",), 3, "'nothing.csv.gz'"),
        (("lines.csv.gz", "--trials", "13"), 2, "trials = 13"),
        (("lines.csv.gz", "--target", "2"), 2, "the best accuracy in it is 1"),
        (("lines.csv.gz", "--budget", "9"), 2, "--budget"),
        (("lines.csv.gz", "--repeats", "9"), 2, "--repeats"),
        (("lines.csv.gz", "--default", "a=1"), 2, "--default"),
        ((*SEARCH, "--draws", "9"), 2, "--draws"),
        ((*SEARCH, "--html", "page.html"), 2, "--html"),
        (("cells.csv.gz", *SEARCH), 2, "not 2"),
        (SEARCH[:-2], 2, "--budget SECONDS"),
        ((*SEARCH, "--sampler", "best"), 2, "sampler = 'best'"),
        ((*SEARCH, "--pruner", "best"), 2, "pruner = 'best'"),
        ((*SEARCH, "--default", "batch_size=8"), 2, "has no learning_rate"),
        (("lines.csv.gz", *SEARCH[1:]), 2, "'param.batch_size'"),
        (("lines.csv.gz", "--study"), 2, "'param.batch_size'"),
        (("cells.csv.gz", "--study", "--sampler", "best"), 2, "'best'"),
        (("cells.csv.gz", "--study", "--pruner", "lag-2"), 2, "'lag-2'"),
        (("cells.csv.gz", "--study", "--draws", "9"), 2, "--draws"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = bssearch("simulate", *arguments, cwd=folder)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_study_is_exported_and_simulated(tmp_path: Path) -> None:
    budget, confirm = {"trials": 5, "trial_train_seconds": 0.5}, {"top": 1, "runs": 0}
    write_task(tmp_path, space=space_of(32, 64), executor=INLINE, budget=budget, confirm=confirm)
    assert bssearch("run", "task.yaml", cwd=tmp_path).returncode == 0
    done = bssearch("export", "task", "--to", "curves", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["task.csv.gz", "task.json"]
    stored = json.loads(bssearch("trials", "task", "--format", "json", cwd=tmp_path).stdout)
    table = read_table(tmp_path / "task.csv.gz")
    assert [trial.number for trial in table.trials] == [trial["number"] for trial in stored]
    assert [trial.parameters["batch_size"] for trial in table.trials] == [trial["batch_size"] for trial in stored]
    assert all(one.steps[-1] <= trial["steps"] for one, trial in zip(table.trials, stored, strict=True))
    assert all(one.train_seconds[-1] <= trial["train_seconds"] for one, trial in zip(table.trials, stored, strict=True))
    simulated = bssearch("simulate", "task.csv.gz", "--draws", "3", "--trials", "4", cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    missing = bssearch("export", "nobody", "--to", "curves", cwd=tmp_path)
    assert missing.returncode == 3
    unwritable = bssearch("export", "task", "--to", "curves", "--file", "no/folder.csv.gz", cwd=tmp_path)
    assert unwritable.returncode == 2
    assert "cannot be written" in unwritable.stderr


def test_a_study_without_curves_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("batch_size,reached,steps\n32,true,100\n")
    assert bssearch("import", "runs", "runs.csv", "--target", "0.9", cwd=tmp_path).returncode == 0
    done = bssearch("export", "runs", "--to", "curves", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no learning curves" in done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".db"]


def test_the_page_draws_every_policy(folder: Path) -> None:
    done = bssearch(
        *("simulate", "lines.csv.gz", "--draws", "5", "--trials", "6", "--pruner", "none", "--pruner", "safe"),
        *("--html", "page.html", "--format", "csv"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("pruner,draws,regret")
    page = (folder / "page.html").read_text(encoding="utf-8")
    drawn = re.findall(r"<text[^>]*>(.*?)</text>", page)
    assert {"operating points", "simple rules", "safe", "none"} <= {*drawn}
    assert "1 table · 5 draws of 6 trials each · 1 worker · seed 0" in page
    assert "Where it ran" not in page
    refused = bssearch("simulate", "lines.csv.gz", "--html", "no/page.html", cwd=folder)
    assert refused.returncode == 2
    assert "there is no folder no" in refused.stderr
