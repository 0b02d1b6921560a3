"""An import while another one, or a driver, writes to the same database: each waits, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from bssearch.storage.repository import Store, open_store
from tests.storage.conftest import start
from tests.storage.transfer.copies import append, copies, finish, make_study, rows

HEAD_START_S = 0.5
"""Seconds that the other writer has to come in between: a choice; where it is kept out they pass."""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/source.db") as opened:
        make_study(opened)
        add_trial(opened)
        yield opened


@pytest.fixture
def other(url: str, store: Store) -> Iterator[Store]:
    """The database once more, as another process has it."""
    with open_store(url) as opened:
        yield opened


def add_trial(store: Store) -> None:
    number = start(store)
    append(store, number, (0.0, 0.1), (1.0, 0.9))
    finish(store, number)


@contextmanager
def meanwhile(store: Store, beginning: str, work: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    """Begin some work in another thread just before the first statement of a store's that begins so."""
    begun: list[Future[Any]] = []

    def begin(*arguments: object) -> None:
        if not begun and str(arguments[2]).startswith(beginning):
            begun.append(pool.submit(work))
            wait(begun, timeout=HEAD_START_S)

    with ThreadPoolExecutor(1) as pool:
        event.listen(store._engine, "before_cursor_execute", begin)
        try:
            yield begun
        finally:
            event.remove(store._engine, "before_cursor_execute", begin)


@pytest.mark.slow
def test_two_imports_of_a_new_study_make_one_study(source: Store, store: Store, other: Store) -> None:
    """The second finds the study, and adds what is new."""
    early = copies(source)
    add_trial(source)
    late = copies(source)
    with meanwhile(store, "INSERT INTO bss_trial", lambda: other.transfer.join(late)) as second:
        (joined,) = store.transfer.join(early)
    (after,) = second[0].result()
    assert (joined.is_new, after.is_new, after.is_changed) == (True, False, True)
    assert rows(store) == rows(source)


@pytest.mark.slow
def test_a_driver_starts_its_trial_after_an_import_that_has_begun(source: Store, store: Store, other: Store) -> None:
    store.transfer.join(copies(source))
    add_trial(source)
    with meanwhile(store, "UPDATE bss_study SET revision", lambda: start(other, seed=5)) as started:
        store.transfer.join(copies(source))
    assert started[0].result() == 3
    assert [one.number for one in store.trials.of("toy")] == [1, 2, 3]
