"""The probes of step times, memory and the noise scale, against an executor that answers by a law."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, LaunchError, Store
from bssearch.analysis.law.batch_model import fit_memory
from bssearch.commands.probes import (
    BRACKET,
    FINE,
    SECONDS_LIMIT,
    MemoryProbe,
    next_size,
    noise_sentences,
    probe_memory,
    probe_noise,
    probe_step_times,
    step_time,
)
from bssearch.records import (
    Configuration,
    GradientNoise,
    Lease,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    StepTimeError,
    TrialOutcome,
    TrialState,
)
from bssearch.search import calibration
from bssearch.search.calibration import measure_step_times, missing_step_times
from tests.commands.conftest import HERE, SPEC, ProbedExecutor, open_study
from tests.factories import SPEC as RAW, make_plan, make_probe, make_spec, not_none
from tests.search.law import LawExecutor, step_seconds
from tests.waiting import Ear

SIZES = [8, 16, 32, 64, 128]
ERROR = StepTimeError(own=0.05, common=0.05, freedom=8.0, visits=3)


def test_every_batch_size_is_timed_for_longer_than_a_run_would_and_told(store: Store) -> None:
    executor = ProbedExecutor()
    listener = Ear()
    probes = probe_step_times(open_study(store, executor, listener))
    assert [probe.batch_size for probe in probes] == SIZES
    assert probes == list(store.probes.by_batch_size(SPEC.name).values())
    assert listener.notes == [f"batch {probe.batch_size}: {probe.steps_timed} steps timed" for probe in probes]
    assert executor.limits == [SECONDS_LIMIT] * 5
    assert all(probe.eval_every_steps for probe in probes)


def test_the_document_has_the_fit_and_is_whole_without_one(tmp_path: Path) -> None:
    launch = Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: ProbedExecutor())
    fit = step_time(SPEC, launch).document["fit"]
    assert isinstance(fit, dict) and fit["beta_seconds"] == pytest.approx(0.0001, rel=1e-3)
    single = make_spec(name="single", space={**RAW["space"], "batch_size": 32})
    assert step_time(single, launch).document["fit"] is None


def test_the_host_bound_share_is_stored_and_shown_where_the_device_tells_one(tmp_path: Path) -> None:
    on_cuda = ProbedExecutor(timed=lambda found: replace(found, host_bound_share=4 / found.batch_size))
    report = step_time(SPEC, Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: on_cuda))
    assert [row["host_bound_share"] for row in report.rows] == [4 / size for size in SIZES]
    assert [row["host-bound"] for row in report.table or ()] == ["50%", "25%", "12%", "6%", "3%"]
    assert report.columns[-2:] == ["host-bound", "remark"]
    elsewhere = Launch(db=f"sqlite:///{tmp_path / 'cpu.db'}", make_executor=lambda *_: ProbedExecutor())
    assert "host-bound" not in step_time(SPEC, elsewhere).columns


def test_a_run_that_follows_makes_the_visits_that_are_left(store: Store) -> None:
    probe_step_times(open_study(store, ProbedExecutor()))
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[])
    assert executor.limits == [calibration.SECONDS_LIMIT] * 5 * (calibration.FIRST_VISITS - 1)
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []
    assert calibration.SECONDS_LIMIT < SECONDS_LIMIT


def test_visits_go_round_over_the_batch_sizes(store: Store) -> None:
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, trials=[])
    assert [(one.visit, one.batch_size) for one in store.probes.visits(SPEC.name)] == [
        (visit, size) for visit in range(1, calibration.FIRST_VISITS + 1) for size in SIZES
    ]
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, calibration.COMPARING_VISITS, trials=[])
    assert len(store.probes.visits(SPEC.name)) == calibration.COMPARING_VISITS * len(SIZES)


def test_a_probe_is_one_more_visit_and_what_it_returns_is_what_is_stored(store: Store) -> None:
    first = probe_step_times(open_study(store, ProbedExecutor()))
    slower = ProbedExecutor(timed=lambda found: replace(found, step_seconds=4.0 * not_none(found.step_seconds)))
    again = probe_step_times(open_study(store, slower))
    assert again == list(store.probes.by_batch_size(SPEC.name).values())
    assert [probe.step_seconds for probe in again] == pytest.approx([2 * step_seconds(size) for size in SIZES])
    assert [probe.eval_every_steps for probe in again] == [probe.eval_every_steps for probe in first]
    assert [probe.error and probe.error.visits for probe in again] == [2] * 5


def test_what_contradicts_the_other_step_times_is_visited_again(store: Store) -> None:
    for visit in range(1, calibration.COMPARING_VISITS + 1):
        for size in SIZES:
            seconds = step_seconds(size) * (6.0 if size == 32 else 1.0)
            store.probes.add_step_time(SPEC.name, HERE, make_probe(size, step_seconds=seconds), visit)
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []
    assert missing_step_times(SPEC, store, HERE, calibration.COMPARING_VISITS, trials=[]) == [32, 64]
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, calibration.COMPARING_VISITS, trials=[])
    assert Counter(one.batch_size for one in store.probes.visits(SPEC.name)) == {
        **dict.fromkeys(SIZES, calibration.COMPARING_VISITS),
        **dict.fromkeys([32, 64], calibration.MOST_VISITS),
    }, "and no more, though it is doubted still"


def test_what_does_not_fit_is_timed_in_smaller_micro_batches(store: Store) -> None:
    probes = probe_step_times(open_study(store, ProbedExecutor(fits_up_to=40)))
    assert [(probe.batch_size, probe.micro_batch_size) for probe in probes] == [
        (8, 8),
        (16, 16),
        (32, 32),
        (64, 32),
        (128, 32),
    ]
    assert store.probes.memory_boundary(SPEC.name, HERE).too_large == 64


def test_visits_that_others_disturbed_are_made_and_not_made_again_for_ever(store: Store) -> None:
    for visit in range(1, calibration.COMPARING_VISITS + 1):
        for size in SIZES:
            store.probes.add_step_time(SPEC.name, HERE, make_probe(size, contended=visit > 1), visit)
    assert missing_step_times(SPEC, store, HERE, calibration.COMPARING_VISITS, trials=[]) == []
    assert [probe.error and probe.error.visits for probe in store.probes.by_batch_size(SPEC.name).values()] == [3] * 5


def test_what_would_be_timed_in_smaller_micro_batches_than_those_in_force_is_left_alone(store: Store) -> None:
    store.probes.save_memory(SPEC.name, HERE, MemoryUse(micro_batch_size=100, fits=False, peak_memory_bytes=None))
    store.probes.save_memory(SPEC.name, HERE, MemoryUse(micro_batch_size=20, fits=True, peak_memory_bytes=None))
    for size in SIZES:
        store.probes.add_step_time(SPEC.name, HERE, make_probe(size, micro_batch_size=min(size, 64)), 1)
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[])
    assert len(executor.limits) <= len(SIZES) * calibration.MOST_VISITS
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []


def test_where_nothing_fits_no_step_is_timed_and_no_noise_measured(store: Store) -> None:
    assert probe_step_times(open_study(store, ProbedExecutor(fits_up_to=0))) == []
    with pytest.raises(LaunchError, match="does not fit into memory"):
        probe_noise(open_study(store, ProbedExecutor(fits_up_to=0)))


# Memory ---------------------------------------------------------------------------------------------------------------


def probe(store: Store, executor: LawExecutor, **environment: Any) -> MemoryProbe:
    return probe_memory(open_study(store, executor, **environment))


def test_sizes_are_doubled_then_bisected_and_only_those_are_returned(store: Store) -> None:
    executor = LawExecutor(fits_up_to=300)
    found = probe(store, executor)
    assert executor.sizes_run == [8, 16, 32, 64, 128, 256, 512, 384, 320, 288, 304, 296]
    assert [use.micro_batch_size for use in found.uses] == executor.sizes_run
    assert (found.largest_that_fits, found.smallest_that_does_not) == (296, 304)
    assert not found.whole_training_part_fits
    assert found.fit is not None
    assert found.fit.fixed_bytes == pytest.approx(10**6)
    assert found.fit.bytes_per_sample == pytest.approx(1000)
    assert found.fit.largest_residual == pytest.approx(0, abs=1e-9)


def test_whatever_is_marginal_the_ends_are_beside_it_and_are_no_marginal_sizes() -> None:
    for ceiling, reserve_ends in [(1, 2), (7, 2), (7, 9), *((300, one) for one in range(2, 302, 7))]:
        for memory_ends in range(reserve_ends, ceiling + 2, 5):
            uses: list[MemoryUse] = []
            marginal: list[int] = []
            while (size := next_size(uses, smallest=8, ceiling=ceiling, marginal=marginal)) is not None:
                assert 1 <= size <= ceiling and size not in {use.micro_batch_size for use in uses} | set(marginal)
                if reserve_ends <= size < memory_ends:
                    marginal.append(size)
                else:
                    uses.append(MemoryUse(micro_batch_size=size, fits=size < reserve_ends, peak_memory_bytes=None))
            fitting = max((use.micro_batch_size for use in uses if use.fits), default=0)
            failing = min((use.micro_batch_size for use in uses if not use.fits), default=ceiling + 1)
            assert fitting < reserve_ends and memory_ends <= failing
            assert failing <= max(fitting + 1, BRACKET * fitting) or (
                reserve_ends <= max(fitting + 1, FINE * fitting)
                and (failing > ceiling or failing <= max(memory_ends, FINE * (memory_ends - 1)))
            ), (reserve_ends, memory_ends, fitting, failing)
            assert len(uses) + len(marginal) <= 30


def test_a_size_that_leaves_no_reserve_neither_fits_nor_is_too_large(store: Store) -> None:
    found = probe(store, LawExecutor(fits_up_to=300, leaves_reserve_up_to=260))
    assert found.largest_that_fits <= 260 and found.smallest_that_does_not is not None
    assert found.smallest_that_does_not > 300
    assert {260 < use.micro_batch_size <= 300 for use in found.marginal} == {True}
    assert all("only without a reserve" in (use.reason or "") for use in found.marginal)
    stored = {use.micro_batch_size for use in store.probes.memory(SPEC.name, HERE)}
    assert stored.isdisjoint(use.micro_batch_size for use in found.marginal)


def test_where_the_whole_training_part_fits_it_was_run_and_nothing_is_named_above(store: Store) -> None:
    executor = LawExecutor()
    found = probe(store, executor)
    assert executor.sizes_run[-1] == found.largest_that_fits == found.ceiling == 1000
    assert found.smallest_that_does_not is None
    assert found.whole_training_part_fits


def test_a_probe_that_broke_off_goes_on_where_it_stopped_and_a_limit_is_another_device(store: Store) -> None:
    class Breaks(LawExecutor):
        def measure_memory(self, request: MemoryRequest) -> MemoryUse:
            if len(self.sizes_run) == 4:
                raise KeyboardInterrupt
            return super().measure_memory(request)

    with pytest.raises(KeyboardInterrupt):
        probe(store, Breaks(fits_up_to=300))
    executor = LawExecutor(fits_up_to=300)
    found = probe(store, executor)
    assert executor.sizes_run[0] == 128
    assert found.largest_that_fits == 296
    assert probe(store, LawExecutor(fits_up_to=300)).uses == tuple(sorted(found.uses, key=lambda u: u.micro_batch_size))
    limited = LawExecutor(fits_up_to=20)
    assert probe(store, limited, device_memory_bytes=2**20).largest_that_fits <= 20
    assert limited.sizes_run[0] == 8


def test_below_the_smallest_batch_size_it_goes_down(store: Store) -> None:
    executor = LawExecutor(fits_up_to=3)
    found = probe(store, executor)
    assert executor.sizes_run == [8, 4, 2, 3]
    assert (found.largest_that_fits, found.smallest_that_does_not, found.fit) == (3, 4, None)


def test_where_not_even_one_sample_fits_the_error_has_the_probes_numbers(store: Store) -> None:
    with pytest.raises(
        LaunchError, match=r"not even .* Test CPU \(8 GiB\); these sizes ran out of memory: 8, 4, 2, 1 \(no"
    ) as e:
        probe(store, LawExecutor(fits_up_to=0))
    assert e.value.exit_code == 6
    assert [use.fits for use in store.probes.memory(SPEC.name, HERE)] == [False] * 4


def test_the_fit_is_of_sizes_that_fit_and_says_how_far_off_it_is() -> None:
    peaks = [(10, 1100), (20, 1200), (30, 1330)]
    uses = [MemoryUse(micro_batch_size=size, fits=True, peak_memory_bytes=peak) for size, peak in peaks]
    uses.append(MemoryUse(micro_batch_size=40, fits=False, peak_memory_bytes=9999))
    fit = not_none(fit_memory(uses))
    assert fit.bytes_per_sample == pytest.approx(11.5)
    assert fit.fixed_bytes == pytest.approx(980)
    assert fit.largest_residual == pytest.approx(10 / 1200)
    assert fit_memory(uses[1:]) is None


# Noise ----------------------------------------------------------------------------------------------------------------


def add_trial(store: Store, configuration: Configuration, seconds: float | None) -> None:
    """Add a trial that reached the target after these seconds, or was capped."""
    plan = make_plan(configuration=configuration, eval_every_steps=17)
    trial = not_none(store.trials.start(SPEC.name, plan, environment=HERE, lease=Lease(owner="driver", seconds=60.0)))
    outcome = TrialOutcome(state=TrialState.CAPPED, reason="as the test has it", train_seconds=0.1, wall_seconds=0.1)
    if seconds is not None:
        outcome = replace(
            outcome, state=TrialState.REACHED, train_seconds=seconds, time_to_target_s=seconds, steps_to_target=10
        )
    store.trials.finish(SPEC.name, trial.number, outcome, steps_x_step_time_s=None)


def test_the_default_is_measured_where_no_trial_has_reached_the_target(store: Store) -> None:
    add_trial(store, replace(SPEC.default_configuration, learning_rate=0.3), None)
    executor = ProbedExecutor()
    found = probe_noise(open_study(store, executor))
    (request,) = executor.asked_noise
    assert request.configuration == SPEC.default_configuration
    assert executor.splits_timed and request.eval_every_steps >= 1
    assert (request.target, request.train_seconds_limit) == (SPEC.record_target, SPEC.budget.trial_train_seconds)
    assert store.probes.noise(SPEC.name) == [found]
    again = probe_noise(open_study(store, ProbedExecutor()))
    assert store.probes.noise(SPEC.name) == [again], "it takes the place of the first"


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_the_noise_scale_has_the_unit_of_the_batch_size(unit: str) -> None:
    noise = GradientNoise(scale=40.0, low=30.0, high=50.0, passes=9)
    found = NoiseMeasurement(batch_size=8, micro_batch_size=8, step=3, metric=0.5, noise=noise, reason=None)
    said = next(noise_sentences(found, make_spec(training={"batch_unit": unit})))
    assert said.endswith(f"{unit} (9 passes)")


def test_a_step_time_that_is_stored_is_not_measured_again(store: Store) -> None:
    store.probes.add_step_time(SPEC.name, HERE, make_probe(SPEC.default.batch_size, eval_every_steps=9))
    executor = ProbedExecutor()
    probe_noise(open_study(store, executor))
    assert (executor.splits_timed, executor.asked_noise[0].eval_every_steps) == ([], 9)


def test_the_configuration_of_the_fastest_trial_is_measured_as_it_ran(store: Store) -> None:
    slow, fast = (replace(SPEC.default_configuration, learning_rate=rate) for rate in (0.2, 0.3))
    add_trial(store, slow, 3.0)
    add_trial(store, fast, 2.0)
    add_trial(store, slow, None)
    executor = ProbedExecutor()
    probe_noise(open_study(store, executor))
    assert executor.asked_noise[0].configuration == fast
    assert (executor.asked_noise[0].eval_every_steps, executor.splits_timed) == (17, [])
