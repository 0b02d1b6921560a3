"""What trials and probes measured, on every database."""

from dataclasses import replace

import pytest

from bssearch.errors import DatabaseError, NotFoundError
from bssearch.records import MemoryUse, Observation, TrialOutcome, TrialState
from bssearch.spec.space import MemoryBoundary
from bssearch.storage.repository import Store
from tests.factories import make_curve, make_environment, make_probe
from tests.storage.conftest import OUTCOME, add_study, start


class TestObservations:
    @pytest.mark.usefixtures("toy")
    def test_observations_come_back_by_trial_and_step(self, store: Store) -> None:
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

    def test_evaluations_are_the_seconds_and_the_metric_of_the_observations(self, store: Store) -> None:
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
    def test_a_step_twice_is_an_error_and_stores_nothing_of_the_batch(self, store: Store) -> None:
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
    def test_observations_that_are_stored_again_as_they_were_are_fine(self, store: Store) -> None:
        curve = make_curve((0.0, 0.1), (1.0, 0.5), (2.0, 0.6))
        for _ in range(2):
            store.trials.append_observations("toy", [(1, one) for one in curve[:2]])
        with pytest.raises(DatabaseError, match="already has an observation at step 0"):
            store.trials.append_observations("toy", [(1, one) for one in curve])
        assert store.trials.observations("toy", 1) == curve[:2]

    @pytest.mark.usefixtures("begun_toy")
    def test_a_value_out_of_bounds_is_named(self, store: Store) -> None:
        wrong = Observation(step=-1, samples=0, train_seconds=0.0, metric=0.0, loss=None, learning_rate=0.1)
        with pytest.raises(DatabaseError, match="step_not_negative"):
            store.trials.append_observations("toy", [(1, wrong)])

    @pytest.mark.usefixtures("toy")
    def test_observations_of_an_unknown_trial_are_refused(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            store.trials.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1))])


@pytest.mark.usefixtures("toy")
class TestStepsTimesStepTime:
    def test_it_is_that_of_all_visits_until_it_is_read_wherever_a_trial_is_read(self, store: Store) -> None:
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


@pytest.mark.usefixtures("toy")
class TestProbes:
    def test_all_visits_to_a_batch_size_count_and_its_cadence_is_that_of_the_first(self, store: Store) -> None:
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

    def test_two_who_visit_at_once_have_each_their_own_visit(self, store: Store) -> None:
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

    def test_a_visit_is_stored_once_however_often_it_is_told(self, store: Store) -> None:
        for seconds in (1.0, 4.0):
            store.probes.add_step_time("toy", make_environment(), make_probe(8, step_seconds=seconds), 1)
        store.probes.add_step_time("toy", make_environment(driver_version="2"), make_probe(8, step_seconds=9.0), 1)
        assert [(one.visit, one.step_seconds) for one in store.probes.visits("toy")] == [(1, 1.0), (2, 9.0)]

    def test_visits_that_were_disturbed_count_only_where_all_were(self, store: Store) -> None:
        environment = make_environment()
        store.probes.add_step_time(
            "toy", environment, make_probe(8, step_seconds=9.0, contended=True, reason="busy"), 1
        )
        store.probes.add_step_time(
            "toy", environment, make_probe(8, step_seconds=4.0, contended=True, reason="busier"), 2
        )
        found = store.probes.by_batch_size("toy")[8]
        assert found.step_seconds == pytest.approx(6.0)
        assert (found.contended, found.reason) == (True, "busier")
        store.probes.add_step_time("toy", environment, make_probe(8, step_seconds=2.0), 3)
        found = store.probes.by_batch_size("toy")[8]
        assert found.step_seconds == pytest.approx(2.0)
        assert (found.contended, found.reason) == (False, None)

    def test_the_split_in_force_is_the_largest_timed_below_what_ran_out_of_memory(self, store: Store) -> None:
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

    def test_a_trial_that_ran_out_of_memory_counts_as_a_probe_does(self, store: Store) -> None:
        start(store)
        micro = store.trials.get("toy", 1).configuration.micro_batch_size
        outcome = TrialOutcome(state=TrialState.OOM, reason="no memory left")
        store.trials.finish("toy", 1, outcome, steps_x_step_time_s=None)
        store.probes.add_step_time("toy", make_environment(), make_probe(micro))
        assert store.probes.memory_boundary("toy").too_large == micro
        assert store.probes.by_batch_size("toy") == {}

    def test_what_a_smaller_device_says_of_memory_does_not_bind_a_larger_one(self, store: Store) -> None:
        small, large = (make_environment(device_memory_bytes=size) for size in (2**30, 2**33))
        store.probes.save_memory("toy", small, use(64, fits=False))
        store.probes.save_memory("toy", small, use(32))
        store.probes.save_memory("toy", large, use(512, fits=False))
        store.probes.save_memory("toy", large, use(256))
        assert store.probes.memory_boundary("toy", small) == MemoryBoundary(fits=32, too_large=64)
        assert store.probes.memory_boundary("toy", large) == MemoryBoundary(fits=256, too_large=512)
        assert [one.micro_batch_size for one in store.probes.memory("toy", small)] == [32, 64]


def in_micro_batches(store: Store) -> dict[int, int]:
    """Return the micro-batch size that each batch size runs in."""
    return {size: probe.micro_batch_size for size, probe in store.probes.by_batch_size("toy").items()}


def use(micro_batch_size: int, *, fits: bool = True) -> MemoryUse:
    return MemoryUse(micro_batch_size=micro_batch_size, fits=fits, peak_memory_bytes=None, reason=None)
