"""Anyone can recompute the medians of `best` from the rows of `trial list`, with a script of a few lines."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bssearch.records import Configuration, Lease, Phase, TrialOutcome, TrialState
from bssearch.storage.repository import Store, open_store
from tests.cli.task import printed, ran, read
from tests.factories import make_environment, make_plan, make_probe, make_spec, not_none, store_study

DATA = Path(__file__).parents[1] / "data"
SCRIPT = DATA / "recompute.py"
SIZES = (32, 64, 128)


def imported(name: str) -> Callable[[Path], None]:
    def store(folder: Path) -> None:
        ran(folder, "import", "study", DATA / "stored" / f"{name}.study")

    return store


def made(*, contended: bool = False, reference: float | None = None) -> Callable[[Path], None]:
    """Return what stores a study of five confirmation runs a batch size, one of them a miss at the largest."""

    def store(folder: Path) -> None:
        with open_store(f"sqlite:///{folder / 'bssearch.db'}") as opened:
            here = make_environment()
            store_study(opened, make_spec(confirm={"runs": 5}), here)
            for size in SIZES:
                opened.probes.add_step_time("toy", here, make_probe(size, step_seconds=0.0007 * size**0.5))
                for seed in range(5):
                    missed = size == SIZES[-1] and seed == 4
                    add_run(opened, size, seed, missed=missed, contended=contended, reference=reference)

    return store


def add_run(
    store: Store, size: int, seed: int, *, missed: bool = False, contended: bool = False, reference: float | None = None
) -> None:
    plan = make_plan(
        configuration=Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.1),
        phase=Phase.CONFIRM,
        seed=seed,
    )
    lease = Lease(owner="driver", seconds=60.0)
    trial = not_none(store.trials.start("toy", plan, environment=make_environment(), lease=lease))
    steps = 900 - size + 37 * seed
    seconds = steps * 0.001 * size**0.5 * (1 + seed / 10)
    store.trials.finish(
        "toy",
        trial.number,
        TrialOutcome(
            state=TrialState.EXHAUSTED if missed else TrialState.REACHED,
            reason="by the test",
            steps=steps,
            train_seconds=seconds,
            wall_seconds=seconds,
            last_miss_step=steps - 1,
            last_miss_seconds=0.99 * seconds,
            first_hit_step=None if missed else steps,
            time_to_target_s=None if missed else seconds,
            steps_to_target=None if missed else steps,
            contended=contended,
            undelayed_train_seconds=None if reference is None else 0.9 * seconds,
            reference_seconds=None if reference is None else reference * (1 + seed / 20),
        ),
        steps_x_step_time_s=None,
    )


STUDIES = {
    "stored_digits": (imported("stored_digits"), "steps_x_step_time"),
    "stored_samples": (imported("stored_samples"), "steps_x_step_time"),
    "stored_runs": (imported("stored_runs"), "measured"),
    "contended": (made(contended=True), "steps_x_step_time"),
    "by pace": (made(reference=1e-4), "steps_x_step_time"),
    "alone": (made(), "measured"),
}


@pytest.mark.parametrize("study", STUDIES)
def test_a_short_script_over_the_trials_gives_every_median_of_the_answer(study: str, tmp_path: Path) -> None:
    store, basis = STUDIES[study]
    store(tmp_path)
    answer, trials = read(tmp_path, "best"), printed(tmp_path, "trial", "list", "--format", "json")
    done = subprocess.run([sys.executable, SCRIPT], input=trials, capture_output=True, text=True, check=True)
    medians = {row["batch_size"]: (row["time_to_target_s"] or {}).get("median") for row in answer["batches"]}
    recomputed = {int(size): median for size, median in json.loads(done.stdout).items()}
    assert recomputed == medians
    optimal = answer["optimal"]
    assert recomputed[optimal["batch_size"]] == optimal["time_to_target_s"]["median"]
    counted = [row["answer"] for row in json.loads(trials) if row["answer"]["counts"]]
    assert {one["basis"] for one in counted if one["seconds"] is not None} == {basis}


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 30


def test_without_an_answer_no_trial_has_the_seconds_of_one(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}") as opened:
        store_study(opened, make_spec(confirm={"runs": 5}), make_environment())
        add_run(opened, 32, 0, missed=True)
    assert [row["answer"] for row in read(tmp_path, "trial", "list")] == [None]
