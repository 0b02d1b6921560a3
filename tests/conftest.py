import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bssearch.settings import DATABASE_URL_FILE_VARIABLE, DATABASE_URL_VARIABLE, STATE_DIR_VARIABLE
from bssearch.storage import migrate
from bssearch.storage.connection import engine
from tests.postgres import Postgres, own_postgres, postgres
from tests.schema import make_engine, make_tables, optuna_head

__all__ = ["own_postgres", "postgres"]  # fixtures for all tests

SERVERS = frozenset({"postgres", "own_postgres", "browser"})
"""Fixtures that start a server or a browser; their tests are slow."""

NEEDED = {
    "executors/test_ray.py": "ray",
    "executors/loops/test_lightning.py": "lightning",
    "executors/loops/test_transformers.py": "transformers",
    "exchange/boards/test_real_boards.py": "mlflow",
}
"""Slow test modules with the package of the extra ``integrations`` that they import."""

HERE = Path(__file__).parent

LONGEST = {
    HERE / name
    for name in (
        "cli/test_interruptions.py",
        "cli/test_queue.py",
        "cli/test_wrong_input.py",
        "exchange/boards/test_real_boards.py",
        "executors/test_command.py",
        "executors/test_contract.py",
        "executors/test_local.py",
        "executors/test_ray.py",
        "executors/test_script.py",
        "test_guide_examples.py",
        "training/test_ranks.py",
    )
}
"""Modules of long tests. They begin first, so that no process runs long after the others."""

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def pytest_configure() -> None:
    """Compute with one thread per process, because more threads make small models slow.

    Child processes keep compiled files, so that they do not compile the package again. Garbage is collected only after
    the imports. Hypothesis has no deadline, because a loaded machine is slow.
    """
    for name in THREADS:
        os.environ.setdefault(name, "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    gc.disable()
    settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("loaded")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules with only slow tests if slow tests are deselected, and modules whose package is missing.

    In CI, a slow run imports all modules and fails if a package is missing.
    """
    package = _package_of(collection_path)
    if package is None:
        return None
    if "not slow" in config.option.markexpr:
        return True
    return True if importlib.util.find_spec(package) is None and not os.environ.get("CI") else None


def _package_of(path: Path) -> str | None:
    return NEEDED.get(str(path.relative_to(HERE))) if path.is_relative_to(HERE) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow if they use a server, a browser or a package of the extra ``integrations``; sort the tests."""
    for item in items:
        taken = SERVERS.intersection(getattr(item, "fixturenames", ()))
        kinds = (
            [one for one in item.callspec.params.values() if isinstance(one, str)] if hasattr(item, "callspec") else []
        )
        if taken or "postgresql" in kinds or _package_of(item.path) is not None:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path not in LONGEST)


def pytest_collection_finish() -> None:
    """Exempt imported modules, above all torch, from garbage collection, which takes 0.2 s per trial otherwise."""
    _freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Exempt libraries that a test imported."""
    if len(sys.modules) > _frozen_modules + 100:
        _freeze()


_frozen_modules = 0


def _freeze() -> None:
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.create_database()


@pytest.fixture(scope="session", autouse=True)
def _what_takes_long_is_made_once() -> Iterator[None]:
    """Run migrations, compile statements and make the command line once per process.

    Tests of the migrations use the fixture `migrations` (tests/storage).
    """
    from tests.cli.task import command_of  # the controlling process needs no command line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", command_of)
        patch.setattr("optuna.storages._rdb.storage._VersionManager.get_head_version", lambda self: optuna_head())
        patch.setattr(migrate, "_run_migrations", make_tables)
        patch.setattr(engine, "create_engine", make_engine)
        yield


@pytest.fixture(scope="session", autouse=True)
def _tests_do_not_depend_on_the_developer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary state folder, and tables without a terminal's width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_VARIABLE, str(tmp_path_factory.mktemp("state")))
        patch.delenv("COLUMNS", raising=False)  # pytest-xdist sets 80
        yield


@pytest.fixture(autouse=True)
def _no_database_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the database of the developer's shell."""
    monkeypatch.delenv(DATABASE_URL_VARIABLE, raising=False)
    monkeypatch.delenv(DATABASE_URL_FILE_VARIABLE, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(autouse=True)
def _orphans_are_adopted_by_no_test() -> Iterator[None]:
    """Stop adopting orphans after each test, because later tests count the children of this process."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
