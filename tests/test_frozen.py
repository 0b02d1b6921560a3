"""Frozen configurations: which runs are made of them, and what two measurements of one come to."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.analysis.time_to_target import Estimate
from bssearch.commands.opening import Launch
from bssearch.commands.run import run_study
from bssearch.errors import UsageError
from bssearch.executors.base import Ended, Event
from bssearch.records import Configuration
from bssearch.search.finding import compute_answer
from bssearch.step_times import PooledStepTime
from bssearch.storage.repository import open_store
from tests.factories import make_spec, not_none
from tests.frozen import (
    LIMITS,
    Results,
    best_of_each_batch_size,
    confirmed,
    documents_of,
    identity,
    ratio,
    read_configurations,
    remeasure,
)
from tests.search.law import LawExecutor, step_seconds

SPEC = make_spec(budget={"trials": 16, "trial_train_seconds": 10.0}, confirm={"top": 2, "runs": 3})


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


class SharedCore(LawExecutor):
    """Ends trials by the law on a core that others share: seeds differ, and so does the pace of the core meanwhile."""

    def events(self, timeout: float) -> list[Event]:
        request = self.running[0] if self.running else None
        found = super().events(timeout)
        if request is None or not isinstance(found[-1], Ended):
            return found
        rng, outcome = random.Random(request.seed), found[-1].outcome
        if outcome.steps_to_target is None:
            return found
        steps = round(outcome.steps_to_target * math.exp(rng.gauss(0, 0.1)))
        seconds = steps * step_seconds(request.configuration.batch_size) * math.exp(pace := rng.gauss(0, 0.3))
        outcome = replace(
            outcome,
            steps=steps,
            steps_to_target=steps,
            train_seconds=seconds,
            wall_seconds=seconds,
            time_to_target_s=seconds,
            undelayed_train_seconds=0.9 * seconds,
            reference_seconds=1e-4 * math.exp(pace),
        )
        return [*found[:-1], Ended(request.number, outcome)]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that has ended."""
    folder = tmp_path_factory.mktemp("searched")
    run_study(SPEC, db=url_in(folder), make_executor=lambda *_: SharedCore())
    return folder


def frozen_of(searched: Path) -> list[Configuration]:
    return [one.configuration for one in best_of_each_batch_size(confirmed(url_in(searched), "toy"))]


def test_the_times_are_those_of_the_answer(searched: Path, tmp_path: Path) -> None:
    shutil.copy(searched / "study.db", tmp_path)
    chosen = best_of_each_batch_size(confirmed(url_in(tmp_path), "toy"))
    assert all(one.time.basis == "steps_x_step_time" for one in chosen)
    with open_store(url_in(tmp_path), write=False) as store:
        rows = {row.batch_size: row for row in compute_answer(store, "toy").batches if row.confirmed}
    assert len(rows) >= 3
    assert {one.configuration.batch_size for one in chosen} == set(rows)
    assert [one.selection > 0 for one in chosen] == [True, *[False] * (len(chosen) - 1)]
    for one in chosen:
        time = not_none(rows[one.configuration.batch_size].time_to_target_s)
        assert (one.time.median, one.time.low, one.time.high) == (time.median, time.low, time.high)


def test_frozen_configurations_run_with_fresh_seeds_seed_by_seed(searched: Path, tmp_path: Path) -> None:
    frozen, executor = frozen_of(searched), LawExecutor()
    again = SPEC.model_copy(update={"name": "again", "seed": 7})
    found = remeasure(again, frozen, 4, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor))
    assert Counter(identity(one.configuration) for one in executor.requests) == dict.fromkeys(map(identity, frozen), 4)
    rounds = [executor.requests[start : start + len(frozen)] for start in range(0, 4 * len(frozen), len(frozen))]
    seeds = [{one.seed for one in one_round} for one_round in rounds]
    assert all(len(one) == 1 for one in seeds)
    all_seeds = {seed for one in seeds for seed in one}
    assert len(all_seeds) == 4
    before = {run.seed for one in confirmed(url_in(searched), "toy") for run in one.runs}
    assert not before & all_seeds
    assert {one.train_seconds_limit for one in executor.requests} == {LIMITS * 10.0}
    assert {identity(one.configuration): one.time.runs for one in found} == dict.fromkeys(map(identity, frozen), 4)


def estimate_of(median: float, *, excess: float = 0.0, deviation: float = 0.1, low: float | None = 0.5) -> Estimate:
    return Estimate(
        median=median,
        low=low,
        high=2.0,
        runs=10,
        reached=10,
        basis="steps_x_step_time",
        log_mean=math.log(median),
        log_deviation=deviation,
        step_time=PooledStepTime((median,), 0.001, 0.02, 20.0, excess),
    )


def test_a_ratio_holds_the_errors_of_both_sides() -> None:
    one = ratio(estimate_of(1.1), estimate_of(1.0))
    wider = ratio(estimate_of(1.1, deviation=0.2), estimate_of(1.0))
    assert one is not None and wider is not None
    assert one.value == pytest.approx(1.1)
    # Welch: √(2 · 0.1²/10 + 2 · 0.02²) = 0.053, t(27.8) = 2.05
    assert (one.low, one.high) == pytest.approx((0.987, 1.226), abs=0.002)
    assert wider.low < one.low and wider.high > one.high
    assert one.covers_one and one.covers_one_bare


def test_configurations_are_read_back_from_json(tmp_path: Path) -> None:
    frozen = [Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters={"momentum": 0.9})]
    file = tmp_path / "frozen.json"
    file.write_text(json.dumps({"configurations": documents_of(frozen)}))
    assert read_configurations(file) == frozen
    file.write_text(json.dumps(documents_of(frozen)))
    assert read_configurations(file) == frozen


def test_results_are_those_of_one_set_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    results = Results(file, {"runs": 10})
    results.found["ratios"] = [1.0]
    results.save()
    assert Results(file, {"runs": 10}).found["ratios"] == [1.0]
    with pytest.raises(UsageError, match="runs"):
        Results(file, {"runs": 3})
