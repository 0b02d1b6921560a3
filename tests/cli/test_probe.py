"""The probes from the command line: what they print, store, and hand on to a run."""

import json
from pathlib import Path

import pytest

from bssearch.search.calibration import FIRST_VISITS
from bssearch.storage.repository import open_store
from tests.cli.task import DEFAULT, INLINE, bssearch, ran, read, space_of, write_task

NOISE_SECONDS = "60"
"""Far more than the passes take until the interval is narrow, 16 of them: a busy machine measures as many."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("probe")
    budget = {"trials": 4, "trial_train_seconds": 0.5}
    write_task(place, space=space_of(16, 32, 64), executor=INLINE, budget=budget, confirm={"top": 1, "runs": 0})
    (place / "step_time.json").write_text(
        json.dumps(read(place, "probe", "step-time", "task.yaml", "--seconds", "0.1"))
    )
    return place


@pytest.fixture(scope="module")
def searched(folder: Path) -> Path:
    """The folder after the noise scale was measured, and a study was run."""
    (folder / "noise.json").write_text(
        json.dumps(read(folder, "probe", "noise", "task.yaml", "--seconds", NOISE_SECONDS))
    )
    done = ran(folder, "run", "task.yaml")
    (folder / "stdout.txt").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def test_step_times_are_fitted_and_stored(folder: Path) -> None:
    found = json.loads((folder / "step_time.json").read_text())
    assert [probe["batch_size"] for probe in found["probes"]] == [16, 32, 64]
    assert all(probe["step_seconds_low"] <= probe["step_seconds"] for probe in found["probes"])
    assert found["throughput_knee"] in {16, 32, 64}
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        stored = store.probes.by_batch_size("task")
    measured = {probe["batch_size"]: probe["step_seconds"] for probe in found["probes"]}
    assert {size: probe.step_seconds for size, probe in stored.items()} == measured


@pytest.mark.slow
def test_the_noise_scale_is_measured_at_the_default_and_shown_by_best(searched: Path) -> None:
    found = json.loads((searched / "noise.json").read_text())
    assert (found["study"], found["batch_size"]) == ("task", 32)
    assert found["noise_passes"] >= 8 and found["noise_low"] > 0 and found["noise_adam_scale"] is None
    assert "Gradient noise scale near the target:" in bssearch("best", "--details", cwd=searched).stdout
    best = read(searched, "best")
    assert best["measured"]["noise_scale"]["low"] == found["noise_low"]
    assert best["measured"].keys() == {"step_time", "memory", "noise_scale"}


@pytest.mark.slow
def test_a_run_visits_no_batch_size_that_a_probe_has_timed(searched: Path) -> None:
    told = [line for line in (searched / "stderr.txt").read_text().splitlines() if line.startswith("timing steps")]
    assert told == []
    with open_store(f"sqlite:///{searched / 'bssearch.db'}", write=False) as store:
        errors = [probe.error for probe in store.probes.by_batch_size("task").values()]
    assert [error and error.visits for error in errors] == [FIRST_VISITS] * 3


@pytest.mark.slow
def test_a_trial_tells_its_environment(searched: Path) -> None:
    told = read(searched, "trial", "show", "task", "1")
    environment = told["environment"]
    assert (environment["precision"], environment["compile_mode"]) == ("fp32", "none")
    assert environment["torch_version"] and environment["host"] and environment["workload_revision"]
    assert (told["data_placement"], told["energy_joules"], told["skipped_steps"]) == ("device", None, None)
    assert "environment" in bssearch("trial", "show", "task", "1", cwd=searched).stdout


@pytest.mark.slow
def test_memory_is_probed_under_a_limit_that_binds_no_run(tmp_path: Path) -> None:
    write_task(tmp_path, space=space_of(256), default={**DEFAULT, "batch_size": 256})
    found = read(tmp_path, "probe", "memory", "task.yaml", "--limit-gib", "2")
    assert found["largest_that_fits"] == found["ceiling"] == 500
    assert [use["fits"] for use in found["uses"]] == [True] * len(found["uses"])
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}", write=False) as store:
        bound = store.studies.get("task").environment
    assert bound is None or bound.device_memory_bytes != 2 * 2**30
