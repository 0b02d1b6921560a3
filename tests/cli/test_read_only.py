"""Who may only look: each command that shows works and leaves no trace, and so does the answer for another device."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest

from bssearch import Launch, load_spec, open_store, run_study
from bssearch.settings import DATABASE_URL_VARIABLE
from bssearch.storage import migrate
from bssearch.storage.migrate import Roles
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch, environment, printed, ran, read, refused, write_task
from tests.postgres import Postgres
from tests.search.law import LawExecutor
from tests.test_guide import leaves

SEARCHED = {"budget": {"trials": 14, "trial_train_seconds": 2.0}, "confirm": {"top": 1, "runs": 3}}

READS = {
    "study list": "study list --all",
    "study show": "study show task",
    "best": "best task",
    "best --step-times": "best task --step-times {out}/h100.csv",
    "trial list": "trial list task",
    "trial show": "trial show task 1",
    "report": "report task",
    "report --html": "report task --html {to}/report.html --svg {to}/report.svg --csv {to}/tables",
    "study compare": "study compare task other",
    "study track-record": "study track-record",
    "queue list": "queue list --all",
    "study audit": "study audit task --no-run",
    "export": "export task --to curves --file {to}/task.csv.gz",
    "export --to optuna": "export task --to optuna --file {to}/task.optuna.db",
    "plan lr": "plan lr --from-batch 32 --learning-rate 0.1 --batch 64",
    "plan scale": "plan scale --devices 2 --per-device-batch 8 --study task --parameters 1M --bandwidth-gb-s 10",
    "db check": "db check",
    "trial rerun": "trial rerun task 1 --workload {out}/task.py:Task",
}
WRITES = {
    "run": "run {out}/task.yaml",
    "study confirm": "study confirm task --runs 5 --workload task.py:Task",
    "study audit": "study audit task --workload task.py:Task",
    "trial add": "trial add task batch_size=64",
    "run --quick": "run --quick {out}/other.yaml",
    "queue submit": "queue submit task --name submitted",
    "queue cancel": "queue cancel queued",
    "queue pause": "queue pause queued",
    "queue resume": "queue resume queued",
    "queue worker": "queue worker --templates {out}/templates.yaml",
    "probe memory": "probe memory {out}/task.yaml",
    "import runs": "import runs {out}/runs.csv --name runs --metric accuracy --target 0.5",
    "import study": "import study {out}/whole.jsonl.gz",
    "study rename": "study rename task better",
    "study archive": "study archive task",
    "study delete": "study delete task --yes",
}
ALSO_WRITE = {
    *("probe step-time", "probe noise", "probe branch"),
    *("import rcp", "import optuna", "import curves"),
    *("db init", "db upgrade"),  # of the owner's role: tests/storage/test_roles.py
}
WITHOUT_A_DATABASE = {
    *("init", "check", "schema", "guide"),
    *("plan memory", "plan accumulation", "plan start"),
}
# They read; the studies here have neither curves nor scales: tests/commands/test_plans.py.
NEED_OTHER_STUDIES = {"plan beyond", "plan larger"}
SERVES = {"serve"}  # it reads, until it is told to stop: tests/web


def test_of_every_command_it_is_known_whether_it_writes() -> None:
    """Who adds a command says it here, and so how it does under a role that may only look."""
    told = {name.partition(" --")[0] for name in [*READS, *WRITES]}
    assert leaves() == told | ALSO_WRITE | WITHOUT_A_DATABASE | NEED_OTHER_STUDIES | SERVES


def make_studies(url: str, folder: Path) -> None:
    """Store the studies task and other, and write beside them what commands are given."""
    for name in ("other", "task"):
        path = write_task(folder, name=name, budget={"trials": 14, "trial_train_seconds": 2.0})
        path.rename(folder / f"{name}.yaml")
        run_study(
            load_spec(folder / f"{name}.yaml"), Launch(db=url, folder=folder, make_executor=lambda *_: LawExecutor())
        )
    with open_store(url, write=False) as store:
        store.transfer.write("other", folder / "whole.jsonl.gz")
    (folder / "h100.csv").write_text("batch_size,step_seconds\n" + "".join(f"{2**k},0.001\n" for k in range(3, 8)))
    (folder / "templates.yaml").write_text("templates: {task: {spec: task.yaml}}")
    (folder / "runs.csv").write_text("batch_size,train_seconds,reached\n8,1.0,true\n16,2.0,true\n")


def words(line: str, out: Path, to: Path | None = None) -> list[str]:
    """Return a command's words; it finds files in ``out``, and writes some to ``to``."""
    return shlex.split(line.format(out=out, to=to))


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder at hand."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def reader(postgres: Postgres, out: Path) -> str:
    """The URL of a database with studies, for a login that may only look."""
    url = postgres.create_database()
    migrate.upgrade(url, Roles("looked_at"))
    make_studies(url, out)
    postgres.execute("CREATE ROLE lara LOGIN", "GRANT looked_at_reader TO lara")
    return url.replace("postgres@", "lara@")


@pytest.fixture(scope="module")
def file(out: Path) -> Iterator[Path]:
    """A SQLite file with studies that nobody may write, in a folder that nobody may write to, whom all may look at."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / "team.db"
        make_studies(f"sqlite:///{made}", out)
        made.chmod(0o444)
        folder.chmod(0o555)
        yield made
        folder.chmod(0o755)


class TestLooking:
    @pytest.mark.slow
    @pytest.mark.parametrize("line", READS.values(), ids=READS)
    def test_as_a_reader(
        self, reader: str, out: Path, to: Path, here: Path, monkeypatch: pytest.MonkeyPatch, line: str
    ) -> None:
        monkeypatch.setenv(DATABASE_URL_VARIABLE, reader)
        printed(here, *words(line, out, to))
        assert list(here.iterdir()) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("line", READS.values(), ids=READS)
    def test_at_a_file(
        self, file: Path, out: Path, to: Path, here: Path, monkeypatch: pytest.MonkeyPatch, line: str
    ) -> None:
        monkeypatch.setenv(DATABASE_URL_VARIABLE, f"sqlite:///{file}")
        before = file.read_bytes()
        printed(here, *words(line, out, to))
        assert list(here.iterdir()) == []
        assert [one.name for one in file.parent.iterdir()] == [file.name]
        assert file.read_bytes() == before

    @pytest.mark.slow
    def test_at_a_file_as_somebody_else(self, file: Path) -> None:
        """Root may write where nobody may; who is not root may not."""
        lines = [line for line in READS.values() if "{" not in line]
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *lines],
            env={
                **environment(),
                DATABASE_URL_VARIABLE: f"sqlite:///{file}",
                "HOME": "/",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            cwd=file.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.splitlines()[-1] == str([0] * len(lines)), done.stderr
        assert [one.name for one in file.parent.iterdir()] == [file.name]


AS_NOBODY = """
import os, shlex, sys
from bssearch.cli import main

def run(line):
    sys.argv = ["bssearch", *shlex.split(line)]
    try:
        main()
    except SystemExit as ending:
        return ending.code or 0

lines = sys.argv[1:]
[run(line) for line in lines]  # nothing is left to import when the rights are gone
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print()
print([run(line) for line in lines])
"""


class TestWriting:
    @pytest.fixture(autouse=True)
    def _nothing_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not even what a workload or a script is, which takes running a step of it, is looked at."""

        run_by_law(monkeypatch)
        monkeypatch.setattr(LawExecutor, "describe", Mock(side_effect=AssertionError("the workload has been loaded")))

    @pytest.mark.parametrize("line", WRITES.values(), ids=WRITES)
    def test_a_reader_is_told_of_the_role_before_anything_runs(
        self, reader: str, out: Path, monkeypatch: pytest.MonkeyPatch, line: str
    ) -> None:
        monkeypatch.setenv(DATABASE_URL_VARIABLE, reader)
        told = refused(out, *words(line, out), code=4)
        assert "'lara' needs the role looked_at_writer" in told
        assert 'GRANT looked_at_writer TO "lara"' in told

    @pytest.mark.parametrize("line", WRITES.values(), ids=WRITES)
    def test_a_file_that_may_not_be_written_is_named(
        self, file: Path, out: Path, monkeypatch: pytest.MonkeyPatch, line: str
    ) -> None:
        monkeypatch.setenv(DATABASE_URL_VARIABLE, f"sqlite:///{file}")
        assert f"{file} is read-only" in refused(out, *words(line, out), code=4)

    def test_whose_study_it_is_says_the_command_line(self, reader: str, postgres: Postgres, out: Path) -> None:
        postgres.execute("CREATE ROLE wim LOGIN", "GRANT looked_at_writer TO wim")
        url = reader.replace("lara@", "wim@")
        for line in ("study rename task better", "study archive task", "study delete task --yes"):
            assert "the study 'task' may be renamed, archived or deleted by postgres, who made it" in refused(
                out, *words(line, out), "--db", url, code=4
            )
        with open_store(reader, write=False) as store:
            assert [one.name for one in store.studies.summaries()] == ["other", "task"]


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
    assert read(folder, "best", "vision")["optimal"]["batch_size"] == 32
    there = read(folder, "best", "vision", "--step-times", "h200.csv", "--device", "H200")
    assert (there["optimal"]["batch_size"], there["device"]["name"]) == (128, "H200")
    assert there["optimal"]["time_to_target_s"]["median"] == pytest.approx(410 * 0.0011)
    assert "predicted" in {notice["code"] for notice in there["warnings"]}
    told = bssearch("best", "vision", "--step-times", "h200.csv", "--device", "H200", cwd=folder)
    first, second, *_ = told.stdout.splitlines()
    assert first.split() == ["Train", "with", "batch", "128", "(predicted).", "vision", "·", "accuracy", "≥", "0.9"]
    assert second.startswith("  0.451 s")
    assert "the answer predicts times on H200 from the steps on Tesla V100" in " ".join(told.stdout.split())


def test_it_is_exported_and_said_to_be_predicted(folder: Path) -> None:
    done = ran(folder, "best", "--step-times", "h200.csv", "--export", "python")
    assert "'batch_size': 128," in done.stdout and "the answer predicts times on h200" in done.stderr


@pytest.mark.parametrize(
    ("study", "content", "code", "said"),
    [
        ("nobody", "batch_size,step_seconds\n32,0.001\n", 3, "nobody"),
        (
            "vision",
            "batch_size,step_seconds\n32,-1\n",
            2,
            "wrong.csv:2: step_seconds = '-1' must be a number of seconds",
        ),
        ("vision", "batch_size\n32\n", 2, "step_seconds"),
        ("vision", "batch_size,step_seconds\n7,0.001\n", 2, "ran at 32, 64, 128, but step times are of 7"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, study: str, content: str, code: int, said: str) -> None:
    (folder / "wrong.csv").write_text(content)
    assert said in refused(folder, "best", study, "--step-times", "wrong.csv", code=code)
