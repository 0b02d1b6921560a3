"""Studies renamed, archived and deleted, on every database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from bssearch.errors import NotFoundError, UsageError
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve, make_environment, make_probe, not_none
from tests.storage.conftest import CANCELLED, OUTCOME, add_study, begun, enqueue, start


class TestKeeping:
    def test_a_study_is_renamed_with_all_it_has(self, store: Store) -> None:
        add_study(store)
        store.trials.finish("toy", start(store), OUTCOME, steps_x_step_time_s=None)
        store.studies.rename("toy", "new.name-1")
        assert store.studies.find("toy") is None
        assert store.studies.get("new.name-1").spec["name"] == "new.name-1"
        assert [trial.number for trial in store.trials.of("new.name-1")] == [1]
        store.studies.rename("new.name-1", "new.name-1")
        assert add_study(store).name == "toy"

    @pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 101, "a/b"])
    def test_a_name_must_be_one_that_a_spec_could_have(self, store: Store, name: str) -> None:
        add_study(store)
        with pytest.raises(UsageError, match="invalid study name") as caught:
            store.studies.rename("toy", name)
        assert "100 characters" in str(caught.value.hint)

    def test_a_taken_name_and_an_unknown_study_are_refused(self, store: Store) -> None:
        add_study(store)
        add_study(store, "other")
        with pytest.raises(UsageError, match="study 'other' already exists"):
            store.studies.rename("toy", "other")
        calls: list[Callable[[], object]] = [
            lambda: store.studies.rename("nix", "new"),
            lambda: store.studies.delete("nix"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError):
                call()

    def test_a_study_that_a_driver_runs_is_neither_renamed_nor_archived_nor_deleted(self, store: Store) -> None:
        add_study(store)
        calls: list[Callable[[], object]] = [
            lambda: store.studies.rename("toy", "new"),
            lambda: store.studies.archive("toy"),
            lambda: store.studies.delete("toy"),
        ]
        store.leases.claim("toy", "time steps", owner="node-1/4711", lease_seconds=60.0, is_alive=lambda owner: None)
        for call in calls:
            with pytest.raises(UsageError, match=r"node-1/4711 holds its claim time steps"):
                call()
        start(store, lease_owner="node-1/4711")
        for call in calls:
            with pytest.raises(UsageError, match=r"node-1/4711 runs trial 1"):
                call()
        store.leases.heartbeat("toy", "node-1/4711", -5.0)
        store.studies.rename("toy", "new")
        store.studies.delete("new")
        assert store.studies.summaries() == []

    def test_an_archived_study_keeps_its_moment_and_comes_back(self, store: Store) -> None:
        add_study(store)
        assert store.studies.summaries()[0].archived_at is None
        store.studies.archive("toy")
        archived_at = not_none(store.studies.get("toy").archived_at)
        assert abs(archived_at - datetime.now(UTC)) < timedelta(minutes=1)
        store.studies.archive("toy")
        assert store.studies.summaries()[0].archived_at == archived_at
        store.studies.archive("toy", archived=False)
        assert store.studies.get("toy").archived_at is None

    def test_deleting_a_study_deletes_what_belongs_to_it_alone(self, store: Store) -> None:
        for name in ("toy", "other"):
            add_study(store, name)
            store.trials.finish(name, start(store, name), CANCELLED, steps_x_step_time_s=None)
            store.trials.finish(name, start(store, name, retry_of=1), CANCELLED, steps_x_step_time_s=None)
            store.trials.append_observations(name, [(1, one) for one in make_curve((0.0, 0.1))])
            store.trials.save_log(name, 1, "text")
            store.probes.add_step_time(name, make_environment(), make_probe(8))
            assert store.leases.claim(name, "probe", owner="a", lease_seconds=-5.0, is_alive=lambda owner: None)
        store.studies.delete("toy")
        assert [study.name for study in store.studies.summaries()] == ["other"]
        with store.reading() as connection:
            for table, rows in {"trial": 2, "observation": 1, "log": 1, "probe": 1, "claim": 1}.items():
                assert connection.execute(text(f"SELECT count(*) FROM bss_{table}")).scalar_one() == rows, table

    def test_a_deleted_study_is_not_taken_for_the_next_of_its_name(self, store: Store, url: str) -> None:
        with open_store(url) as other:
            begun(store, lease_seconds=-5.0)
            other.studies.delete("toy")
            with pytest.raises(NotFoundError):
                start(store)
            add_study(other)
            assert start(store) == 1

    def test_an_archived_study_takes_no_more_trials(self, store: Store) -> None:
        add_study(store)
        store.studies.archive("toy")
        calls: list[Callable[[], object]] = [lambda: start(store), lambda: enqueue(store)]
        for call in calls:
            with pytest.raises(UsageError, match="'toy' is archived and accepts no trials"):
                call()
        store.studies.archive("toy", archived=False)
        assert start(store) == 1
