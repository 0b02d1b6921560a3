"""A new user's mistakes stop before the second trial; the message names the thing, its value and the remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bssearch.storage.repository import open_store
from tests.cli.task import INLINE, SPEC, UNCONFIRMED, WORKLOAD, bssearch, ran, refused, space_of, write_task
from tests.factories import make_spec, store_study
from tests.schema import execute

LOOPS = Path(__file__).parents[1] / "data" / "own_training"
TINY = {"budget": {"trials": 3, "trial_train_seconds": 0.5}, "confirm": UNCONFIRMED}
SPACE = space_of(16, 32)
RATE = {"reference_batch": 32, "low": 0.01, "high": 1.0}
OWN = {
    "workload": "train.py",
    "executor": {"device": "cpu"},
    "space": {"batch_size": [16, 32], "learning_rate": RATE},
    "default": {"batch_size": 32, "learning_rate": 0.1},
}
REPORT = {"step": r"step (\d+)", "accuracy": r"accuracy (\S+)"}
PROGRAM = ["python", "train.py", "{batch_size}", "{learning_rate}"]
LOSS = "return torch.nn.functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)"

Prepare = Callable[[Path], object]


def target(value: object, **changes: object) -> dict[str, object]:
    return {"metric": "accuracy", "value": value, **changes}


def task(code: str = WORKLOAD, **changes: Any) -> Prepare:
    """Write a workload class and its spec."""

    def write(folder: Path) -> None:
        write_task(folder, **{**TINY, "executor": INLINE, "space": SPACE, **changes})
        (folder / "task.py").write_text(code)

    return write


def script(code: str | None, **changes: Any) -> Prepare:
    """Write a training script and its spec; None forgets the script."""

    def write(folder: Path) -> None:
        write_task(folder, **{**TINY, **OWN, **changes})
        if code is not None:
            (folder / "train.py").write_text(code)

    return write


def program(code: str, **changes: Any) -> Prepare:
    """Write a program and its spec, which has a command in place of a workload."""

    def write(folder: Path) -> None:
        given = {**SPEC, **TINY, **OWN, "command": PROGRAM, **changes}
        del given["workload"]
        (folder / "task.yaml").write_text(yaml.safe_dump(given))
        (folder / "train.py").write_text(code)

    return write


def spec_file(text: str) -> Prepare:
    return lambda folder: (folder / "task.yaml").write_text(text)


def of_a_newer_version(folder: Path) -> None:
    task()(folder)
    ran(folder, "db", "init")
    execute(folder / "bssearch.db", "UPDATE bss_alembic_version SET version_num = '9999'")


def with_a_study(folder: Path) -> None:
    """A study that no trial belongs to, and the spec of another question."""
    task(target=target(0.7))(folder)
    with open_store(f"sqlite:///{folder}/bssearch.db") as store:
        store_study(store, make_spec(name="task"))


def loop(old: str = "", new: str = "", *, name: str = "loop.py") -> str:
    """The guide's script with one change."""
    text = (LOOPS / name).read_text()
    assert old in text
    return text.replace(old, new)


class Mistake(NamedTuple):
    """A mistake, its command, exit code and the parts of its message; ``trials`` that are stored."""

    prepare: Prepare
    said: tuple[str, ...]
    words: str = "run task.yaml"
    code: int = 2
    trials: int = 0


MISTAKES = {
    "percent for a share": Mistake(task(target=target(95)), ("target.value = 95", "[0, 1]", "--suggest-target")),
    "percent in a script": Mistake(
        script(loop(), target=target(95)), ("accuracy ≥ 95", "did you mean 0.95?", "target.value"), trials=1
    ),
    "target beyond the metric": Mistake(task(target=target(1.2)), ("target.value = 1.2", "[0, 1]", "--suggest-target")),
    "metric": Mistake(task(target={**target(0.9), "metric": "acuracy"}), ("target.metric = 'acuracy'", "accuracy")),
    "parameter": Mistake(
        task(space={**SPACE, "dropuot": [0.1]}), ("space.dropuot", "did you mean 'dropout'?", "bssearch schema spec")
    ),
    "field": Mistake(task(budgte={}), ("budgte", "did you mean 'budget'?", "bssearch schema spec")),
    "no script": Mistake(script(None), ("train.py", "No such file", "workload:")),
    "crash at import": Mistake(script("raise ValueError('boom')\n"), ("ValueError: boom", "train.py:1")),
    "no report": Mistake(script(loop("evaluate=evaluate, ")), ("no evaluation", "trial.report(")),
    "nothing to read": Mistake(program("print('loss 1')\n", report=REPORT), ("report.accuracy", "accuracy (\\S+)")),
    "nan at any rate": Mistake(
        task(WORKLOAD.replace(LOSS, f"{LOSS} * float('nan')")), ("first step", "NaN in the inputs"), code=5, trials=2
    ),
    "rates swapped": Mistake(
        task(space={**SPACE, "learning_rate": {**RATE, "low": 1.0, "high": 0.1}}), ("low = 1", "high = 0.1")
    ),
    "batch beyond the data": Mistake(
        task(space=space_of(32, 1024)), ("space.batch_size = 1024", "500 samples", "possible is 500")
    ),
    "batch of zero": Mistake(task(space=space_of(0, 32)), ("space.batch_size.0 = 0", ">= 1")),
    "text for a number": Mistake(
        task(budget={"trials": "many"}), ("budget.trials = 'many'", "integer", "bssearch schema spec")
    ),
    "workload": Mistake(task(workload="digitz"), ("workload 'digitz'", "digits", "path/file.py:attribute")),
    "pruner": Mistake(task(pruner={"name": "balancd"}), ("pruner.name = 'balancd'", "balanced")),
    "sampler": Mistake(task(sampler={"name": "tpee"}), ("sampler.name = 'tpee'", "tpe,")),
    "objective": Mistake(task(objective="time"), ("objective = 'time'", "time_to_target")),
    "server": Mistake(
        task(), ("postgresql://localhost:1/x", "--db"), "run task.yaml --db postgresql://localhost:1/x", 4
    ),
    "read-only folder": Mistake(task(), ("/proc", "--db"), "run task.yaml --db sqlite:////proc/x.db", 4),
    "newer database": Mistake(of_a_newer_version, ("bssearch.db", "9999", "update bssearch"), code=4),
    "name of another question": Mistake(
        with_a_study, ("study 'task'", "target.value: 0.9 → 0.7", "give the spec another name")
    ),
    "confirm without a trial": Mistake(with_a_study, ("'task'", "bssearch run task"), "study confirm task", 5),
    "best of a near name": Mistake(with_a_study, ("'tsk'", "mean 'task'?", "bssearch study list"), "best tsk", 3),
    "folder": Mistake(task(), ("is a folder", ".yaml"), "run ."),
    "prose": Mistake(spec_file("hello world\n"), ("task.yaml", "mapping of fields")),
    "no YAML": Mistake(spec_file("name: [\n"), ("task.yaml:2", "not valid YAML")),
    "wrong way round": Mistake(
        task(target=target(0.9, goal="minimize")), ("goal: minimize", "before the first step", "correct target.goal")
    ),
    "tab": Mistake(spec_file("target:\n\tmetric: accuracy\n"), ("task.yaml:2", "indent with spaces")),
    "option twice": Mistake(task(), ("--db", "it takes one value"), "run task.yaml --db sqlite:///a --db sqlite:///b"),
    "unlogged in Lightning": Mistake(
        script(loop('self.log("accuracy",', "print(", name="lightning_loop.py")), ("'accuracy'", "log")
    ),
    "missing package": Mistake(script("import nopackage\n"), ("train.py:1", "provides 'nopackage'")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_stops_before_the_second_trial_with_its_remedy(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    if "Lightning" in name:
        pytest.importorskip("lightning")
    mistake.prepare(tmp_path)
    told = refused(tmp_path, *mistake.words.split(), code=mistake.code)
    assert [part for part in mistake.said if part not in told] == [], told
    assert stored(tmp_path) == mistake.trials


def stored(folder: Path) -> int:
    """Number of the stored trials of the study; 0 if no database can be read."""
    return max(0, len(bssearch("trial", "list", "task", "--format", "csv", cwd=folder).stdout.splitlines()) - 1)
