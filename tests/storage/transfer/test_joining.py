"""What joining a copy of a study does to a database that has another one, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from bssearch.errors import UsageError
from bssearch.records import TrialOutcome, TrialState
from bssearch.storage.models import EnvironmentRow
from bssearch.storage.repository import Store, open_store
from bssearch.storage.transfer.joining import Joined
from tests.factories import make_environment, make_probe, make_spec
from tests.storage.conftest import enqueue, start, start_queued
from tests.storage.transfer.copies import (
    OTHER,
    PAUSED,
    REACHED,
    append,
    everything,
    finish,
    larger_budget,
    make_study,
    rows,
)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    """Another database, with a study of one trial that has ended."""
    with open_store(f"sqlite:///{tmp_path}/source.db") as opened:
        make_study(opened)
        start(opened)
        append(opened, 1, (0.0, 0.1), (1.0, 0.9))
        finish(opened, 1)
        yield opened


def join(source: Store, target: Store, name: str | None = None, *, dry_run: bool = False) -> Joined:
    incoming, _ = source.stage_studies(["toy"], "the source")
    try:
        (joined,) = target.try_joining([incoming]) if dry_run else target.join_studies(incoming, name=name)
    finally:
        incoming.close()
    return joined


def refused(source: Store, target: Store, name: str | None = None) -> str:
    """Have a join refused; nothing is stored."""
    before = everything(target)
    with pytest.raises(UsageError) as caught:
        join(source, target, name)
    assert everything(target) == before
    return caught.value.message


def test_a_study_is_known_by_its_maker_its_moment_and_its_question(source: Store, store: Store) -> None:
    assert join(source, store, "mine").is_new
    start(source)
    finish(source, 2)
    again = join(source, store)
    assert (again.study, again.is_new) == ("mine", False)
    assert [one.name for one in store.studies()] == ["mine"]
    assert [one.number for one in store.trials("mine")] == [1, 2]
    assert store.study("mine").spec["name"] == "mine"
    assert store.study("mine").mark == source.study("toy").mark


def test_another_study_of_the_name_is_refused_and_may_have_another_name(source: Store, store: Store) -> None:
    make_study(store)
    assert "there is another study 'toy', which someone made at" in refused(source, store)
    assert "'a b' is no name" in refused(source, store, "a b")
    assert join(source, store, "theirs").is_new
    assert {one.name for one in store.studies()} == {"toy", "theirs"}


def test_of_several_studies_the_first_gets_the_name(source: Store, store: Store) -> None:
    source.create_study(make_spec(name="other").new_study("someone"))
    incoming, _ = source.stage_studies(["toy", "other"], "the source")
    with closing(incoming):
        assert [one.study for one in store.join_studies(incoming, name="mine")] == ["mine", "other"]


def run(store: Store, ended: TrialOutcome = REACHED, metric: float = 0.1, seed: int = 0) -> None:
    """Run a trial to its end."""
    number = start(store, seed=seed)
    append(store, number, (0.0, metric))
    finish(store, number, ended)


CONTRADICTIONS: dict[str, tuple[Callable[[Store], object], Callable[[Store], object], str]] = {
    "ended otherwise": (run, lambda there: run(there, replace(REACHED, train_seconds=9.0)), "trial 2: "),
    "other trials": (
        lambda here: run(here, PAUSED, seed=1),
        lambda there: run(there, seed=2),
        "trial 2: seed = 1 here, and 2 in the source",
    ),
    "other evaluations": (
        lambda here: run(here, PAUSED),
        lambda there: run(there, metric=0.2),
        "observation (trial 2, step 0): metric = 0.1 here, and 0.2 in the source",
    ),
    "another visit": (
        lambda here: here.save_probe("toy", make_environment(), make_probe(8), 1),
        lambda there: there.save_probe("toy", make_environment(), make_probe(8, step_seconds=2.0), 1),
        "step_seconds",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_study_that_went_on_in_both_places_is_refused_with_both_values(
    source: Store, store: Store, name: str
) -> None:
    here, there, said = CONTRADICTIONS[name]
    join(source, store)
    here(store)
    there(source)
    message = refused(source, store)
    assert message.startswith("study 'toy', ")
    assert said in message or (name == "another visit" and "measured_at" in message)


def test_a_study_bound_to_two_kinds_of_device_is_refused(tmp_path: Path, store: Store) -> None:
    with open_store(f"sqlite:///{tmp_path}/unbound.db") as source:
        source.create_study(make_spec().new_study("someone"))
        join(source, store)
        source.bind_environment("toy", make_environment(device_name="A"))
        store.bind_environment("toy", make_environment(device_name="B"))
        assert "device: kind = 'B, fp32, none' here, and 'A, fp32, none' in the source" in refused(source, store)


def test_an_environment_that_was_changed_here_is_refused_with_both_values(source: Store, store: Store) -> None:
    join(source, store)
    with store._writing() as connection:
        connection.execute(update(EnvironmentRow).values(host="changed"))
    start(source)
    finish(source, 2)
    message = refused(source, store)
    assert message.startswith("study 'toy', environment (digest ")
    assert message.endswith(f"host = 'changed' here, and {make_environment().host!r} in the source")


def test_environments_of_one_kind_of_device_go_together(source: Store, store: Store) -> None:
    join(source, store)
    source.bind_environment("toy", OTHER, again=True)
    join(source, store)
    first = store.study("toy").environment
    store.bind_environment("toy", make_environment() if first == OTHER else OTHER, again=True)
    join(source, store)
    assert store.study("toy").environment in (OTHER, make_environment())


def test_the_spec_with_the_larger_budget_counts_in_both_orders(source: Store, store: Store) -> None:
    join(source, store)
    larger_budget(source, 50)
    assert join(source, store).is_changed
    larger_budget(source, 30)
    assert not join(source, store).is_changed
    assert store.study("toy").spec["budget"]["trials"] == 50  # type: ignore[index]


def test_of_specs_with_equal_budgets_both_databases_choose_the_same(tmp_path: Path, source: Store) -> None:
    """Which was set later is not known: that of an earlier copy may count."""
    chosen = []
    with open_store(f"sqlite:///{tmp_path}/first.db") as here:
        join(source, here)
        for earlier, later in ((4, 2), (2, 4)):
            for store, slots in ((source, earlier), (here, later)):
                store.update_spec("toy", make_spec(executor={"slots": slots}).model_dump(mode="json"))
            assert join(source, here).is_changed is (earlier == 4)
            join(here, source)
            assert here.study("toy").spec == source.study("toy").spec
            chosen.append(here.study("toy").spec["executor"])
    assert chosen[0] == chosen[1]


def test_a_trial_that_runs_here_goes_on_until_it_has_ended(source: Store, store: Store) -> None:
    enqueue(source)
    join(source, store)
    start_queued(store, 2, "driver")
    before = everything(store)
    assert not join(source, store).is_changed
    assert everything(store) == before
    start_queued(source, 2, "another")
    finish(source, 2)
    assert "trial 2: it is run here by driver until" in refused(source, store)


def test_a_trial_whose_driver_is_gone_ends_as_it_did_elsewhere(source: Store, store: Store) -> None:
    enqueue(source)
    join(source, store)
    start_queued(store, 2, "driver")
    append(store, 2, (0.0, 0.2), (1.0, 0.3), (2.0, 0.4))
    store.save_log("toy", 2, "what the worker wrote here")
    seen = store.changes("toy", 0).revision
    start_queued(source, 2, "another")
    append(source, 2, (0.0, 0.1))
    finish(source, 2)
    store.heartbeat("toy", "driver", -1.0)
    assert join(source, store).is_changed
    assert store.trial("toy", 2).state is TrialState.REACHED
    assert rows(store) == rows(source)
    assert store.leases("toy") == {}
    assert store.changes("toy", seen).is_rewritten
    assert not join(source, store).is_changed


def test_drivers_see_what_has_come(source: Store, store: Store) -> None:
    join(source, store)
    seen = store.changes("toy", 0)
    assert [one.number for one in seen.trials] == [1]
    assert not store.changes("toy", seen.revision).trials
    start(source)
    finish(source, 2)
    source.save_probe("toy", make_environment(), make_probe(8), 1)
    join(source, store)
    since = store.changes("toy", seen.revision)
    assert ([one.number for one in since.trials], since.has_new_probes, since.is_rewritten) == ([2], True, False)
    append(source, 1, (3.0, 0.95), first=5)
    join(source, store)
    assert [one.number for one in store.changes("toy", since.revision).trials] == [1]


def test_an_answer_that_was_stored_here_counts_until_something_new_has_come(source: Store, store: Store) -> None:
    join(source, store)
    store.save_finding("toy", store.stamp("toy"), {"made_by": 1, "answer": {"batch": 64}})
    join(source, store)
    assert store.finding("toy") is not None
    start(source)
    finish(source, 2)
    join(source, store)
    assert store.finding("toy") is None


def test_new_evaluations_alone_make_a_stored_answer_old_and_its_quick_answer_stays(source: Store, store: Store) -> None:
    """As many trials as before, which ended when they did: the stamp alone does not tell."""
    join(source, store)
    stamp = store.stamp("toy")
    found = {"made_by": 1, "answer": {"batch": 64}, "quick": {"runs": [1]}, "search_end": {"spent": 1}}
    store.save_finding("toy", stamp, found)
    append(source, 1, (3.0, 0.95), first=5)
    join(source, store)
    assert store.stamp("toy") == stamp
    assert store.finding("toy") is None
    assert store.last_finding("toy") == found


def test_a_finding_that_comes_from_elsewhere_has_no_answer_that_counts(source: Store, store: Store) -> None:
    source.save_finding("toy", source.stamp("toy"), {"made_by": 1, "answer": {"batch": 64}, "quick": {"runs": [1]}})
    join(source, store)
    assert store.finding("toy") is None
    last = store.last_finding("toy")
    assert last is not None and (last["answer"], last["quick"]) == (None, {"runs": [1]})


def test_a_dry_run_says_what_would_be_new_and_stores_nothing(source: Store, store: Store) -> None:
    before = everything(store)
    assert join(source, store, dry_run=True).is_new
    assert everything(store) == before


def test_a_study_stays_archived_or_not_as_it_is_here(source: Store, store: Store) -> None:
    join(source, store)
    store.archive_study("toy")
    start(source)
    finish(source, 2)
    join(source, store)
    assert store.study("toy").archived_at is not None
    source.archive_study("toy")
    store.archive_study("toy", archived=False)
    join(source, store)
    assert store.study("toy").archived_at is None
