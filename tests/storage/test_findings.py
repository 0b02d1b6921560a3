"""Stored answers count until something changes, on every database."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bssearch.records import TrialState
from bssearch.storage.repository import Store
from tests.factories import make_environment, make_probe
from tests.storage.conftest import OUTCOME, add_study, start

FOUND = {"made_by": 1, "answer": {"batch": 64, "text": "≥ 0.9", "nothing": None}}


def save(store: Store) -> None:
    store.save_finding("toy", store.stamp("toy"), FOUND)


def test_a_finding_comes_back_as_it_was_and_the_newest_counts(store: Store) -> None:
    add_study(store)
    assert store.finding("toy") is None
    save(store)
    assert store.finding("toy") == FOUND
    store.save_finding("toy", store.stamp("toy"), {"made_by": 2})
    assert store.finding("toy") == {"made_by": 2}


CHANGES: dict[str, Callable[[Store], object]] = {
    "a trial starts": lambda store: start(store),
    "a trial ends": lambda store: store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=None),
    "a step time": lambda store: store.save_probe("toy", make_environment(), make_probe(8)),
    "another visit": lambda store: store.save_probe("toy", make_environment(), make_probe(16, step_seconds=9.0), 2),
    "the spec": lambda store: store.update_spec("toy", {"workload": "digits", "confirm": {"runs": 5}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_finding_counts_only_until_something_changes(store: Store, change: str) -> None:
    add_study(store)
    start(store)
    store.save_probe("toy", make_environment(), make_probe(16))
    save(store)
    CHANGES[change](store)
    assert store.finding("toy") is None


def test_another_trial_instead_is_noticed_too(store: Store) -> None:
    """As many trials in the same states as before."""
    add_study(store)
    start(store)
    stamp = store.stamp("toy")
    store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=None)
    start(store)
    assert store.trial("toy", 2).state is TrialState.RUNNING
    assert store.stamp("toy") != stamp


def test_a_renamed_study_has_none_and_a_deleted_one_takes_it_along(store: Store) -> None:
    add_study(store)
    save(store)
    store.rename_study("toy", "other")
    assert store.finding("other") is None
    store.save_finding("other", store.stamp("other"), FOUND)
    store.delete_study("other")
    add_study(store, "other")
    assert store.finding("other") is None


def test_the_versions_of_torch_come_in_the_order_of_the_trials(store: Store) -> None:
    add_study(store)
    add_study(store, "other")
    start(store, "other", environment=make_environment(torch_version="1.0"))
    assert store.torch_versions("toy") == []
    for version in ("2.13", "2.11", "2.13"):
        start(store, environment=make_environment(torch_version=version))
    assert store.torch_versions("toy") == ["2.13", "2.11"]


def test_drivers_are_told_of_a_finding_that_is_news(store: Store) -> None:
    add_study(store)
    for is_news in (False, True):
        seen = store.changes("toy", 0).revision
        store.save_finding("toy", store.stamp("toy"), {"found": is_news}, is_news=is_news)
        assert store.changes("toy", seen).has_new_probes is is_news
