"""One small study from the command line, from an empty folder, and everything that can be asked of it afterwards."""

import csv
import io
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

import bssearch as library
from bssearch.records import Configuration, Lease, Phase, TrialOutcome, TrialState
from bssearch.storage.repository import Store, open_store
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch, printed, ran, read, refused, space_of, write_task
from tests.factories import make_environment, make_plan, make_probe, make_spec, not_none, store_study
from tests.schema import execute
from tests.search.law import LawExecutor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that a worker process ran, for tests to read."""
    place = tmp_path_factory.mktemp("study")
    spec = write_task(place, space=space_of(16, 32, 64), budget={"trials": 8, "trial_train_seconds": 2.0})
    done = ran(place, "run", spec.name)
    (place / "stdout.txt").write_text(done.stdout)
    (place / "stderr.txt").write_text(done.stderr)
    return place


@pytest.fixture
def lawful(ended_by_law: Path, tmp_path: Path) -> Path:
    """A folder with a study that the law ended at once, for a test to go on with."""
    return Path(shutil.copytree(ended_by_law, tmp_path, dirs_exist_ok=True))


def test_it_answers_in_words_and_a_table(folder: Path) -> None:
    out = (folder / "stdout.txt").read_text()
    assert "accuracy ≥ 0.93" in out.splitlines()[0]
    assert "Train with batch " in out
    assert {"16", "32", "64"} <= {word for line in out.splitlines() for word in line.lstrip(" ▶").split()[:1]}
    progress = (folder / "stderr.txt").read_text()
    assert "new study task in sqlite:///bssearch.db" in progress
    assert "expected time: 0:" in progress
    assert "so far: best single run: batch " in progress
    assert "\x1b[" not in out + progress


def test_best_as_json_fits_the_printed_schema(folder: Path) -> None:
    schema = json.loads(bssearch("schema", "best", cwd=folder).stdout)
    answer = read(folder, "best", "task")
    jsonschema.validate(answer, schema)
    assert answer["optimal"]["time_to_target_s"]["runs"] == 3
    assert [row["batch_size"] for row in answer["batches"]] == [16, 32, 64]
    assert all(row["trials"] >= 2 for row in answer["batches"])
    assert answer["optimal"]["test_metric"] > 0.8


def test_lists_come_in_every_format(folder: Path) -> None:
    assert {"name", "target", "trials", "reached"} <= set(read(folder, "study", "list")[0])
    lines = bssearch("trial", "list", "task", "--format", "jsonl", cwd=folder).stdout.splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(1, len(lines) + 1))
    table = list(csv.DictReader(io.StringIO(bssearch("best", "--format", "csv", cwd=folder).stdout)))
    assert [row["batch_size"] for row in table] == ["16", "32", "64"]
    assert "8 of 8 search trials" in bssearch("study", "show", cwd=folder).stdout


def test_the_list_of_studies_has_the_answer_of_each(folder: Path) -> None:
    [listed], found = read(folder, "study", "list"), read(folder, "best")
    best = found["optimal"]
    assert (listed["best_batch_size"], listed["best_seconds"]) == (
        best["batch_size"],
        best["time_to_target_s"]["median"],
    )
    assert (listed["within_5_percent"], listed["provisional"]) == (found["within_5_percent"], found["provisional"])
    assert listed["answer"].startswith(f"batch {best['batch_size']}, {listed['best_seconds']:.3g} s, ")
    for width, has_all in ((80, False), (160, True)):
        table = bssearch("study", "list", cwd=folder, columns=width).stdout
        assert max(map(len, table.splitlines())) <= width
        assert listed["answer"] in table
        assert ("created by" in table) is has_all


def test_what_a_trial_printed_is_kept(folder: Path) -> None:
    shown = ran(folder, "trial", "show", "task", "3", "--log")
    assert set(shown.stdout.splitlines()) == {"a new model"}
    assert shown.stderr == ""


def test_a_trial_that_printed_nothing_says_so_on_stderr(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "bssearch.db", tmp_path)
    execute(tmp_path / "bssearch.db", "DELETE FROM bss_log")
    shown = bssearch("trial", "show", "task", "3", "--log", cwd=tmp_path)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "trial 3 of task has no log\n")


def test_what_looks_like_markup_is_printed_as_it_is(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "bssearch.db", tmp_path)
    reason = "KeyError: x[batch_size] [/data] [bold] :warning:"
    execute(tmp_path / "bssearch.db", "UPDATE bss_trial SET reason = ? WHERE number = 1", [reason])
    for arguments in (("trial", "list", "task"), ("trial", "show", "1")):
        assert reason in ran(tmp_path, *arguments).stdout


def test_an_easier_target_is_answered_from_the_stored_curves(folder: Path) -> None:
    answer = read(folder, "best", "--target", "0.85")
    own = read(folder, "best")
    jsonschema.validate(answer, json.loads(bssearch("schema", "best", cwd=folder).stdout))
    assert (answer["target"]["value"], answer["warnings"][0]["code"]) == (0.85, "retargeted")
    assert answer["optimal"]["test_metric"] is None
    alike = [
        (easier["steps_to_target"], row["steps_to_target"])
        for easier, row in zip(answer["batches"], own["batches"], strict=True)
        if easier["best"] and row["best"] and easier["best"]["parameters"] == row["best"]["parameters"]
    ]
    assert alike, "finalists are the same configurations at either target"
    assert all(easier <= steps for easier, steps in alike)
    assert any(easier < steps for easier, steps in alike)
    assert sum(row["reached"] for row in answer["batches"]) >= sum(row["reached"] for row in own["batches"])
    assert read(folder, "best", "--target", "0.93") == own
    assert library.best("task", db=f"sqlite:///{folder / 'bssearch.db'}", target=0.85).target.value == 0.85
    assert "a prediction needs 4" in refused(folder, "best", "--target", "0.95", code=2)
    for value in ("nan", "inf"):
        assert f"target {value} must be a finite number" in refused(folder, "best", f"--target={value}", code=2)
    assert "met before the first step" in refused(folder, "best", "--target", "0.0", code=2)


def test_library_and_command_line_give_the_same(folder: Path) -> None:
    answer = library.best("task", db=f"sqlite:///{folder / 'bssearch.db'}")
    assert answer.model_dump(mode="json") == read(folder, "best")
    frame = library.trials_frame("task", db=f"sqlite:///{folder / 'bssearch.db'}")
    assert len(frame) == len(read(folder, "trial", "list"))
    assert {"batch_size", "learning_rate", "momentum", "time_to_target_s", "state"} <= set(frame.columns)


def test_the_same_command_again_repeats_nothing(lawful: Path, by_law: LawExecutor) -> None:
    before = read(lawful, "trial", "list")
    assert "resuming study task" in ran(lawful, "run", "task.yaml").stderr
    assert by_law.requests == []
    assert read(lawful, "trial", "list") == before


def test_a_configuration_of_ones_own_is_tried_next_and_a_larger_budget_extends_the_study(
    lawful: Path, by_law: LawExecutor
) -> None:
    queued = ran(lawful, "trial", "add", "task", "batch_size=64", "warmup_epochs=1")
    trials = read(lawful, "trial", "list", "--state", "queued")
    assert f"trial {trials[0]['number']} of task is queued: batch_size 64, learning_rate 0.1414" in queued.stdout
    assert read(lawful, "study", "show")["trials"]["search"]["queued"] == 1
    assert bssearch("run", "task.yaml", "--set", "budget.trials=14", cwd=lawful).returncode == 0
    searched = read(lawful, "trial", "list", "--phase", "search")
    assert len(searched) == 14
    assert len({request.number for request in by_law.requests} & {trial["number"] for trial in searched}) == 2
    shown = read(lawful, "trial", "show", str(trials[0]["number"]))
    assert (shown["batch_size"], shown["warmup_epochs"], shown["uncapped"]) == (64, 1.0, True)
    assert shown["state"] in {"reached", "exhausted", "diverged"}


# Medians recomputed ---------------------------------------------------------------------------------------------------


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


def test_without_an_answer_no_trial_has_the_seconds_of_one(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}") as opened:
        store_study(opened, make_spec(confirm={"runs": 5}), make_environment())
        add_run(opened, 32, 0, missed=True)
    assert [row["answer"] for row in read(tmp_path, "trial", "list")] == [None]


# No network -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Addresses that anything in this process tried to look up or to connect to; none is reached."""
    tried: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        tried.append(arguments)
        raise OSError("there is no network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    return tried


def test_a_study_and_its_answer_connect_to_nothing(
    connections: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("example.org", 80))
    assert len(connections) == 1
    connections.clear()
    run_by_law(monkeypatch)
    write_task(tmp_path)
    ran(tmp_path, "run", "task.yaml")
    ran(tmp_path, "best")
    ran(tmp_path, "report", "--html", "page.html")
    assert connections == []
