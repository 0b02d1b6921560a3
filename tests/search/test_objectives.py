"""A study for each objective, driven against the law."""

from __future__ import annotations

from pathlib import Path

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.headline import headline
from bssearch.commands.run import run_study
from bssearch.errors import LaunchError, UsageError
from bssearch.records import TrialState
from bssearch.search.finding import answer, compute_answer
from bssearch.storage.repository import open_store
from tests.factories import make_spec
from tests.search.law import LawExecutor, step_seconds

BUDGET = {"trials": 30, "trial_train_seconds": 100.0}


def run(folder: Path, objective: str, executor: LawExecutor, **changes: object) -> Answer:
    spec = make_spec(budget=BUDGET, objective=objective, **changes)
    return run_study(spec, db=f"sqlite:///{folder / 'study.db'}", make_executor=lambda *_: executor)


def test_the_fewest_samples_are_those_of_the_smallest_batch_size(tmp_path: Path) -> None:
    executor = LawExecutor()
    found = run(tmp_path, "samples_to_target", executor)
    assert found.optimal.batch_size == 8
    assert found.optimal.objective_value is not None
    assert found.optimal.objective_value.median == found.optimal.samples_to_target
    assert "samples" in headline(found)
    capped = [one for one in executor.requests if one.limit_state is TrialState.CAPPED]
    assert capped
    fewest = 100 * (1 + 30 / 8) * 8
    for request in capped:
        size = request.configuration.batch_size
        assert request.train_seconds_limit >= 1.3 * fewest / size * step_seconds(size) * 0.99


def test_cost_is_time_at_a_price(tmp_path: Path) -> None:
    found = run(tmp_path, "cost_to_target", LawExecutor(), price_per_device_hour=3600.0)
    assert found.optimal.batch_size in (16, 32)
    assert found.optimal.objective_value is not None and found.optimal.time_to_target_s is not None
    assert found.optimal.objective_value.median == pytest.approx(found.optimal.time_to_target_s.median)
    assert "at a cost of" in headline(found)
    assert [one.cost for one in found.front] == [pytest.approx(one.time_to_target_s) for one in found.front]


def test_energy_takes_a_device_that_measures_it(tmp_path: Path) -> None:
    executor = LawExecutor()
    with pytest.raises(LaunchError, match="Test CPU does not report its power"):
        run(tmp_path, "energy_to_target", executor)
    assert len(executor.requests) == 1, "the rest of the budget is not spent"


def test_the_metric_in_a_budget_trains_every_trial_to_the_full_limit(tmp_path: Path) -> None:
    executor = LawExecutor()
    found = run(tmp_path, "metric_in_budget", executor)
    assert {request.train_seconds_limit for request in executor.requests} == {100.0}
    assert not any(request.stop_at_target for request in executor.requests)
    assert found.optimal.objective_value is not None
    assert found.optimal.objective_value.median == pytest.approx(0.9, abs=0.1)
    assert found.speedup.over_default is None
    assert "comes to accuracy" in headline(found)
    refused = pytest.raises(UsageError, match="no answer for another target")
    with open_store(f"sqlite:///{tmp_path / 'study.db'}", write=False) as store, refused:
        answer(store, "toy", 0.5)


def test_the_answer_is_kept_when_the_study_ends_and_read_back_whole(tmp_path: Path) -> None:
    found = run(tmp_path, "time_to_target", LawExecutor())
    with open_store(f"sqlite:///{tmp_path / 'study.db'}", write=False) as store:
        assert store.finding("toy") is not None
        assert answer(store, "toy") == compute_answer(store, "toy") == found
