"""Trials that are paused, go on, or are left as pruned, on every database."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from bssearch.errors import DatabaseError
from bssearch.records import TrialOutcome, TrialState
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve, not_none
from tests.storage.conftest import OUTCOME, add_study, begun, resume, start

PAUSED = replace(
    OUTCOME,
    state=TrialState.PAUSED,
    reason="slower than the fastest",
    time_to_target_s=None,
    steps_to_target=None,
    first_hit_step=None,
    first_hit_seconds=None,
    test_metric=None,
    traceback=None,
    contended=False,
)


def pause(store: Store, number: int, outcome: TrialOutcome = PAUSED) -> None:
    store.trials.finish("toy", number, outcome, steps_x_step_time_s=None)


@pytest.fixture
def paused(store: Store) -> Store:
    """A store with one paused trial that has been evaluated twice."""
    begun(store, lease_owner="first")
    store.trials.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1), (1.0, 0.4))])
    pause(store, 1)
    return store


@pytest.mark.usefixtures("begun_toy")
def test_the_time_in_which_a_trial_waited_is_no_time_of_its_own(store: Store) -> None:
    pause(store, 1, replace(PAUSED, wall_seconds=0.1))
    waited_from = not_none(store.trials.get("toy", 1).ended_at)
    threading.Event().wait(0.3)
    assert resume(store, 1)
    assert 0.15 < (store.trials.get("toy", 1).created_at - waited_from).total_seconds() < 30


def test_a_paused_trial_has_ended_and_nobody_runs_it(paused: Store) -> None:
    trial = paused.trials.get("toy", 1)
    assert (trial.state, trial.outcome) == (TrialState.PAUSED, PAUSED)
    assert trial.ended_at is not None and trial.lease_expires_at is None
    assert paused.leases.mark_lost("toy", is_alive=lambda owner: False) == []
    assert paused.studies.summaries()[0].running == 0
    pause(paused, 1)  # an earlier try made it
    with pytest.raises(DatabaseError, match="is not running but paused"):
        pause(paused, 1, OUTCOME)


def test_it_goes_on_under_its_number_its_new_limit_and_a_new_lease(paused: Store) -> None:
    before = paused.trials.get("toy", 1)
    assert resume(paused, 1)
    trial = paused.trials.get("toy", 1)
    assert (trial.state, trial.outcome, trial.ended_at) == (TrialState.RUNNING, None, None)
    assert (trial.lease_owner, trial.train_seconds_limit) == ("second", 4.0)
    assert (trial.seed, trial.configuration) == (before.seed, before.configuration)
    paused.trials.append_observations("toy", [(1, replace(make_curve((2.0, 0.9))[0], step=20))])
    assert [one.step for one in paused.trials.observations("toy", 1)] == [0, 10, 20]
    ended = replace(OUTCOME, contended=False)
    pause(paused, 1, ended)
    assert paused.trials.get("toy", 1).outcome == ended


def test_one_driver_gets_it(paused: Store) -> None:
    assert resume(paused, 1, "second")
    assert not resume(paused, 1, "third")
    assert paused.trials.get("toy", 1).lease_owner == "second"
    pause(paused, 1)
    assert resume(paused, 1, "third", limit=9.0)
    assert not resume(paused, 1, "second")
    pause(paused, 1, OUTCOME)
    assert not resume(paused, 1, "third")


def test_of_many_drivers_at_once_one_gets_it(paused: Store, url: str) -> None:
    together = threading.Barrier(4)
    got: list[str] = []

    def drive(owner: str) -> None:
        with open_store(url) as store:
            together.wait()
            if resume(store, 1, owner):
                got.append(owner)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(drive, [f"driver-{index}" for index in range(4)]))
    assert got == [paused.trials.get("toy", 1).lease_owner]


def test_other_trials_cannot_be_resumed(paused: Store) -> None:
    start(paused)
    start(paused)
    pause(paused, 3, OUTCOME)
    for number in (2, 3, 99):
        assert not resume(paused, number, "anybody")
    assert [trial.state for trial in paused.trials.of("toy")] == ["paused", "running", "reached"]


def test_a_resumed_trial_is_lost_with_its_driver_and_keeps_how_far_it_came(paused: Store) -> None:
    resume(paused, 1)
    assert paused.leases.mark_lost("toy", is_alive={"second": False}.get) == [1]
    lost = paused.trials.get("toy", 1)
    assert lost.state is TrialState.LOST and lost.outcome is not None
    assert (lost.outcome.reason, lost.outcome.steps) == ("its driver second is gone", 10)
    assert (lost.outcome.best_metric, lost.outcome.last_miss_step) == (None, None)
    with pytest.raises(DatabaseError, match="is not running but lost"):
        pause(paused, 1)
    assert not resume(paused, 1)


@pytest.mark.usefixtures("begun_toy")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_trial_is_contended_where_any_part_of_it_was(store: Store, first: bool, second: bool) -> None:
    pause(store, 1, replace(PAUSED, contended=first))
    resume(store, 1)
    for _ in range(2):  # as after a connection that broke
        pause(store, 1, replace(OUTCOME, contended=second))
    outcome = store.trials.get("toy", 1).outcome
    assert outcome is not None and outcome.contended is (first or second)


def test_those_that_will_not_go_on_are_pruned(paused: Store) -> None:
    for _ in range(4):
        start(paused)
    for number in (2, 3, 4):
        pause(paused, number)
    resume(paused, 2)
    stamp = paused.findings.stamp("toy")
    assert paused.trials.settle_paused("toy", [1, 2, 5, 99]) == [1]
    assert paused.findings.stamp("toy") != stamp
    settled = paused.trials.get("toy", 1)
    assert (settled.state, settled.outcome) == (TrialState.PRUNED, replace(PAUSED, state=TrialState.PRUNED))
    assert paused.trials.settle_paused("toy", []) == []
    assert paused.trials.settle_paused("toy") == [3, 4]
    assert paused.trials.settle_paused("toy") == []
    assert not resume(paused, 3)
    assert [trial.state for trial in paused.trials.of("toy")] == ["pruned", "running", "pruned", "pruned", "running"]


def test_those_of_another_study_are_left_alone(paused: Store) -> None:
    add_study(paused, "other")
    start(paused, "other")
    paused.trials.finish("other", 1, PAUSED, steps_x_step_time_s=None)
    assert paused.trials.settle_paused("other") == [1]
    assert paused.trials.get("toy", 1).state is TrialState.PAUSED
    assert resume(paused, 1)


def test_an_answer_is_old_when_a_trial_goes_on_and_when_it_is_paused_again(paused: Store) -> None:
    stamps = [paused.findings.stamp("toy")]
    resume(paused, 1)
    stamps.append(paused.findings.stamp("toy"))
    pause(paused, 1)
    stamps.append(paused.findings.stamp("toy"))
    assert len(set(stamps)) == 3
