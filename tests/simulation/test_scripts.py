"""The scripts of the simulation, from their command lines."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial, write_table
from bssearch.records import Target
from tests.benchmarks.harness import script as run
from tests.benchmarks.simulate import pruning, searches, searching
from tests.benchmarks.simulate.draws import PRUNERS
from tests.benchmarks.simulate.processes import repeating
from tests.simulation.lines import Seconds, grid


def script(command: Callable[..., None], *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of a script in a folder, inside this process."""
    out, errors = io.StringIO(), io.StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["script", *words])
        patch.setenv("COLUMNS", "200")
        try:
            run(command)
        except SystemExit as ending:
            code = ending.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def printed(command: Callable[..., None], *words: str, cwd: Path) -> str:
    """Return the output of a script that succeeds."""
    done = script(command, *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    """Simulations run in this process: starting processes takes longer."""

    monkeypatch.setattr(searches, "repeating", lambda one, shared, processes: repeating(one, shared, 0))


def test_policies_are_compared_on_the_same_draws(folder: Path) -> None:
    words = ("--pruner", "none", "--pruner", "safe", "--draws", "20", "--trials", "6", "--format", "json")
    found = json.loads(printed(pruning.simulate, "lines.csv.gz", *words, cwd=folder))
    assert list(found["policies"]) == ["none", "safe"]
    assert found["tables"] == {"lines": found["policies"]}
    none, safe = found["policies"].values()
    assert (none["relative_cost"], none["miss_rate"], none["regret"], none["draws"]) == (1.0, 0.0, 1.0, 20)
    assert safe["relative_cost_low"] <= safe["relative_cost"] <= safe["relative_cost_high"] < 1.0
    assert 0 < safe["cost_to_within"] <= safe["relative_cost"]
    told = printed(pruning.simulate, "lines.csv.gz", "--draws", "5", "--trials", "6", cwd=folder)
    assert all(name in told for name in ("relative cost", *PRUNERS))


def draws_of(folder: Path, *words: str, table: str = "lines.csv.gz") -> tuple[dict[str, Any], str]:
    """Return the figures of the policy ``safe``, and the notes on stderr."""
    options = ("--pruner", "safe", "--draws", "5", "--format", "json")
    done = script(pruning.simulate, table, *options, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["policies"]["safe"], done.stderr


def test_draws_with_one_winner_have_no_interval_and_a_note(folder: Path) -> None:
    one_winner, notes = draws_of(folder, "--trials", "12")
    assert (one_winner["relative_cost_low"], one_winner["miss_rate_high"]) == (None, None)
    assert len(notes.splitlines()) == 1
    several, notes = draws_of(folder, "--trials", "3")
    assert several["miss_rate_low"] is not None
    assert notes == ""


def test_trials_that_ended_before_another_target_have_a_note(folder: Path) -> None:
    options = ("--trials", "3")
    assert draws_of(folder, "--target", "0.5", *options)[1] == draws_of(folder, *options)[1] == ""
    _, notes = draws_of(folder, "--target", "0.95", *options, table="ended.csv.gz")
    assert "11 of 12" in notes and "0.95" in notes


def searched(folder: Path, *words: str) -> str:
    return printed(searching.simulate, "cells.csv.gz", "--budget", "40", "--repeats", "3", *words, cwd=folder)


def test_a_table_is_searched_with_every_sampler_and_pruner(folder: Path) -> None:
    pairs = ("--sampler", "auto", "--sampler", "grid", "--sampler", "random", "--pruner", "none", "--pruner", "cap")
    words = (*pairs, "--default", "batch_size=8,learning_rate=0.1", "--format", "json")
    found = json.loads(searched(folder, *words))
    assert list(found) == ["samplers"]
    names = ["auto+none", "auto+cap", "grid+none", "grid+cap", "random+none", "random+cap"]
    assert list(found["samplers"]) == names
    for one in found["samplers"].values():
        assert {
            *("cost_to_within_25", "found_25", "cost_to_within_10", "found_10", "recommended_within_10", "trials")
        } <= set(one)
        assert 0 <= one["found_10"] <= one["found_25"] <= 1
        assert (one["cost_to_within_25"] is None) == (one["found_25"] < 0.5)
        assert one["repeats"] == 3
    assert json.loads(searched(folder, *words)) == found
    assert found["samplers"]["auto+none"]["probes_s"] > 0 == found["samplers"]["random+none"]["probes_s"]


def test_a_search_is_printed_as_a_table_or_as_rows_and_uses_the_pruner_of_a_study_by_default(folder: Path) -> None:
    told = searched(folder, "--sampler", "random", "--workers", "2")
    assert all(words in told for words in ("s to within 25 %", "found 10 %", "right batch size", "random+balanced"))
    head, row = searched(folder, "--sampler", "random", "--format", "csv").splitlines()
    assert head.startswith("sampler,pruner,cost_to_within_25,found_25")
    assert row.startswith("random,balanced,")


SEARCH = ("cells.csv.gz", "--sampler", "random", "--budget", "9")


@pytest.mark.parametrize(
    ("command", "words", "code", "said"),
    [
        (pruning.simulate, ("lines.csv.gz", "--pruner", "saf"), 2, "pruner = 'saf'"),
        (pruning.simulate, ("nothing.csv.gz",), 3, "'nothing.csv.gz'"),
        (pruning.simulate, ("lines.csv.gz", "lines.csv.gz"), 2, "named twice"),
        (pruning.simulate, ("lines.csv.gz", "--trials", "13"), 2, "trials = 13"),
        (pruning.simulate, ("lines.csv.gz", "--target", "2"), 2, "the best accuracy in it is 1"),
        (searching.simulate, SEARCH[:-2], 2, "--budget"),
        (searching.simulate, (*SEARCH, "--sampler", "best"), 2, "sampler = 'best'"),
        (searching.simulate, (*SEARCH, "--pruner", "best"), 2, "pruner = 'best'"),
        (searching.simulate, (*SEARCH, "--default", "batch_size=8"), 2, "has no learning_rate"),
        (searching.simulate, ("lines.csv.gz", *SEARCH[1:]), 2, "'param.batch_size'"),
        (searching.simulate, (*SEARCH, "--pruner", "race:lag=1"), 2, "lag = 1"),
    ],
)
def test_what_is_wrong_is_named(
    folder: Path, command: Callable[..., None], words: tuple[str, ...], code: int, said: str
) -> None:
    done = script(command, *words, cwd=folder)
    assert done.returncode == code
    assert said in done.stderr
