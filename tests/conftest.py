from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from bssearch.settings import DATABASE_URL_FILE_VARIABLE, DATABASE_URL_VARIABLE, STATE_DIR_VARIABLE
from bssearch.storage import migrate
from tests.postgres import own_postgres, postgres
from tests.schema import make_tables

__all__ = ["own_postgres", "postgres"]  # fixtures for all tests

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def pytest_configure() -> None:
    """Compute with one thread in each process: threads that wait for each other make small models slow.

    The processes of tests keep what they compile: else each of some hundred would compile the package anew. No garbage
    is collected until the test modules are imported.
    """
    for name in THREADS:
        os.environ.setdefault(name, "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt what the test modules imported, torch above all, from garbage collection: it is gone through for nothing.

    Each trial that ends in this process would else take 0.2 s for it.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _schema_is_made_once() -> Iterator[None]:
    """Run the migrations once in a process; tests of the migrations themselves take `migrations` (tests/storage)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "_run_migrations", make_tables)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_remembered_of_the_developer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests run is remembered for them alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_VARIABLE, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _no_database_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the database that the developer's shell names."""
    monkeypatch.delenv(DATABASE_URL_VARIABLE, raising=False)
    monkeypatch.delenv(DATABASE_URL_FILE_VARIABLE, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
