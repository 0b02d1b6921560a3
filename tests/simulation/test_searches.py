"""Searches of recorded tables on a virtual clock, plain Optuna studies, a table as a study, and the scripts."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from bssearch.errors import UsageError
from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial, write_table
from bssearch.records import ParameterValue, Progress, Target
from bssearch.search.samplers.time_model.candidates import Run
from bssearch.spec import ConfirmSpec, PrunerSpec
from tests.benchmarks.harness import script as run
from tests.benchmarks.simulate import optuna_baselines, pruning, searches, searching
from tests.benchmarks.simulate.draws import PRUNERS
from tests.benchmarks.simulate.optuna_baselines import OptunaSearch
from tests.benchmarks.simulate.processes import repeating
from tests.benchmarks.simulate.searches import Plan, Search, search, simulate_searches, summarize_searches
from tests.benchmarks.simulate.table_space import TableSpace, table_space
from tests.benchmarks.simulate.table_study import TableRows, TableSearchSpace, table_study
from tests.factories import make_plan
from tests.simulation.lines import Seconds, grid

# Points 0 … 4, of batch sizes 8, 16, 16, 32 and 64; best 4 s, so that 5 s is within 25 % and 4.25 s within 10 %.
CELLS: Seconds = {(8, 0.1): [10], (16, 0.01): [4, 6], (16, 0.1): [7], (32, 0.1): [4], (64, 0.1): [2, 300]}
SPACE = table_space(grid(CELLS))
SMALL: Seconds = {(size, rate): [int(4 + size / 16 + 64 / size), 9] for size in (8, 16, 32, 64) for rate in (0.01, 0.1)}


class Scripted:
    """Asks for points in an order, the last one for ever; its incumbent is the one that reached last."""

    def __init__(self, *points: int) -> None:
        self.ended_numbers: list[int] = []
        self.seen: list[list[tuple[int, bool, float | None]]] = []
        self._points = points

    def __call__(self, space: TableSpace, sampler: str, **options: Any) -> Scripted:
        return self

    def ask(self, runs: Sequence[Run]) -> int:
        self.seen.append([(run.point, run.running, run.hit) for run in runs])
        return self._points[min(len(runs), len(self._points) - 1)]

    def ended(self, number: int, run: Run) -> None:
        self.ended_numbers.append(number)

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        hits = [run.point for run in runs if run.hit is not None]
        return hits[-1] if hits else None


def scripted(
    *points: int, budget: float = 60.0, pruner: str = "none", workers: int = 1, space: TableSpace = SPACE
) -> tuple[Search, Scripted]:
    """Run a search that asks for points in an order."""
    script = Scripted(*points)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna_baselines, "OptunaSearch", script)
        return search(Plan(space, budget, workers=workers), "random", pruner, 0), script


def test_it_costs_what_was_trained_until_the_incumbent_is_near_the_best() -> None:
    found, _ = scripted(0, 1, 3, 2)
    assert SPACE.seconds[1] == 5.0
    first_two = found.within["25"]
    assert first_two in (14.0, 16.0), "10 s, and one of the seeds of 4 and 6 s, of which the mean counts"
    assert found.within["10"] == first_two + 4.0


def test_what_is_near_first_counts_although_the_incumbent_changes_and_the_last_one_is_recommended() -> None:
    found, _ = scripted(3, 0, budget=30.0)
    assert found.within == {"25": 4.0, "10": 4.0}
    assert not found.recommended_within_10, "batch size 8 has no cell within 10 %"
    found, _ = scripted(3, 3, budget=30.0)
    assert found.recommended_within_10
    assert found.trials == 8, "seven have run for 4 s each, and the eighth is under way"


def test_of_several_workers_all_are_paid() -> None:
    found, _ = scripted(0, 3, 0, workers=3)
    assert found.within["10"] == 12.0


def test_a_sampler_sees_what_runs_what_has_reached_and_what_was_stopped() -> None:
    _, sampler = scripted(3, 0, 3, pruner="cap", budget=11.0)
    assert sampler.seen == [[], [(3, False, 4.0)], [(3, False, 4.0), (0, False, None)]]
    assert sampler.ended_numbers == [0, 1]
    _, sampler = scripted(3, 0, 3, workers=2, budget=9.0)
    assert sampler.seen[1:] == [[(3, True, None)], [(3, False, 4.0), (0, True, None)]]


def found(near: float, nearer: float, *, right: bool = True, trials: int = 3) -> Search:
    return Search({"25": near, "10": nearer}, right, trials, probes_s=0.5)


def test_a_summary_counts_misses_as_infinite() -> None:
    one = summarize_searches([found(1, 2), found(3, math.inf, right=False, trials=9), found(2, math.inf)])
    assert (one.cost_to_within_25, one.found_25, one.cost_to_within_25_p90) == (2, 1.0, 3)
    assert (one.cost_to_within_10, one.found_10, one.cost_to_within_10_p90) == (None, 1 / 3, None)
    assert (one.recommended_within_10, one.trials, one.probes_s, one.repeats) == (2 / 3, 3, 0.5, 3)


def plan(cells: Seconds = SMALL, **options: Any) -> Plan:
    return Plan(table_space(grid(cells)), **{"budget": 120.0, "default": 0, **options})


PAIRS = [("random", "none"), ("tpe", "median"), ("tpe", "race:lag=2"), ("auto", "balanced")]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_and_pairs_do_not_depend_on_each_other() -> None:
    first = simulate_searches(plan(), PAIRS, repeats=2, processes=0)
    assert first == simulate_searches(plan(), PAIRS[::-1], repeats=2, processes=0)
    assert list(first) == PAIRS
    others = simulate_searches(plan(seed=1), PAIRS, repeats=2, processes=0)
    assert all(first[pair] != others[pair] for pair in PAIRS if pair[0] != "auto")


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing() -> None:
    here, one, two = (simulate_searches(plan(), PAIRS, repeats=4, processes=number) for number in (0, 1, 2))
    assert here == one == two


@pytest.mark.parametrize(
    ("sampler", "pruner", "workers"),
    [
        ("auto", "none", 1),
        ("auto", "balanced", 3),
        ("auto", "hyperband", 1),
        ("random", "asha", 1),
        ("tpe", "cap", 3),
        ("tpe", "fast", 1),
        ("tpe", "median", 3),
    ],
)
def test_a_search_keeps_to_its_budget_with_any_sampler_and_pruner(sampler: str, pruner: str, workers: int) -> None:
    one = search(plan(workers=workers, budget=60.0), sampler, pruner, 0)
    assert one.trials >= 4
    assert all(seconds <= 60.0 or math.isinf(seconds) for seconds in one.within.values())


@pytest.mark.parametrize("step_seconds", [0.01, 0.05])
def test_the_step_times_of_all_batch_sizes_are_charged_to_ours_and_to_nobody_else(step_seconds: float) -> None:
    space = table_space(grid(SMALL, step_seconds=step_seconds))
    found = {sampler: search(Plan(space, 60.0), sampler, "none", 0) for sampler in ("auto", "random")}
    assert found["auto"].probes_s == pytest.approx(4 * 20 * step_seconds)
    assert found["random"].probes_s == 0.0
    assert found["auto"].within["25"] > found["auto"].probes_s


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.0}, "budget = 0 must be a number of train seconds > 0"),
        ({"budget": math.nan}, "budget = nan must be"),
        ({"budget": math.inf}, "budget = inf must be"),
        ({"workers": 0}, "workers = 0 must be >= 1"),
        ({"seed": -1}, "seed = -1 must be >= 0"),
    ],
)
def test_a_plan_out_of_bounds_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        plan(**options)


# Plain studies of Optuna ----------------------------------------------------------------------------------------------


EQUAL: Seconds = {(size, rate): [5] for size in (8, 16, 32) for rate in (0.01, 0.1)}


def ran(point: int, *gains: float) -> Run:
    progress = Progress()
    for moment, gain in enumerate(gains):
        progress.add(float(moment + 1), gain)
    return Run(point, progress, running=False)


def trials(found: OptunaSearch) -> list[FrozenTrial]:
    return list(found.study.get_trials(deepcopy=False))


def test_a_study_is_told_the_time_to_target_or_twice_the_limit_and_the_shortfall() -> None:
    found = OptunaSearch(table_space(grid(EQUAL)), "random", seed=0)
    hit, missed, never_seen, waiting = (found.ask([]) for _ in range(4))
    reached = ran(hit, 0.5, 1.0)
    reached.hit = 2.0
    found.ended(0, reached)
    found.ended(1, ran(missed, 0.3, 0.2, math.nan))
    found.ended(2, ran(never_seen))
    assert [trial.state for trial in trials(found)] == [TrialState.COMPLETE] * 3 + [TrialState.RUNNING]
    assert [trial.value for trial in trials(found)] == [2.0, 2 * 20 + 0.7, 2 * 20, None]
    assert found.incumbent([reached, ran(missed, 0.3), ran(waiting)]) == hit
    assert found.incumbent([ran(missed, 0.3)]) is None


def test_the_first_configuration_comes_first() -> None:
    space = table_space(grid(EQUAL))
    for default in range(len(space.cells)):
        assert OptunaSearch(space, "tpe", default=default, seed=0).ask([]) == default


@pytest.mark.parametrize("sampler", ["random", "tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_only_combinations_that_occur_are_run(sampler: str) -> None:
    space = table_space(grid({(8, 0.01): [5], (16, 0.1): [7], (32, 1.0): [6], (64, 0.01): [9]}))
    found = OptunaSearch(space, sampler, seed=1)
    asked = []
    for number in range(14):
        point = found.ask([])
        asked.append(point)
        run = ran(point, 1.0)
        run.hit = space.seconds[point]
        found.ended(number, run)
    assert set(asked) <= set(range(4)) and len(set(asked)) > 1
    told = [trial for trial in trials(found) if trial.state is TrialState.COMPLETE]
    assert [space.points[trial.params["batch_size"], trial.params["learning_rate"]] for trial in told] == asked
    assert [trial.value for trial in told] == [space.seconds[point] for point in asked]


# A table as a study ---------------------------------------------------------------------------------------------------


TABLE_CELLS: Seconds = {
    (8, 0.01, "sgd"): [5, 6, 7],
    (8, 0.1, "adam"): [9],
    (32, 0.1, "sgd"): [4],
    (32, 1.0, "sgd"): [8],
}
NAMES = ("batch_size", "learning_rate", "optimizer")
TABLE = table_space(grid(TABLE_CELLS, NAMES, step_seconds=0.5))
TABLE_SPACE = TableSearchSpace.of(TABLE)


def test_the_space_is_the_combinations_that_occur() -> None:
    assert TABLE_SPACE.rungs == (8, 32)
    assert [one.name for one in TABLE_SPACE.dimensions()] == ["learning_rate", "optimizer"]
    assert TABLE_SPACE.cells([32]) == [
        (32, {"learning_rate": 0.1, "optimizer": "sgd"}),
        (32, {"learning_rate": 1.0, "optimizer": "sgd"}),
    ]
    assert len(TABLE_SPACE.cells([8, 32])) == 4


@pytest.mark.parametrize("point", range(4))
def test_a_cell_is_a_configuration_and_back(point: int) -> None:
    configuration = TABLE_SPACE.configuration(point)
    assert TABLE_SPACE.point_of(configuration) == TABLE_SPACE.point_of(configuration.in_micro_batches(4)) == point
    size, sampled = TABLE_SPACE.coordinates(point)
    assert TABLE_SPACE.encode(configuration) == sampled
    assert TABLE_SPACE.nearest(configuration) == (size, sampled)
    assert TABLE_SPACE.decode(size, sampled) == configuration
    assert not TABLE_SPACE.at_edge(configuration)


def test_a_study_has_the_tables_limit_and_target_and_a_budget_over_all_workers() -> None:
    spec, _ = table_study(
        TABLE, default=2, pruner=PrunerSpec(name="safe"), workers=4, seed=3, budget=100.0, confirm=ConfirmSpec(runs=1)
    )
    assert spec.default_configuration == TABLE_SPACE.configuration(2)
    assert (spec.budget.wall_seconds, spec.budget.trial_train_seconds) == (25.0, 20.0)
    assert (spec.record_target, spec.seed, spec.executor.slots, spec.pruner.name) == (TABLE.target, 3, 4, "safe")


def test_a_plan_runs_the_recorded_trial_of_its_cell_that_its_seed_picks() -> None:
    rows = TableRows(TABLE, TABLE_SPACE)
    found = [rows(make_plan(configuration=TABLE_SPACE.configuration(0), seed=seed)).target_seconds for seed in range(4)]
    assert found == [5.0, 6.0, 7.0, 5.0]


RAGGED: Seconds = {(32, 0.1): [6, 8], (8, 0.1): [10, 12], (8, 0.01): [4, 300], (32, 0.001): [9]}


def test_the_space_is_the_tables_own_grid_and_holds_only_what_occurs() -> None:
    space = table_space(grid(RAGGED))
    assert space.grid == ((8, 32), (0.001, 0.01, 0.1))
    assert space.cells == ((8, 0.01), (8, 0.1), (32, 0.001), (32, 0.1))
    assert space.places == ((0, 1), (0, 2), (1, 0), (1, 2))
    assert [len(trials) for trials in space.trials] == [2, 2, 1, 2]
    assert (space.limit, space.target_gain) == (20.0, 1.0)


def test_a_cells_true_time_is_the_mean_over_its_seeds_and_infinite_if_over_a_tenth_never_reach() -> None:
    space = table_space(grid(RAGGED))
    assert (space.seconds, space.best) == ((math.inf, 11.0, 9.0, 7.0), 7.0)
    assert space.seconds_by_batch_size == {8: 11.0, 32: 7.0}
    many = table_space(grid({(8, 0.1): [10, 12], (32, 0.1): [300, *[6] * 9], (32, 1.0): [300, *[6] * 8]}))
    assert many.seconds == pytest.approx((11.0, 7.4, math.inf)), "one miss in ten counts as the limit, 20 s"


def test_the_step_time_of_a_batch_size_is_the_median_of_its_trials() -> None:
    lines = grid({(8, 0.1): [4, 5, 6], (16, 0.1): [7]}, step_seconds=0.5)
    slow = replace(lines.trials[0], steps=tuple(range(1, 5)))
    assert table_space(replace(lines, trials=(slow, *lines.trials[1:]))).step_seconds == {8: 0.5, 16: 0.5}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("batch_size=32", "has no learning_rate; it must have batch_size, learning_rate"),
        ("batch_size=64,learning_rate=0.1", "batch_size = 64 is not in table 'grid'; there are 8, 32"),
        ("batch_size=many,learning_rate=0.1", "batch_size = many is not in table 'grid'"),
        ("batch=32,learning_rate=0.1", "has no parameter 'batch'; it has batch_size, learning_rate"),
        ("batch_size=32,learning_rate=0.01", "the combination does not occur"),
        ("batch_size=32,batch_size=8,learning_rate=0.1", "batch_size is given twice"),
        ("batch_size=32,,learning_rate=0.1", "'' must be name=value"),
    ],
)
def test_a_configuration_that_is_not_in_the_table_is_refused(told: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        table_space(grid(RAGGED)).point_of(told)


def no_batch_size(cell: tuple[ParameterValue, ...]) -> Seconds:
    return {cell: [5], (16, 0.1): [5]}


@pytest.mark.parametrize(
    ("cells", "names", "said"),
    [
        ({(0.1,): [5], (0.2,): [5]}, ("learning_rate",), "table 'grid' has no column 'param.batch_size'"),
        ({(8, 0.1): [5, 6]}, None, "table 'grid' has one combination of parameters"),
        ({(8, None): [5], (16, 0.1): [5]}, None, "trial 0 of table 'grid': param.learning_rate = None must be set"),
        (no_batch_size((8.5, 0.1)), None, "param.batch_size = 8.5 must be a whole number >= 1"),
        (no_batch_size(("big", 0.1)), None, "param.batch_size = 'big' must be a whole number >= 1"),
        (no_batch_size((0, 0.1)), None, "param.batch_size = 0 must be a whole number >= 1"),
        (no_batch_size((8, -0.1)), None, "param.learning_rate = -0.1 must be a number > 0"),
        (no_batch_size((8, math.nan)), None, "param.learning_rate = nan must be finite"),
        ({(8, 0.1): [5, 30], (16, 0.1): [30]}, None, "no combination of parameters of table 'grid' reaches the target"),
    ],
)
def test_a_table_that_cannot_be_searched_is_refused(cells: Seconds, names: tuple[str, ...] | None, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        table_space(grid(cells, names or ("batch_size", "learning_rate")))


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
