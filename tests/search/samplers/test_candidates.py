from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from bssearch.records import ParameterValue
from bssearch.search.samplers.time_model.candidates import SPREAD, SpaceCandidates
from bssearch.spec.space import SearchSpace
from tests.benchmarks.simulate.cells import MOST, GridCandidates

RNG = np.random.default_rng(0)
RATE = {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"}


def space(**parts: Any) -> SearchSpace:
    return SearchSpace.model_validate({"batch_size": [8, 16, 64], "learning_rate": RATE, **parts})


def candidates(**parts: Any) -> SpaceCandidates:
    made = space(**parts)
    return SpaceCandidates(made, made.rungs)


def test_a_grid_is_looked_at_whole_and_its_columns_lie_between_0_and_1() -> None:
    cells = list(itertools.product((8, 64), (0.1, 0.3), (0.0, 0.1, 0.5), ("sgd", "adamw")))
    grid = GridCandidates(("batch_size", "learning_rate", "dropout", "optimizer"), cells)
    everything = grid.among([3], [3], RNG)
    assert everything.tolist() == list(range(len(cells)))
    points = grid.take(everything)
    assert points.batch_sizes.tolist() == [cell[0] for cell in cells]
    assert np.exp(points.log_rates) == pytest.approx([cell[1] for cell in cells])
    assert grid.log_rate_width == pytest.approx(math.log(3))
    assert points.others.shape == (len(cells), 3), "a column for the dropout, one for each optimizer"
    assert points.others[0].tolist() == [0.0, 0.0, 1.0]
    assert points.others[3].tolist() == [0.5, 1.0, 0.0]


def test_of_a_large_grid_what_was_tried_its_neighbours_and_some_others_are_looked_at() -> None:
    cells = list(itertools.product(range(1, 11), (0.1, 0.2, 0.3, 0.4), range(20)))
    grid = GridCandidates(("batch_size", "learning_rate", "depth"), cells)
    assert len(cells) > MOST
    best = cells.index((5, 0.2, 7))
    among = set(grid.among([0, 1, best], [best], RNG).tolist())
    beside = [(4, 0.2, 7), (6, 0.2, 7), (5, 0.1, 7), (5, 0.3, 7), (5, 0.2, 6), (5, 0.2, 8)]
    assert {0, 1, best, *(cells.index(cell) for cell in beside)} <= among
    assert SPREAD <= len(among) <= SPREAD + 3 + len(beside)


def test_a_point_keeps_its_index_and_what_was_made_beside_it_does_not() -> None:
    found = candidates(dropout={"low": 0.0, "high": 0.5})
    here: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "dropout": 0.2}
    there: dict[str, ParameterValue] = {"reference_learning_rate": 0.2, "dropout": 0.2}
    first = found.add(16, here)
    assert len(found.among([first], [first], RNG)) > SPREAD
    assert found.add(16, dict(here)) == first
    second = found.add(64, there)
    assert second == 1, "what was made is forgotten"
    assert found[first] == (16, here)
    assert found[second] == (64, there)
    points = found.take(np.array([second, first]))
    assert points.batch_sizes.tolist() == [64, 16]
    assert np.exp(points.log_rates) == pytest.approx([0.2 * math.sqrt(2), 0.1 / math.sqrt(2)]), "as really run"
    assert points.others.tolist() == [[0.4], [0.4]]


def test_the_neighbours_of_the_best_are_looked_at_along_every_coordinate() -> None:
    found = candidates(dropout=[0.0, 0.1, 0.5], clip_norm={"low": 0.1, "high": 10.0})
    best: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "dropout": 0.1, "clip_norm": 1.0}
    first = found.add(16, best)
    looked_at = [found[int(index)] for index in found.among([first], [first], RNG)]
    assert (8, best) in looked_at
    assert (64, best) in looked_at
    assert (16, {**best, "dropout": 0.0}) in looked_at
    assert (16, {**best, "dropout": 0.5}) in looked_at
    for name in ("reference_learning_rate", "clip_norm"):
        rest = {key: value for key, value in best.items() if key != name}
        moved = [values[name] for size, values in looked_at if size == 16 and rest.items() <= values.items()]
        assert min(moved) < best[name] < max(moved)  # type: ignore[operator, type-var]


@pytest.mark.parametrize(("dropout", "beside"), [(0.0, {0.1}), (0.1, {0.0, 0.2}), (0.4, {0.2, 0.5}), (0.5, {0.4})])
def test_the_neighbours_of_a_number_among_choices_are_the_next_in_order(dropout: float, beside: set[float]) -> None:
    found = candidates(dropout=[0.5, 0.0, 0.2, 0.1, 0.4], batch_size=[8, 16, 32, 64, 128])
    best: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "dropout": dropout}
    for size, next_to_it in ((8, {16}), (32, {16, 64}), (128, {64})):
        first = found.add(size, best)
        looked_at = [found[int(index)] for index in found.among([first], [first], RNG)]
        alike = [(here, values) for here, values in looked_at if values["reference_learning_rate"] == 0.1]
        assert {values["dropout"] for here, values in alike if here == size} == {dropout, *beside}
        assert {here for here, values in alike if values == best} == {size, *next_to_it}


def test_every_batch_size_and_every_choice_is_among_what_is_spread() -> None:
    found = candidates(optimizer=[{"name": "sgd"}, {"name": "adamw"}], dropout=[0.0, 0.5])
    looked_at = [found[int(index)] for index in found.among([], [], RNG)]
    assert {(size, values["optimizer"], values["dropout"]) for size, values in looked_at} == set(
        itertools.product((8, 16, 64), ("sgd", "adamw"), (0.0, 0.5))
    )


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0.1, 0.5, False), (0.0, 0.9, False), (0.1, 0.5, True)], ids=["range", "from 0", "log"]
)
def test_a_range_is_spread_evenly_from_end_to_end(low: float, high: float, log: bool) -> None:
    found = candidates(dropout={"low": low, "high": high, "log": log})
    values = [float(found[int(index)][1]["dropout"] or 0.0) for index in found.among([], [], RNG)]
    quarters = np.geomspace(low, high, 5) if log else np.linspace(low, high, 5)
    assert np.quantile(values, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx(quarters, abs=0.05)


@pytest.mark.parametrize(
    ("parts", "columns"),
    [
        ({"learning_rate": 0.1}, 0),
        ({"learning_rate": [0.1, 0.3]}, 0),
        ({"batch_size": 16}, 0),
        ({"batch_size": 16, "learning_rate": 0.1}, 0),
        ({"batch_size": 16, "learning_rate": 0.1, "dropout": {"low": 0.0, "high": 0.5}}, 1),
        ({"learning_rate": 0.1, "dropout": [0.0, 0.5], "weight_decay": [0.0, 1e-4]}, 2),
        ({"optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw"}]}, 3),
        ({"schedule": {"name": ["cosine", "linear"], "horizon_samples": {"low": 1e3, "high": 1e4}}}, 3),
    ],
)
def test_spaces_of_every_shape_have_points_that_can_be_run(parts: dict[str, Any], columns: int) -> None:
    found = candidates(**parts)
    made = space(**parts)
    nothing: dict[str, ParameterValue] = {
        one.name: one.choices[0] if one.choices else one.low for one in made.dimensions()
    }
    first = found.add(made.rungs[0], nothing)
    among = found.among([first], [first], RNG)
    points = found.take(among)
    assert set(points.batch_sizes.tolist()) == set(made.rungs)
    assert points.others.shape == (len(among), columns)
    assert ((points.others >= 0) & (points.others <= 1)).all()
    rates = [made.decode(*found[int(index)]).learning_rate for index in among]
    assert np.exp(points.log_rates) == pytest.approx(rates)
    assert len({found[int(index)][0:1] + tuple(found[int(index)][1].values()) for index in among}) == len(among)


def test_learning_rates_are_compared_without_the_scale_of_their_optimizer() -> None:
    optimizers = [{"name": "sgd"}, {"name": "adamw", "learning_rate_scale": 0.01}]
    found = candidates(optimizer=optimizers)
    alike = [
        found.add(64, {"reference_learning_rate": 0.1, "optimizer": name, "sgd.momentum": 0.9})
        for name in ("sgd", "adamw")
    ]
    points = found.take(np.array(alike))
    assert np.exp(points.log_rates) == pytest.approx([0.1 * math.sqrt(2)] * 2)
    assert points.others.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_the_width_of_the_rates_is_that_of_the_space() -> None:
    assert candidates().log_rate_width == pytest.approx(math.log(100))
    assert candidates(learning_rate=[0.3, 0.1, 0.2]).log_rate_width == pytest.approx(math.log(3))
    assert candidates(learning_rate=0.1).log_rate_width == 0.0
