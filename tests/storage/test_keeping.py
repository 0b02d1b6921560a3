"""Studies renamed, archived and deleted, on every database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from bssearch.errors import NotFoundError, UsageError
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve, make_environment, make_probe
from tests.storage.conftest import CANCELLED, OUTCOME, add_study, enqueue, start


class TestKeeping:
    def test_a_study_is_renamed_with_all_it_has(self, store: Store) -> None:
        add_study(store)
        store.finish_trial("toy", start(store), OUTCOME, steps_x_step_time_s=None)
        store.rename_study("toy", "new.name-1")
        assert store.find_study("toy") is None
        assert store.study("new.name-1").spec["name"] == "new.name-1"
        assert [trial.number for trial in store.trials("new.name-1")] == [1]
        store.rename_study("new.name-1", "new.name-1")
        assert add_study(store).name == "toy"

    @pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 101, "a/b"])
    def test_a_name_must_be_one_that_a_spec_could_have(self, store: Store, name: str) -> None:
        add_study(store)
        with pytest.raises(UsageError, match="invalid study name") as caught:
            store.rename_study("toy", name)
        assert "100 characters" in str(caught.value.hint)

    def test_a_taken_name_and_an_unknown_study_are_refused(self, store: Store) -> None:
        add_study(store)
        add_study(store, "other")
        with pytest.raises(UsageError, match="study 'other' already exists"):
            store.rename_study("toy", "other")
        calls: list[Callable[[], object]] = [
            lambda: store.rename_study("nix", "new"),
            lambda: store.delete_study("nix"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError):
                call()

    def test_a_study_that_a_driver_runs_is_neither_renamed_nor_archived_nor_deleted(self, store: Store) -> None:
        add_study(store)
        calls: list[Callable[[], object]] = [
            lambda: store.rename_study("toy", "new"),
            lambda: store.archive_study("toy"),
            lambda: store.delete_study("toy"),
        ]
        store.claim("toy", "time steps", owner="node-1/4711", lease_seconds=60.0, is_alive=lambda owner: None)
        for call in calls:
            with pytest.raises(UsageError, match=r"node-1/4711 holds its claim time steps"):
                call()
        start(store, lease_owner="node-1/4711")
        for call in calls:
            with pytest.raises(UsageError, match=r"node-1/4711 runs trial 1"):
                call()
        store.heartbeat("toy", "node-1/4711", -5.0)
        store.rename_study("toy", "new")
        store.delete_study("new")
        assert store.studies() == []

    def test_an_archived_study_keeps_its_moment_and_comes_back(self, store: Store) -> None:
        add_study(store)
        assert store.studies()[0].archived_at is None
        store.archive_study("toy")
        archived_at = store.study("toy").archived_at
        assert archived_at is not None
        assert abs(archived_at - datetime.now(UTC)) < timedelta(minutes=1)
        store.archive_study("toy")
        assert store.studies()[0].archived_at == archived_at
        store.archive_study("toy", archived=False)
        assert store.study("toy").archived_at is None

    def test_deleting_a_study_deletes_what_belongs_to_it_alone(self, store: Store) -> None:
        for name in ("toy", "other"):
            add_study(store, name)
            store.finish_trial(name, start(store, name), CANCELLED, steps_x_step_time_s=None)
            store.finish_trial(name, start(store, name, retry_of=1), CANCELLED, steps_x_step_time_s=None)
            store.append_observations(name, [(1, one) for one in make_curve((0.0, 0.1))])
            store.save_log(name, 1, "text")
            store.save_probe(name, make_environment(), make_probe(8))
            assert store.claim(name, "probe", owner="a", lease_seconds=-5.0, is_alive=lambda owner: None)
        store.delete_study("toy")
        assert [study.name for study in store.studies()] == ["other"]
        with store._reading() as connection:
            for table, rows in {"trial": 2, "observation": 1, "log": 1, "probe": 1, "claim": 1}.items():
                assert connection.execute(text(f"SELECT count(*) FROM bss_{table}")).scalar_one() == rows, table

    def test_a_deleted_study_is_not_taken_for_the_next_of_its_name(self, store: Store, url: str) -> None:
        with open_store(url) as other:
            add_study(store)
            start(store, lease_seconds=-5.0)
            other.delete_study("toy")
            with pytest.raises(NotFoundError):
                start(store)
            add_study(other)
            assert start(store) == 1

    def test_an_archived_study_takes_no_more_trials(self, store: Store) -> None:
        add_study(store)
        store.archive_study("toy")
        calls: list[Callable[[], object]] = [lambda: start(store), lambda: enqueue(store)]
        for call in calls:
            with pytest.raises(UsageError, match="'toy' is archived and accepts no trials"):
                call()
        store.archive_study("toy", archived=False)
        assert start(store) == 1
