"""``bssearch best --step-times``: the answer of a study for another device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.task import bssearch, printed, ran, read, refused

RUNS = [
    "batch_size,seed,reached,steps,train_seconds,final_metric,device",
    *(
        f"{size},{seed},true,{steps + 10 * seed},{(steps + 10 * seed) * seconds},0.9,Tesla V100"
        for size, steps, seconds in ((32, 1000, 0.001), (64, 600, 0.002), (128, 400, 0.004))
        for seed in range(3)
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vision")
    (place / "runs.csv").write_text("\n".join(RUNS) + "\n")
    (place / "h200.csv").write_text("batch_size,step_seconds\n32,0.0010\n64,0.0010\n128,0.0011\n")
    printed(place, "import", "runs", "runs.csv", "--name", "vision", "--metric", "accuracy", "--target", "0.9")
    return place


def test_a_device_whose_steps_grow_less_takes_a_larger_batch(folder: Path) -> None:
    here = read(folder, "best", "vision")
    assert here["optimal"]["batch_size"] == 32
    there = read(folder, "best", "vision", "--step-times", "h200.csv", "--device", "H200")
    assert (there["optimal"]["batch_size"], there["device"]["name"]) == (128, "H200")
    assert there["optimal"]["time_to_target_s"]["median"] == pytest.approx(410 * 0.0011)
    assert "predicted" in {notice["code"] for notice in there["warnings"]}
    told = bssearch("best", "vision", "--step-times", "h200.csv", "--device", "H200", cwd=folder)
    first, second, *_ = told.stdout.splitlines()
    assert first.split() == ["Train", "with", "batch", "128", "(predicted).", "vision", "·", "accuracy", "≥", "0.9"]
    assert second.startswith("  0.451 s")
    assert "predicted for H200 from steps measured on Tesla V100" in told.stdout


def test_it_is_exported_and_said_to_be_predicted(folder: Path) -> None:
    done = ran(folder, "best", "--step-times", "h200.csv", "--export", "python")
    assert "'batch_size': 128," in done.stdout and "predicted for h200" in done.stderr


@pytest.mark.parametrize(
    ("study", "content", "code", "said"),
    [
        ("nobody", "batch_size,step_seconds\n32,0.001\n", 3, "nobody"),
        (
            "vision",
            "batch_size,step_seconds\n32,-1\n",
            2,
            "wrong.csv:2: step_seconds = '-1' must be a finite number of seconds > 0",
        ),
        ("vision", "batch_size\n32\n", 2, "step_seconds"),
        ("vision", "batch_size,step_seconds\n7,0.001\n", 2, "it ran 32, 64, 128; step times are of 7"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, study: str, content: str, code: int, said: str) -> None:
    (folder / "wrong.csv").write_text(content)
    assert said in refused(folder, "best", study, "--step-times", "wrong.csv", code=code)
