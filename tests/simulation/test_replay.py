"""Recorded trials on a virtual clock, draws of trials and plain searches: their costs by hand."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from bssearch.errors import UsageError
from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial
from bssearch.records import Observation, TrialOutcome, TrialRequest, TrialState
from bssearch.search.history import History
from bssearch.search.pruners.base import Action, Cap, Pruner, PruningController, Standings
from bssearch.search.samplers.base import make_sampler
from tests.benchmarks.simulate.draws import (
    PRUNERS,
    Draw,
    Order,
    Summary,
    proportion_interval,
    simulate,
    summarize,
)
from tests.benchmarks.simulate.plain import PlainPlanner, plain
from tests.benchmarks.simulate.replay import Playing, Replay, ended_before, replays, with_target
from tests.benchmarks.simulate.table_space import TableSpace, table_space
from tests.benchmarks.simulate.truth import Truth
from tests.factories import make_plan, make_trial, not_none
from tests.simulation.lines import TARGET, Seconds, grid, line, table
from tests.simulation.played import Played, recorded, search_spec

PAUSED, REACHED, RUNNING = TrialState.PAUSED, TrialState.REACHED, TrialState.RUNNING


def played(pruner: Pruner, *seconds: float, workers: int = 1) -> Played:
    return Played([line(one) for one in seconds], pruner, workers=workers)


def test_without_pruning_every_trial_runs_to_its_target_or_its_end() -> None:
    found = played(Pruner(), 10, 4, 300)
    assert (found.cost, found.hits) == (10 + 4 + 100, [(10.0, 10.0), (14.0, 4.0)])
    assert found.now == found.cost
    assert found.ends == [(REACHED, 10.0), (REACHED, 4.0), (TrialState.EXHAUSTED, 100.0)]


def test_workers_run_at_once_and_a_new_incumbent_caps_those_that_run_at_their_next_evaluation() -> None:
    found = played(Cap(), 10, 4, 300, workers=2)
    # 10 and 4 begin together; at 4 s the first has come to the cap, and 300 runs from there for 4 s.
    assert (found.now, found.cost, found.ends[0]) == (8.0, 5 + 4 + 4, (TrialState.CAPPED, 5.0))


class OnceInTheMiddle(Pruner):
    """Pauses every trial at its fifth second, and resumes it when no trial is left to begin."""

    def judge(self, number: int, standings: Standings) -> Action:
        return Action.WAIT if standings.curves[number].now == 5.0 else Action.GO_ON

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        return None if fresh else max(standings.waiting)


def test_what_waited_goes_on_from_where_it_was() -> None:
    found = played(OnceInTheMiddle(), 10, 8)
    assert found.cost == 18.0
    assert found.hits == [(13.0, 8.0), (18.0, 10.0)], "the second goes on first, and no second is paid twice"
    assert found.changes == [
        (1, RUNNING),
        (1, PAUSED),
        (2, RUNNING),
        (2, PAUSED),
        (2, RUNNING),
        (2, REACHED),
        (1, RUNNING),
        (1, REACHED),
    ]


@pytest.mark.parametrize(("budget", "hits"), [(3.49, 0), (3.5, 1), (9.4, 2), (9.5, 3)])
def test_what_comes_after_the_budget_does_not_happen(budget: float, hits: int) -> None:
    found = Played([line(3)] * 9, Pruner(), budget=budget, charged=0.5)
    assert found.hits == [(0.5 + 3 * (one + 1), 3.0) for one in range(hits)]
    assert not found.clock.is_done
    assert found.changes[-1] == (hits + 1, RUNNING), "it is under way when all is spent"


def playing(replay: Replay, limit: float, state: TrialState = TrialState.CAPPED) -> Playing:
    plan = make_plan(train_seconds_limit=limit, limit_state=state)
    return Playing(replay, TrialRequest(number=1, plan=plan, target=TARGET))


@pytest.mark.parametrize(
    ("limit", "evaluations", "state", "ended"),
    [(2.5, 2, TrialState.CAPPED, 2.5), (3.0, 3, TrialState.EXHAUSTED, 3.0), (9.0, 3, TrialState.EXHAUSTED, 3.0)],
)
def test_a_trial_ends_at_its_limit_or_where_its_record_does(
    limit: float, evaluations: int, state: TrialState, ended: float
) -> None:
    trial = playing(Replay([1.0, 2.0, 3.0], [0.2, 0.6, 0.4], math.inf, 3.0, [10, 20, 30]), limit)
    found = [trial.advance() for _ in range(evaluations)]
    assert [(one.step, one.metric) for one in found if isinstance(one, Observation)] == [
        (10, 0.2),
        (20, 0.6),
        (30, 0.4),
    ][:evaluations]
    outcome = trial.advance()
    assert isinstance(outcome, TrialOutcome)
    assert (outcome.state, outcome.train_seconds, outcome.best_metric) == (state, ended, 0.6)
    assert (outcome.steps, outcome.samples) == (10 * evaluations, 320 * evaluations)


def test_a_trial_has_reached_the_target_with_the_evaluation_that_meets_it() -> None:
    trial = playing(Replay([1.0, 2.0], [0.2, 1.1], 2.0, 3.0, [10, 20]), 3.0)
    reached = []
    for _ in range(2):
        trial.advance()
        reached.append(trial.has_reached)
    assert reached == [False, True]
    outcome = trial.outcome(REACHED, "")
    assert (outcome.time_to_target_s, outcome.steps_to_target) == (2.0, 20)


def test_another_target_changes_when_trials_reach() -> None:
    lines = table(10, 20)
    assert [one.target_seconds for one in replays(with_target(lines, 0.5))] == [5.0, 10.0]
    with pytest.raises(UsageError, match="target = nan"):
        with_target(lines, math.nan)
    with pytest.raises(UsageError, match="reaches accuracy ≥ 2") as raised:
        replays(with_target(lines, 2.0))
    assert raised.value.hint == "the best accuracy in it is 1"


def test_trials_that_ended_at_the_target_cannot_say_when_they_meet_a_harder_one() -> None:
    lines = table(10, 20, 30)
    assert ended_before(lines, with_target(lines, 2.0).target) == 2
    assert ended_before(lines, with_target(lines, 0.5).target) == 0
    assert ended_before(with_target(lines, 0.5), lines.target) == 0, "they went on after it"


def test_all_policies_see_the_same_draws_and_the_same_seed_gives_the_same() -> None:
    lines = table(*range(3, 23))
    found = simulate(lines, ["none", "cap"], draws=8, trials=5, seed=3)
    assert [one.best for one in found["none"]] == [one.best for one in found["cap"]]
    assert len({one.best for one in found["none"]}) > 1
    assert found == simulate(lines, ["none", "cap"], draws=8, trials=5, seed=3)
    assert found != simulate(lines, ["none", "cap"], draws=8, trials=5, seed=4)
    assert {one.cost for one in found["none"]} == {1.0}
    assert {one.ratio for one in found["cap"]} == {1.0}
    assert summarize(found["cap"]).relative_cost.mean < 0.9


@pytest.mark.parametrize(("name", "workers"), [*zip([*PRUNERS, "race"], itertools.cycle((1, 3)))])
def test_every_policy_ends_and_costs_no_more_than_no_pruning(name: str, workers: int) -> None:
    found = simulate(table(*range(3, 43)), [name], draws=10, trials=12, seed=0, workers=workers)
    assert all(0 < one.cost <= 1 + 1e-9 and one.ratio >= 1 for one in found[name])
    assert all(0 < one.within <= one.cost + 1e-9 for one in found[name])


def draws(*ratios: float, cost: float = 0.5, best: Sequence[float] = ()) -> list[Draw]:
    return [
        Draw("lines", (best or range(len(ratios)))[index], cost, ratio, cost, cost)
        for index, ratio in enumerate(ratios)
    ]


def ends(found: Summary) -> tuple[float, float]:
    return not_none(found.miss_rate.low), not_none(found.miss_rate.high)


def test_a_summary_counts_what_is_not_within_5_percent() -> None:
    found = summarize(draws(1.0, 1.04, 1.06, math.inf))
    assert found.miss_rate.mean == 0.5
    assert found.regret == pytest.approx((1.04 * 1.06 * 9) ** 0.25)
    assert (found.relative_cost.low, found.relative_cost.mean, found.relative_cost.high) == (0.5, 0.5, 0.5)
    low, high = ends(found)
    assert low < 0.5 < high


def test_draws_with_one_winner_are_one_observation() -> None:
    ratios = [1.0] * 20 + [2.0] * 20
    low, high = ends(summarize(draws(*ratios)))
    assert high - low < 0.4
    assert ends(summarize(draws(*ratios, best=[1.0] * 20 + [2.0] * 20))) == pytest.approx((0.0, 1.0), abs=0.05)


def test_a_table_with_one_winner_gives_no_interval() -> None:
    found = summarize(draws(1.0, 1.0, 2.0, best=[3.0] * 3))
    assert (found.miss_rate.low, found.relative_cost.high) == (None, None)
    assert found.miss_rate.mean == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"names": ["cap", "nobody"]}, "pruner = 'nobody'"),
        ({"names": ["race:lag=1"]}, "pruner.options.lag = 1"),
        ({"names": ["safe:patience=.inf"]}, "pruner.options.patience = inf"),
        ({"names": ["safe:patience=x"]}, "pruner.options.patience = 'x'"),
        ({"names": ["safe:lag=2"]}, "pruner.options.lag"),
        ({"trials": 9}, "trials = 9 must be <= 4, the trials of table 'lines'"),
        ({"draws": 0}, "draws = 0 must be >= 1"),
        ({"workers": 0}, "workers = 0 must be >= 1"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], said: str) -> None:
    arguments = {"names": ["cap"], "draws": 1, "trials": 2, "seed": 0, **options}
    with pytest.raises(UsageError) as raised:
        simulate(table(3, 4, 5, 6), arguments.pop("names"), **arguments)  # type: ignore[arg-type]
    assert said in raised.value.message


def test_a_target_met_at_once_and_draws_without_a_hit_are_refused() -> None:
    at_once = RecordedTable("zero", TARGET, 5.0, (RecordedTrial(4, {}, 0, (0, 1), (0.0, 1.0), (1.0, 1.0)),))
    with pytest.raises(UsageError, match="trial 4 of table 'zero' ends, or meets the target, at 0 train seconds"):
        simulate(at_once, ["none"], draws=1, trials=1, seed=0)
    with pytest.raises(UsageError, match="none of 1 draws of 1 trials of table 'lines' has one that reaches"):
        simulate(table(*[30] * 200, 5), ["none"], draws=1, trials=1, seed=0)


@pytest.mark.parametrize(
    ("hits", "runs", "low", "high"),
    [
        # Clopper & Pearson, as R's binom.test has them.
        (0, 10, 0.0, 0.30850),
        (10, 10, 0.69150, 1.0),
        (5, 20, 0.08657, 0.49105),
        (7, 10, 0.34755, 0.93326),
    ],
)
def test_the_exact_intervals_of_whole_numbers(hits: int, runs: int, low: float, high: float) -> None:
    assert proportion_interval(hits / runs, runs) == pytest.approx((low, high), abs=1e-4)


SIZES, RATES = (8, 16, 32, 64), (0.01, 0.04, 0.16)

CELLS = [(size, rate) for size in SIZES for rate in RATES]


def log_seconds(size: int, rate: float) -> float:
    return 4 + 0.2 * math.log2(size / 32) ** 2 + 0.2 * math.log2(rate / 0.04)


def space(missing: Sequence[int] = (), noise: float = 0.1) -> TableSpace:
    """Return a table whose best is at batch size 32 and the least rate; ``missing`` of 4 seeds never reach, by cell."""
    rng = np.random.default_rng(0)
    cells: Seconds = {
        cell: [round(math.exp(log_seconds(*cell) + noise * rng.normal())) for _ in range(4)] for cell in CELLS
    }
    for place, (cell, seconds) in enumerate(cells.items()):
        count = missing[place] if place < len(missing) else 0
        cells = {**cells, cell: [*seconds[count:], *[5000.0] * count]}
    return table_space(grid(cells, limit=1000.0))


def test_the_truth_is_smooth_where_the_luck_of_few_seeds_is_not() -> None:
    truth = Truth(space())
    assert np.abs(truth.log_seconds - [log_seconds(*cell) for cell in CELLS]).max() < 0.15
    least = truth.seconds_by_batch_size
    assert list(least) == list(SIZES)
    assert min(least, key=lambda size: least[size]) == 32
    assert abs(float(np.median(truth.residuals))) < 1e-12
    assert 0.05 < truth.residuals.std() < 0.2


def test_a_fresh_run_is_the_same_for_one_cell_and_seed_and_differs_between_seeds() -> None:
    table = space()
    one, other = Truth(table), Truth(table)
    assert [one.fresh_run(3, seed) for seed in range(5)] == [other.fresh_run(3, seed) for seed in range(5)]
    assert len({one.fresh_run(3, seed).target_seconds for seed in range(30)}) > 20
    assert one.fresh_run(3, 7).target_seconds != one.fresh_run(4, 7).target_seconds


@pytest.mark.parametrize("point", [0, 7])
def test_a_fresh_run_takes_the_models_time_times_the_luck_of_another_cell(point: int) -> None:
    """Never a residual of its own cell: the winner's lucky run is not its own confirmation."""
    truth = Truth(space())
    off = [math.log(truth.fresh_run(point, seed).target_seconds) - truth.log_seconds[point] for seed in range(300)]
    own = truth.residuals[4 * point : 4 * point + 4]
    others = np.delete(truth.residuals, range(4 * point, 4 * point + 4))
    assert all(np.isclose(others, one, atol=1e-9).any() for one in off)
    assert not any(np.isclose(own, one, atol=1e-9).any() for one in off)
    assert abs(float(np.median(off))) < 0.05


def test_a_fresh_run_misses_as_often_as_the_recorded_ones() -> None:
    truth = Truth(space(missing=[1, 3]))
    missed = Counter(
        point for point in (0, 1, 2) for seed in range(400) if math.isinf(truth.fresh_run(point, seed).target_seconds)
    )
    assert missed[0] / 400 == pytest.approx(0.25, abs=0.08)
    assert missed[1] / 400 == pytest.approx(0.75, abs=0.08)
    assert missed[2] == 0
    assert [math.isinf(seconds) for seconds in truth.seconds[:3]] == [False, True, False], "half of them or more"


class Search:
    def __init__(self, pruner: str, *seconds: float) -> None:
        self.spec = search_spec(160.0, name=pruner, slack=1.5)
        self.history = History(self.spec)
        self.pruning = PruningController(self.spec, self.history)
        make = plain(Order(recorded(*(line(one) for one in seconds))))
        self.planner: PlainPlanner = make(self.spec, self.history, self.pruning, make_sampler(self.spec))

    def take(self, number: int, seconds: float, state: TrialState = TrialState.REACHED, gain: float = 0.1) -> None:
        trial = make_trial(number, state=state, seconds=seconds, seed=77)
        self.history.observe(number, [(seconds - 0.5, gain)])
        self.history.take(trial)
        self.pruning.take(trial)


@pytest.mark.parametrize(
    ("pruner", "limit", "state"),
    [("none", math.inf, TrialState.EXHAUSTED), ("cap", 60.0, TrialState.CAPPED), ("safe", 60.0, TrialState.CAPPED)],
)
def test_trials_run_to_their_end_or_to_the_cap(pruner: str, limit: float, state: TrialState) -> None:
    search = Search(pruner, 5, 6)
    plan, _ = search.planner.next_trial()
    assert plan is not None and math.isinf(plan.train_seconds_limit)
    search.take(1, 40.0)
    plan, _ = search.planner.next_trial()
    assert plan is not None and (plan.train_seconds_limit, plan.limit_state) == (limit, state)


def test_what_waits_and_has_hope_goes_on_before_another_begins_with_its_own_seed() -> None:
    search = Search("balanced", 5)
    for number, gain in ((1, 0.1), (2, 0.5), (3, 0.2)):
        search.take(number, 10.5, TrialState.PAUSED, gain)
    search.pruning.found_saved([1, 2, 3])
    plan, _ = search.planner.next_trial()
    assert plan is not None and (plan.resumed, plan.seed) == (2, 77)
