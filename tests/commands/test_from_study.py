"""A search that begins with the runs of another study."""

from pathlib import Path

import pytest

from bssearch import Launch, open_store, run_study
from bssearch.records import TrialRecord
from tests.cli.task import ran
from tests.factories import make_spec
from tests.search.law import LawExecutor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the imported study ``old``, whose best batch size is the largest, at the highest learning rate."""
    rows = [f"{size},{rate},{1 / size / rate},100,true" for size in (16, 32, 64) for rate in (0.1, 0.2, 0.4)]
    (tmp_path / "old.csv").write_text("\n".join(["batch_size,learning_rate,train_seconds,steps,reached", *rows]))
    ran(tmp_path, "import", "runs", "old.csv", "--metric", "accuracy", "--target", "0.9", "--figures-at", "target")
    return tmp_path


def trials_of(folder: Path, *sizes: int) -> list[TrialRecord]:
    """Run a study of these batch sizes from ``old``; return its trials."""
    db = f"sqlite:///{folder / 'bssearch.db'}"
    spec = make_spec(
        name="new",
        space={
            "batch_size": list(sizes),
            "learning_rate": {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"},
        },
        default={"batch_size": 32, "learning_rate": 0.1},
        budget={"trials": 6, "trial_train_seconds": 10.0},
        confirm={"top": 1, "runs": 0},
    )
    run_study(spec, Launch(db=db, make_executor=lambda *_: LawExecutor()), from_study="old")
    with open_store(db, write=False) as store:
        return store.trials.of("new")


def begun(trials: list[TrialRecord]) -> list[tuple[int, float]]:
    return [(one.configuration.batch_size, round(one.configuration.learning_rate, 6)) for one in trials]


def test_the_best_and_the_missing_runs_are_tried_first_and_count_in_the_budget(folder: Path) -> None:
    trials = trials_of(folder, 16, 32, 64, 128)
    assert begun(trials)[:3] == [(64, 0.4), (128, 0.57), (64, 0.8)]
    assert len(trials) == 6
    assert len(trials_of(folder, 16, 32, 64, 128)) == 6, "a second call adds nothing"


def test_runs_outside_the_space_are_left_out(folder: Path) -> None:
    assert begun(trials_of(folder, 16, 32, 64))[:2] == [(64, 0.4), (64, 0.8)]
