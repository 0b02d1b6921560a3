"""What other tools find, by their own code and by their rules, and the race against it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bssearch.records import Configuration
from tests.evidence import finders
from tests.evidence.finders import (
    Finder,
    Memory,
    accelerate_finds,
    accelerate_shrinks,
    find_all,
    lightning_binsearch,
    lightning_finds,
    lightning_power,
)
from tests.evidence.peers import MISSES, Race, TrialFailed, fresh_seeds, race_of
from tests.training.toys import Toy, on_cpu, toy_data

DEFAULT = Configuration(batch_size=100, micro_batch_size=100, learning_rate=0.1, parameters={"momentum": 0.9})
OURS = Configuration(batch_size=50, micro_batch_size=50, learning_rate=0.2)


@pytest.mark.parametrize(
    ("most", "samples", "power", "binsearch", "shrunk"),
    [
        (10**9, 10**6, 8192, 7782, 10**6),  # Lightning asks for no more than 8192, and takes 5 % off in one mode
        (5000, 10**6, 8192, 7782, 4710),  # and 8192 is not tried: it is the answer where 4096 fits
        (3000, 10**6, 2048, 2850, 2780),
        (10**9, 1000, 1024, 972, 1000),
        (600, 1077, 512, 570, 570),
    ],
)
def test_the_rules_find_the_largest_that_fits_as_the_tools_look_for_it(
    most: int, samples: int, power: int, binsearch: int, shrunk: int
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    assert lightning_power(fits, samples) == power
    assert lightning_binsearch(fits, samples) == binsearch
    assert len(tried) < 40
    found = accelerate_shrinks(fits, samples)
    assert found <= min(most, samples) and found * 1.12 > min(most, samples)
    assert samples > 2000 or found == shrunk


def memory_of(limit: int | None, samples: int = 200) -> Memory:
    return Memory(Toy(), toy_data(samples), on_cpu(measure_noise=False), DEFAULT, limit)


@pytest.mark.slow
@pytest.mark.skipif(not finders.is_installed("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("limit", [None, 70])
def test_the_rule_of_accelerate_is_what_accelerate_does(limit: int | None) -> None:
    memory = memory_of(limit)
    assert accelerate_finds(memory) == accelerate_shrinks(memory.fits, memory.samples)


@pytest.mark.slow
@pytest.mark.skipif(not finders.is_installed("lightning"), reason="Lightning is not installed")
@pytest.mark.parametrize("limit", [None, 70])
@pytest.mark.filterwarnings("ignore")
def test_the_rules_of_lightning_are_what_lightning_does(limit: int | None, tmp_path: Path) -> None:
    memory = memory_of(limit)
    assert lightning_finds(memory, tmp_path, "power") == lightning_power(memory.fits, memory.samples)
    assert lightning_finds(memory, tmp_path, "binsearch") == lightning_binsearch(memory.fits, memory.samples)


@pytest.mark.slow
@pytest.mark.skipif(not finders.is_installed("lightning"), reason="Lightning is not installed")
@pytest.mark.parametrize("most", [2, 3, 100, 2047, 3000, 4095, 5000, 8191, 10**9])
@pytest.mark.filterwarnings("ignore")
def test_the_rules_of_lightning_are_its_functions_for_any_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.tuner import batch_size_scaling as real

    model = SimpleNamespace(batch_size=2)

    def run(trainer: object, params: object) -> None:
        if min(model.batch_size, samples) > most:
            raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(real, "_try_loop_run", run)
    for name in ("_reset_progress", "_reset_dataloaders"):
        monkeypatch.setattr(real, name, lambda trainer: None)
    monkeypatch.setattr(real, "lightning_getattr", lambda model, name: model.batch_size)
    monkeypatch.setattr(real, "lightning_setattr", setattr)
    for samples in (55_000, *([1077] if most > 1077 else [])):
        loader = SimpleNamespace(_dataset_length=lambda: samples)  # noqa: B023
        loop = SimpleNamespace(setup_data=lambda: None, _combined_loader=loader)
        trainer = SimpleNamespace(lightning_module=model, _active_loop=loop)

        def fits(size: int) -> bool:
            return min(size, samples) <= most  # noqa: B023

        model.batch_size = 2
        power = real._run_power_scaling(trainer, 2, "batch_size", 25, {})
        assert power == lightning_power(fits, samples)
        model.batch_size = 2
        found = real._run_binsearch_scaling(trainer, 2, "batch_size", 25, {}, 0.05)
        assert found == lightning_binsearch(fits, samples)


def test_where_a_tool_is_not_installed_or_fails_its_rule_runs_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(70)

    def fails() -> int:
        raise ImportError("it needs another package")

    found = Finder("tool", "torch", fails, accelerate_shrinks).find(memory)
    assert (found["by"], found["found"]) == ("its rule", accelerate_shrinks(memory.fits, 200))
    assert "another package" in found["tool_failed"]
    monkeypatch.setattr(finders, "is_installed", lambda package: False)
    saved: list[int] = []
    rows = find_all(memory, tmp_path, lambda rows: saved.append(len(rows)))
    assert [row["by"] for row in rows] == ["its rule"] * 3 and saved == [1, 2, 3]
    assert [row["found"] for row in rows] == [64, 66, 67]


def raced(seconds: dict[tuple[int, float], list[float | None]], seeds: int, left: float = 1e9) -> tuple[Race, int]:
    found = [{"tool": "tool", "found": 400, "seconds": 1.0}]
    race = race_of(found, OURS, DEFAULT, largest=200, samples=300, cap=10.0)
    order = fresh_seeds(seeds)

    def timed(configuration: Configuration, seed: int) -> float | None:
        if configuration.batch_size == 200:
            raise TrialFailed("oom: no memory")
        return seconds[configuration.batch_size, round(configuration.learning_rate, 4)][order.index(seed)]

    return race, race.run(order, timed, lambda: left, lambda: None)


ALL: dict[tuple[int, float], list[float | None]] = {
    (50, 0.2): [1.0, 2.0, 1.0, 2.0],
    (100, 0.1): [3.0, 6.0, 3.0, 6.0],
    (300, 0.1): [None] * 4,
    (300, 0.3): [None, 8.0, 4.0, 8.0],
    (300, 0.1732): [2.0, 4.0, 2.0, 4.0],
}


def test_candidates_run_with_the_same_seeds_and_are_compared_in_pairs() -> None:
    race, rounds = raced(ALL, 4)
    rows = {(row["tool"], row["rule"]): row for row in race.rows()}
    assert rounds == 4
    assert rows["bssearch", "searched"]["over_ours"]["median"] == 1.0
    assert rows["the default", "unchanged"]["over_ours"]["median"] == 3.0
    sqrt = rows["tool", "sqrt"]
    assert sqrt["batch_size"] == 300, "a batch larger than the training data is all of it"
    assert (sqrt["over_ours"]["median"], sqrt["over_ours"]["pairs"]) == (2.0, 4)


def test_what_always_misses_is_not_trained_again_and_what_fails_says_why() -> None:
    race, _ = raced(ALL, 4)
    rows = {(row["tool"], row["rule"]): row for row in race.rows()}
    lost = rows["tool", "unchanged"]
    assert lost["seconds_to_target"] == [None] * MISSES and lost["over_ours"]["at_least"]
    assert len(rows["tool", "linear"]["seconds_to_target"]) == 4, "it missed once and hit then"
    failed = rows["the largest of the study", "linear"]
    assert failed["failed"] == "oom: no memory" and failed["over_ours"] is None
    assert failed["seconds_to_target"] == []


def test_a_round_that_would_not_end_in_time_is_not_begun() -> None:
    assert raced(ALL, 4, left=-1.0)[1] == 0
