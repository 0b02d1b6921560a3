import shutil
from pathlib import Path

import pytest

from bssearch import Launch, run_study
from tests.cli.task import printed, write_task
from tests.factories import make_spec
from tests.search.law import LawExecutor


def run_by_law(patch: pytest.MonkeyPatch) -> LawExecutor:
    """Have commands run their trials by the law, at once, in place of worker processes."""
    executor = LawExecutor()
    patch.setattr("bssearch.executors.slots.LocalExecutor", lambda *_, **__: executor)
    return executor


def search_by_law(database: Path, name: str = "toy", *, trials: int = 5) -> None:
    """Search a study in a SQLite file by the law."""
    spec = make_spec(name=name, budget={"trials": trials, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 0})
    run_study(spec, Launch(db=f"sqlite:///{database}", make_executor=lambda *_: LawExecutor()))


@pytest.fixture
def by_law(monkeypatch: pytest.MonkeyPatch) -> LawExecutor:
    """An executor for one test, which may change it."""
    return run_by_law(monkeypatch)


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    """A copy of a module's folder ``stored``, for one test."""
    return Path(shutil.copytree(stored, tmp_path, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def ended_by_law(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that the law ended at once."""
    place = tmp_path_factory.mktemp("law")
    with pytest.MonkeyPatch.context() as patch:
        run_by_law(patch)
        printed(place, "run", write_task(place).name)
    return place


@pytest.fixture
def task(tmp_path: Path) -> None:
    """The small workload and its spec, in the test's folder."""
    write_task(tmp_path)
