"""How far a study is: its budget, its trials by phase and state, the fastest."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bssearch.commands.trials import status
from bssearch.exchange.trial_rows import ALWAYS_THERE, UNKNOWN_OF_IMPORTED, trial_row
from bssearch.records import Phase, StudyRecord, TrialRecord, TrialState
from bssearch.spec.model import IMPORTED
from bssearch.storage.repository import Store
from tests.factories import EPOCH, make_environment, make_spec, make_trial, not_none


def status_of(*trials: TrialRecord, **changes: Any) -> dict[str, Any]:
    study = StudyRecord.created(make_spec(**changes).new_study("tester"), EPOCH, make_environment())
    store = SimpleNamespace(
        studies=SimpleNamespace(get=lambda name: study),
        trials=SimpleNamespace(of=lambda name: list(trials)),
        findings=SimpleNamespace(last=lambda name: None),
    )
    return status(cast(Store, store), "toy").document()


def test_missing_trials_and_confirmation_runs_are_not_spent_and_all_train_seconds_count() -> None:
    found = status_of(
        make_trial(1, seconds=2.0),
        make_trial(2, state=TrialState.CAPPED, seconds=3.0),
        make_trial(3, state=TrialState.LOST, seconds=4.0),
        make_trial(4, state=TrialState.RUNNING),
        make_trial(5, seconds=5.0, phase=Phase.CONFIRM),
        make_trial(6, state=TrialState.RUNNING, phase=Phase.CONFIRM),
    )
    assert (found["budget_trials"], found["spent_trials"]) == (20, 3)
    assert found["running"] == [4, 6]
    assert found["train_seconds"] == 14.0
    assert found["trials"] == {
        "search": {"reached": 1, "capped": 1, "lost": 1, "running": 1},
        "confirm": {"reached": 1, "running": 1},
    }


def test_the_fastest_is_a_search_trial_that_reached() -> None:
    found = status_of(
        make_trial(1, seconds=2.0, batch_size=16),
        make_trial(2, seconds=1.5, batch_size=64),
        make_trial(3, seconds=0.5, state=TrialState.CAPPED),
        make_trial(4, seconds=1.0, phase=Phase.CONFIRM),
    )
    assert found["fastest"] == {"trial": 2, "batch_size": 64, "time_to_target_s": 1.5, "basis": "measured"}
    assert found["search_ended"] is None
    assert status_of(make_trial(1, state=TrialState.CAPPED))["fastest"] is None


def test_of_an_imported_study_all_runs_are_search_trials() -> None:
    runs = [make_trial(1, seconds=2.0, phase=Phase.CONFIRM), make_trial(2, seconds=1.0, phase=Phase.CONFIRM)]
    found = status_of(*runs, workload=IMPORTED)
    assert found["spent_trials"] == 2
    assert found["fastest"]["trial"] == 2


def test_before_its_end_a_trial_has_the_fields_of_an_end_as_null() -> None:
    row = trial_row(make_trial(1, state=TrialState.RUNNING))
    assert [row[name] for name in ALWAYS_THERE] == [None] * len(ALWAYS_THERE)
    ended = trial_row(make_trial(1, seconds=2.0, steps=50, traceback="where it broke"))
    assert (ended["train_seconds"], ended["time_to_target_s"], ended["steps_to_target"]) == (2.0, 2.0, 50)
    assert (ended["state"], ended["phase"]) == ("reached", "search")
    assert "traceback" not in ended and "parameters" not in ended


@pytest.mark.parametrize(("sampled", "shown"), [(None, None), ({"dropout": 0.1}, {"dropout": 0.1})])
def test_the_coordinates_of_a_trial_are_there_where_it_was_sampled(sampled: Any, shown: Any) -> None:
    assert trial_row(make_trial(1, sampled=sampled))["sampled"] == shown


def test_what_no_table_of_runs_says_is_null_of_an_imported_run() -> None:
    here = make_trial(1, seconds=0.0)
    outcome = replace(not_none(here.outcome), samples=0, train_seconds=0.0, steps=7)
    imported, ours = (
        trial_row(replace(here, created_at=created, outcome=outcome))
        for created in (not_none(here.ended_at), here.created_at)
    )
    assert [imported[name] for name in UNKNOWN_OF_IMPORTED] == [None] * len(UNKNOWN_OF_IMPORTED)
    assert (imported["train_seconds"], imported.get("samples"), imported["steps"]) == (None, None, 7)
    assert (ours["train_seconds"], ours["samples"], ours["threads"]) == (0.0, 0, 1)
