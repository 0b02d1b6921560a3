"""Measurements of trials and probes, and paused trials, on every database."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from bssearch import DatabaseError, NotFoundError, Store, open_store
from bssearch.records import MemoryUse, Observation, TrialOutcome, TrialState
from bssearch.spec import MemoryBoundary
from tests.factories import make_curve, make_environment, make_probe, not_none
from tests.storage.conftest import OUTCOME, add_study, begun, resume, start

# Observations ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_observations_come_back_by_trial_and_step(store: Store) -> None:
    for _ in range(3):
        start(store)
    first, second = make_curve((0.0, 0.1), (1.0, 0.5), (2.0, 0.9)), make_curve((0.0, 0.2))
    lossy = [replace(one, loss=0.1 * index) for index, one in enumerate(first)]
    store.trials.append_observations("toy", [(1, lossy[1]), (2, second[0]), (1, lossy[0])])
    store.trials.append_observations("toy", [(1, lossy[2])])
    store.trials.append_observations("toy", [])
    assert store.trials.observations("toy", 1) == lossy
    assert store.trials.curves("toy", [1, 2, 3]) == {1: lossy, 2: second, 3: []}
    assert store.trials.curves("toy", []) == {}
    assert store.trials.observation_count("toy") == 4


def test_evaluations_are_the_seconds_and_the_metric_of_the_observations(store: Store) -> None:
    for study in ("other", "toy"):
        add_study(store, study)
        for _ in range(3):
            start(store, study)
    first, second = make_curve((0.0, 0.1), (1.0, 0.5), (2.0, 0.9)), make_curve((0.5, 0.2))
    store.trials.append_observations("toy", [(1, first[2]), (2, second[0]), (1, first[0]), (1, first[1])])
    store.trials.append_observations("other", [(1, second[0])])
    assert store.trials.evaluations("toy", [1, 2, 3]) == {
        1: [(0.0, 0.1), (1.0, 0.5), (2.0, 0.9)],
        2: [(0.5, 0.2)],
        3: [],
    }
    assert store.trials.evaluations("toy", [2]) == {2: [(0.5, 0.2)]}
    assert store.trials.evaluations("toy", []) == {}
    with pytest.raises(NotFoundError):
        store.trials.evaluations("none", [1])


@pytest.mark.usefixtures("begun_toy")
def test_a_repeated_step_is_an_error_and_no_row_is_stored(store: Store) -> None:
    start(store)
    one, two = make_curve((0.0, 0.1), (1.0, 0.5))
    store.trials.append_observations("toy", [(1, one)])
    other = replace(one, metric=0.7)
    with pytest.raises(DatabaseError, match="trial 1 of 'toy' already has an observation at step 0"):
        store.trials.append_observations("toy", [(2, one), (1, two), (1, other)])
    with pytest.raises(DatabaseError, match="trial 2 of 'toy' already has an observation at step 10"):
        store.trials.append_observations("toy", [(2, two), (2, two)])
    assert store.trials.curves("toy", [1, 2]) == {1: [one], 2: []}


@pytest.mark.usefixtures("begun_toy")
def test_identical_observations_may_be_stored_again(store: Store) -> None:
    curve = make_curve((0.0, 0.1), (1.0, 0.5), (2.0, 0.6))
    for _ in range(2):
        store.trials.append_observations("toy", [(1, one) for one in curve[:2]])
    with pytest.raises(DatabaseError, match="already has an observation at step 0"):
        store.trials.append_observations("toy", [(1, one) for one in curve])
    assert store.trials.observations("toy", 1) == curve[:2]


@pytest.mark.usefixtures("begun_toy")
def test_a_value_out_of_bounds_is_named(store: Store) -> None:
    wrong = Observation(step=-1, samples=0, train_seconds=0.0, metric=0.0, loss=None, learning_rate=0.1)
    with pytest.raises(DatabaseError, match="step_not_negative"):
        store.trials.append_observations("toy", [(1, wrong)])


# Steps times step time ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_step_times_are_computed_from_all_visits_when_they_are_read(store: Store) -> None:
    seen = store.trials.changes("toy", 0).revision
    number = start(store)
    stored = store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=9.0)
    assert OUTCOME.steps_to_target == 118
    assert stored.steps_x_step_time_s == 9.0, "no step time of its split is stored"
    for visit, (seconds, product) in enumerate(((0.01, 1.18), (0.04, 2.36)), 1):
        store.probes.add_step_time("toy", make_environment(), make_probe(32, step_seconds=seconds), visit)
        read = [store.trials.get("toy", number), *store.trials.of("toy"), *store.trials.changes("toy", seen).trials]
        assert [one.steps_x_step_time_s for one in read] == pytest.approx([product] * 3)
    store.probes.add_step_time("toy", make_environment(), make_probe(32, micro_batch_size=8, step_seconds=7.0))
    assert store.trials.get("toy", number).steps_x_step_time_s == pytest.approx(2.36), "another split"


# Probes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_all_visits_to_a_batch_size_count_and_its_cadence_is_that_of_the_first(store: Store) -> None:
    add_study(store, "other")
    environment = make_environment()
    huge = make_probe(4096, step_seconds=None, evaluation_seconds=None, eval_every_steps=None, out_of_memory=True)
    for visit, probe in enumerate((make_probe(8, step_seconds=1.0), huge, make_probe(8, step_seconds=4.0)), 1):
        store.probes.add_step_time("toy", environment, replace(probe, eval_every_steps=visit), visit)
    found = store.probes.by_batch_size("toy")
    assert list(found) == [8]
    assert found[8].step_seconds == pytest.approx(2.0), "the geometric mean"
    assert (found[8].eval_every_steps, found[8].error and found[8].error.visits) == (1, 2)
    assert store.probes.by_batch_size("other") == {}
    assert [(one.visit, one.step_seconds) for one in store.probes.visits("toy")] == [(1, 1.0), (2, 4.0)]
    assert store.probes.add_step_time("toy", environment, make_probe(16)) == 4, "a new visit, counted by the store"


@pytest.mark.usefixtures("toy")
def test_two_simultaneous_visits_have_different_numbers(store: Store) -> None:
    driver, probe = (store.probes.add_step_time("toy", make_environment(), make_probe(8)) for _ in range(2))
    assert driver != probe
    for number in (driver, probe):
        assert store.probes.add_step_time("toy", make_environment(), make_probe(16), number) == number
    assert sorted((one.visit, one.batch_size) for one in store.probes.visits("toy")) == [
        (1, 8),
        (1, 16),
        (2, 8),
        (2, 16),
    ]


@pytest.mark.usefixtures("toy")
def test_a_repeated_visit_is_stored_once(store: Store) -> None:
    for seconds in (1.0, 4.0):
        store.probes.add_step_time("toy", make_environment(), make_probe(8, step_seconds=seconds), 1)
    store.probes.add_step_time("toy", make_environment(driver_version="2"), make_probe(8, step_seconds=9.0), 1)
    assert [(one.visit, one.step_seconds) for one in store.probes.visits("toy")] == [(1, 1.0), (2, 9.0)]


@pytest.mark.usefixtures("toy")
def test_disturbed_visits_count_only_if_all_were_disturbed(store: Store) -> None:
    environment = make_environment()
    store.probes.add_step_time("toy", environment, make_probe(8, step_seconds=9.0, contended=True, reason="busy"), 1)
    store.probes.add_step_time("toy", environment, make_probe(8, step_seconds=4.0, contended=True, reason="busier"), 2)
    found = store.probes.by_batch_size("toy")[8]
    assert found.step_seconds == pytest.approx(6.0)
    assert (found.contended, found.reason) == (True, "busier")
    store.probes.add_step_time("toy", environment, make_probe(8, step_seconds=2.0), 3)
    found = store.probes.by_batch_size("toy")[8]
    assert (found.contended, found.reason) == (False, None)
    assert found.step_seconds == pytest.approx(2.0)


@pytest.mark.usefixtures("toy")
def test_the_split_in_force_is_the_largest_timed_below_what_ran_out_of_memory(store: Store) -> None:
    environment = make_environment()
    whole, half, quarter = (make_probe(64, micro_batch_size=size) for size in (64, 32, 16))
    for probe in (quarter, whole):
        store.probes.add_step_time("toy", environment, probe)
    assert in_micro_batches(store) == {64: 64}
    store.probes.save_memory("toy", environment, use(64, fits=False))
    assert in_micro_batches(store) == {64: 16}
    assert store.probes.memory_boundary("toy") == MemoryBoundary(fits=16, too_large=64)
    store.probes.add_step_time("toy", environment, half)
    assert in_micro_batches(store) == {64: 32}


@pytest.mark.usefixtures("toy")
def test_a_trial_that_ran_out_of_memory_counts_as_a_probe_does(store: Store) -> None:
    start(store)
    micro = store.trials.get("toy", 1).configuration.micro_batch_size
    outcome = TrialOutcome(state=TrialState.OOM, reason="no memory left")
    store.trials.finish("toy", 1, outcome, steps_x_step_time_s=None)
    store.probes.add_step_time("toy", make_environment(), make_probe(micro))
    assert store.probes.memory_boundary("toy").too_large == micro
    assert store.probes.by_batch_size("toy") == {}


@pytest.mark.usefixtures("toy")
def test_memory_limits_of_a_smaller_device_do_not_bind_a_larger_one(store: Store) -> None:
    small, large = (make_environment(device_memory_bytes=size) for size in (2**30, 2**33))
    store.probes.save_memory("toy", small, use(64, fits=False))
    store.probes.save_memory("toy", small, use(32))
    store.probes.save_memory("toy", large, use(512, fits=False))
    store.probes.save_memory("toy", large, use(256))
    assert store.probes.memory_boundary("toy", small) == MemoryBoundary(fits=32, too_large=64)
    assert store.probes.memory_boundary("toy", large) == MemoryBoundary(fits=256, too_large=512)
    assert [one.micro_batch_size for one in store.probes.memory("toy", small)] == [32, 64]


def in_micro_batches(store: Store) -> dict[int, int]:
    """Micro-batch size in force at each batch size."""
    return {size: probe.micro_batch_size for size, probe in store.probes.by_batch_size("toy").items()}


def use(micro_batch_size: int, *, fits: bool = True) -> MemoryUse:
    return MemoryUse(micro_batch_size=micro_batch_size, fits=fits, peak_memory_bytes=None, reason=None)


# Paused trials --------------------------------------------------------------------------------------------------------


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
def test_paused_time_does_not_count_as_training_time(store: Store) -> None:
    pause(store, 1, replace(PAUSED, wall_seconds=0.1))
    waited_from = not_none(store.trials.get("toy", 1).ended_at)
    threading.Event().wait(0.3)
    assert resume(store, 1)
    assert 0.15 < (store.trials.get("toy", 1).created_at - waited_from).total_seconds() < 30


def test_a_paused_trial_has_ended_and_has_no_driver(paused: Store) -> None:
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


def test_one_of_many_drivers_resumes_the_trial(paused: Store, url: str) -> None:
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
    assert [resume(paused, number, "anybody") for number in (2, 3, 99)] == [False] * 3
    assert [trial.state for trial in paused.trials.of("toy")] == ["paused", "running", "reached"]


def test_a_resumed_trial_is_lost_with_its_driver_and_keeps_its_progress(paused: Store) -> None:
    resume(paused, 1)
    assert paused.leases.mark_lost("toy", is_alive={"second": False}.get) == [1]
    lost = paused.trials.get("toy", 1)
    assert lost.state is TrialState.LOST and lost.outcome is not None
    assert (lost.outcome.reason, lost.outcome.steps) == ("the driver second is gone", 10)
    assert (lost.outcome.best_metric, lost.outcome.last_miss_step) == (None, None)
    with pytest.raises(DatabaseError, match="is not running but lost"):
        pause(paused, 1)
    assert not resume(paused, 1)


@pytest.mark.usefixtures("begun_toy")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_trial_is_contended_if_any_part_was(store: Store, first: bool, second: bool) -> None:
    pause(store, 1, replace(PAUSED, contended=first))
    resume(store, 1)
    for _ in range(2):  # as after a connection that broke
        pause(store, 1, replace(OUTCOME, contended=second))
    outcome = store.trials.get("toy", 1).outcome
    assert outcome is not None and outcome.contended is (first or second)


def test_trials_that_will_not_resume_are_pruned(paused: Store) -> None:
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


def test_paused_trials_of_another_study_stay_paused(paused: Store) -> None:
    add_study(paused, "other")
    start(paused, "other")
    paused.trials.finish("other", 1, PAUSED, steps_x_step_time_s=None)
    assert paused.trials.settle_paused("other") == [1]
    assert paused.trials.get("toy", 1).state is TrialState.PAUSED
    assert resume(paused, 1)


def test_an_answer_is_stale_when_a_trial_resumes_or_pauses_again(paused: Store) -> None:
    stamps = [paused.findings.stamp("toy")]
    resume(paused, 1)
    stamps.append(paused.findings.stamp("toy"))
    pause(paused, 1)
    stamps.append(paused.findings.stamp("toy"))
    assert len(set(stamps)) == 3
