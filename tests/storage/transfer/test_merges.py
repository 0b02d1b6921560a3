"""Copies of a study, merged in any order, any number of times, interrupted anywhere: the same rows."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bssearch.storage.repository import Store, open_store
from bssearch.storage.transfer.transfers import Incoming, read_study
from tests.postgres import Postgres
from tests.storage.transfer.copies import everything, interrupted_at, make_states, rows, staged, thinned

COPIES = 12


class Copies:
    """Copies of one study, and what they make together."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(0)
        states = make_states(folder)
        files = [states[-1], *(thinned(rng, rng.choice(states), folder / f"{i}.db") for i in range(COPIES - 1))]
        self.folder = folder
        self.all = [staged(file) for file in files]
        self.empty = folder / "empty.db"
        open_store(f"sqlite:///{self.empty}").close()
        with self.new_store("whole") as store:
            for one in self.all:
                store.join_studies(one)
            self.rows = rows(store)
        with open_store(f"sqlite:///{states[-1]}", write=False) as store:
            self.last = rows(store)

    def new_store(self, name: str) -> Store:
        shutil.copy(self.empty, self.folder / f"{name}.db")
        return open_store(f"sqlite:///{self.folder / name}.db")


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    made = Copies(tmp_path_factory.mktemp("copies"))
    yield made
    for one in made.all:
        one.close()


def merge(store: Store, one: Incoming, interrupted: int | None) -> None:
    """Join a copy, or begin to and be interrupted at a statement: then nothing is stored."""
    if interrupted is None:
        store.join_studies(one)
        return
    before = everything(store)
    done = []
    with interrupted_at(store, interrupted):
        done = store.join_studies(one)
    if not done:
        assert everything(store) == before


ORDERS = st.permutations(range(COPIES)).flatmap(
    lambda order: st.tuples(
        st.just(order),
        st.lists(st.tuples(st.integers(0, COPIES - 1), st.none() | st.integers(0, 60)), max_size=COPIES),
        st.integers(0, 2**32),
    )
)
"""Each copy once in some order, and others between them, any number of times, maybe interrupted at a statement."""


def mixed(order: list[int], others: list[tuple[int, int | None]], seed: int) -> list[tuple[int, int | None]]:
    found: list[tuple[int, int | None]] = [(one, None) for one in order]
    rng = random.Random(seed)
    for one in others:
        found.insert(rng.randint(0, len(found)), one)
    return found


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(ORDERS)
def test_any_order_any_number_of_times_interrupted_anywhere(
    copies: Copies, drawn: tuple[list[int], list[tuple[int, int | None]], int]
) -> None:
    with copies.new_store("drawn") as store:
        for number, interrupted in mixed(*drawn):
            merge(store, copies.all[number], interrupted)
        assert rows(store) == copies.rows


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.permutations(range(COPIES)), st.integers(1, COPIES - 1))
def test_copies_may_be_merged_in_groups_first(copies: Copies, order: list[int], split: int) -> None:
    with copies.new_store("left") as left, copies.new_store("right") as right:
        for group, store in ((order[:split], left), (order[split:], right)):
            for number in group:
                store.join_studies(copies.all[number])
        grouped, _ = right.stage_studies(None, "the others")
        left.join_studies(grouped)
        grouped.close()
        assert rows(left) == copies.rows


def test_all_copies_make_the_last_state_of_the_study(copies: Copies) -> None:
    assert copies.rows == copies.last


def test_an_earlier_copy_changes_nothing(copies: Copies) -> None:
    with copies.new_store("again") as store:
        store.join_studies(copies.all[0])
        before = everything(store)
        for one in copies.all:
            assert not any(joined.is_changed for joined in store.join_studies(one))
        assert everything(store) == before


@settings(max_examples=4, deadline=None)
@given(ORDERS)
def test_postgresql_holds_the_same_rows(
    copies: Copies, postgres: Postgres, drawn: tuple[list[int], list[tuple[int, int | None]], int]
) -> None:
    with open_store(postgres.cleared_database()) as store:
        for number, interrupted in mixed(*drawn):
            merge(store, copies.all[number], interrupted)
        assert rows(store) == copies.rows


def test_from_sqlite_through_a_file_into_postgresql_and_out_again_the_bytes_are_the_same(
    copies: Copies, postgres: Postgres, tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.gz" for number in range(3)]
    with copies.new_store("first") as store:
        store.join_studies(copies.all[0])
        store.write_study("toy", files[0])
    for before, after, url in (
        (files[0], files[1], postgres.cleared_database()),
        (files[1], files[2], f"sqlite:///{tmp_path}/last.db"),
    ):
        incoming = read_study(before)
        with open_store(url) as store:
            store.join_studies(incoming)
            store.write_study("toy", after)
        incoming.close()
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
