import itertools
import math
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from bssearch.errors import LaunchError, WorkloadError
from bssearch.records import (
    Configuration,
    GradientNoise,
    MemoryRequest,
    NoiseMeasurement,
    NoiseRequest,
    StepTime,
    StepTimeRequest,
    Target,
)
from bssearch.records.noise_scale import FEWEST_PASSES
from bssearch.training import memory, probes
from bssearch.training.contention import Contention, CorePace
from bssearch.training.course import eval_every_steps, probe_record
from bssearch.training.memory import limit_memory, peak_resident_bytes
from bssearch.training.probes import (
    CPU_RESERVE_BYTES,
    PRECISION,
    RESERVE,
    STEPS,
    bytes_within_reserve,
    measure_memory,
    measure_noise,
    measure_step_time,
    median_interval,
)
from bssearch.training.trainer import WARM_UP_STEPS, Updates
from tests.factories import make_noise_request, not_none
from tests.training.toys import CPU, FakeTime, Toy, configuration, core_of_pace, metric_by_evaluation, on_cpu, toy_data

Measure = Callable[..., StepTime]


class QuietMeter:
    """Finds ``found``, by default no contention."""

    found = Contention(False)

    def __init__(self, device: torch.device, threads: int, others: object = ()) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> Contention:
        return self.found


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Return a probe of a workload whose losses and evaluations take the given seconds in turn."""

    def measured(
        losses: list[float],
        evaluations: list[float],
        probed: Configuration | None = None,
        *,
        limit: float = 0.5,
        precision: float = 0.02,
        update: float = 0.0,
        cpu_share: float = 1.0,
        core: CorePace | None = None,
    ) -> StepTime:
        time = FakeTime()
        monkeypatch.setattr(probes, "clock_for", lambda device: time.clock())
        monkeypatch.setattr(probes, "ContentionMeter", QuietMeter)
        if not update:  # a thousand updates without time would not fill the share
            monkeypatch.setattr(probes, "UPDATE_SHARE", 0.0)
        of_losses, of_evaluations = itertools.cycle(losses), iter(evaluations)

        def evaluated(metrics: Mapping[str, float]) -> Mapping[str, float]:
            time.pass_by(next(of_evaluations))
            return metrics

        updated = Updates.apply

        def slow_update(updates: Updates) -> None:
            updated(updates)
            time.pass_by(update)

        monkeypatch.setattr(Updates, "apply", slow_update)

        def lost() -> None:
            seconds = next(of_losses)
            time.pass_by(seconds * cpu_share)
            time.wait_for_a_cpu(seconds * (1 - cpu_share))

        toy = Toy(on_loss=lost, on_evaluate=evaluated)
        request = StepTimeRequest(configuration=probed or configuration(), precision=precision, seconds_limit=limit)
        computation = on_cpu()
        computation.core = core
        return measure_step_time(request, toy, toy_data(), computation)

    return measured


@pytest.mark.parametrize(("limit", "cadence"), [(None, 0), (39.0, 2), (79.0, 4)])
def test_steps_are_timed_between_evaluations_as_in_a_trial(
    limit: float | None, cadence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 20 ms, twice as long right after an evaluation, as with cold caches."""
    time = FakeTime()
    monkeypatch.setattr(probes, "clock_for", lambda device: time.clock())
    monkeypatch.setattr(probes, "ContentionMeter", QuietMeter)
    monkeypatch.setattr(probes, "UPDATE_SHARE", 0.0)
    cold = False

    def evaluated(metrics: Mapping[str, float]) -> Mapping[str, float]:
        nonlocal cold
        cold = True
        time.pass_by(0.001)
        return metrics

    def stepped() -> None:
        nonlocal cold
        time.pass_by(0.04 if cold else 0.02)
        cold = False

    request = StepTimeRequest(configuration=configuration(), trial_train_seconds=limit, seconds_limit=2.0)
    measured = measure_step_time(request, Toy(on_loss=stepped, on_evaluate=evaluated), toy_data(), on_cpu())
    assert measured.step_seconds == pytest.approx(0.02 if not cadence else 0.02 * (cadence + 1) / cadence, rel=0.01)


@pytest.mark.parametrize(
    ("losses", "evaluations", "limit", "times", "timed", "settled"),
    [
        ([0.05, 0.07, 0.9], [0.3, 0.1, 0.2], 0.5, (0.07, 0.2), 6, False),
        ([0.05], [0.7], 5.0, (0.05, 0.7), 20, True),  # a fifth of the limit
        ([0.1, 0.1, 0.2, 0.2], [0.7], 3.0, (0.15, 0.7), 20, False),  # all of the limit
        ([3.0], [0.7], 0.5, (3.0, 0.7), 6, True),  # slow steps: six times
        ([*[50.0] * 5, *[0.1] * 6], [0.7], 0.5, (0.1, 0.7), 6, True),  # without the steps before time starts
    ],
)
def test_steps_and_evaluations_are_timed_until_they_settle_or_the_limit_ends(
    measure: Measure,
    losses: list[float],
    evaluations: list[float],
    limit: float,
    times: tuple[float, float],
    timed: int,
    settled: bool,
) -> None:
    measured = measure(losses, evaluations, limit=limit)
    assert (measured.step_seconds, measured.evaluation_seconds) == pytest.approx(times)
    assert (measured.steps_timed, measured.settled) == (timed, settled)
    assert (measured.batch_size, measured.micro_batch_size, measured.out_of_memory) == (20, 20, False)


def test_a_device_at_its_power_limit_is_timed_at_its_lasting_clock(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chip holds its clock for 60 steps; later steps take 1.5 times as long."""
    steps = [0.02] * 60 + [0.03] * 1000
    assert measure(steps, [0.1] * 3).step_seconds == pytest.approx(0.02)
    monkeypatch.setattr(probes, "throttle_reasons", lambda device: ["power cap"])
    found = measure(steps, [0.1] * 3)
    assert found.step_seconds == pytest.approx(0.03) == found.step_seconds_low


def test_steps_that_scatter_are_timed_until_the_interval_is_narrow_enough(measure: Measure) -> None:
    scattered = np.random.default_rng(0).normal(0.1, 0.01, size=1000).tolist()
    coarse, fine = (measure(scattered, [0.7], limit=100.0, precision=precision) for precision in (0.04, 0.02))
    assert coarse.steps_timed < fine.steps_timed < 1000
    for measured, precision in ((coarse, 0.04), (fine, 0.02)):
        assert measured.settled
        half_width = (not_none(measured.step_seconds_high) - not_none(measured.step_seconds_low)) / 2
        assert half_width <= precision * not_none(measured.step_seconds)


def test_the_interval_of_steps_that_scatter_has_two_ends(measure: Measure) -> None:
    measured = measure([0.1, 0.2], [0.7], limit=3.0)
    assert (measured.step_seconds_low, measured.step_seconds_high) == pytest.approx((0.1, 0.2))


def test_short_steps_are_timed_in_runs_of_ten_milliseconds(measure: Measure) -> None:
    """Every fourth step is slow: each run of ten steps has some, but the median of single steps would miss them."""
    measured = measure([0.001, 0.001, 0.001, 0.005], [0.7])
    assert measured.steps_timed % 10 == 0
    assert measured.step_seconds == pytest.approx(0.002, rel=0.25)


ACCUMULATED = configuration(20, micro_batch_size=5, accumulation_steps=4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"probed": ACCUMULATED}, {"step_seconds": 0.08}),
        ({"update": 0.005}, {"step_seconds": 0.025, "update_seconds": 0.005}),
        ({"cpu_share": 0.5}, {"contended": True, "reason": "other work used the CPU during the timing"}),
        (
            {"core": core_of_pace(1.0, *[1.7] * 1000)},  # rarely at full pace: timed for four times the limit
            {"step_seconds": 0.02, "contended": True, "reason": "the core was slow in 99 of 100 timings"},
        ),
    ],
    ids=["accumulation", "update", "a thread that lost the processor", "a slow core"],
)
def test_steps_of_20_ms_are_timed(measure: Measure, options: dict[str, Any], expected: dict[str, object]) -> None:
    measured = measure([0.02], [0.7], **options)
    assert {name: getattr(measured, name) for name in expected} == pytest.approx(expected)


def test_other_work_on_the_device_is_reported(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = measure([0.05], [0.7])
    assert (alone.contended, alone.reason) == (False, None)
    monkeypatch.setattr(QuietMeter, "found", Contention(True, "process 41 (python) uses the device"))
    shared = measure([0.05], [0.7])
    assert (shared.contended, shared.reason) == (True, "process 41 (python) uses the device")


def test_steps_on_a_slow_core_are_left_out(measure: Measure) -> None:
    """The look after every eighth step is slow, so this step and the next step do not count."""
    losses = [*[0.02] * 6, 0.03, 0.03]
    first = [0.02] * 5  # the warm-up
    measured = measure([*first, *losses * 20], [0.7], limit=2.0, precision=0.0, core=core_of_pace(*[1.0] * 7, 1.7))
    assert measured.step_seconds_low == pytest.approx(0.02)
    assert measured.step_seconds_high == pytest.approx(0.02)
    assert not measured.contended


@pytest.mark.parametrize("at_loss", [1, 8])
def test_out_of_memory_is_an_answer(at_loss: int) -> None:
    fails = Mock(side_effect=[*range(1, at_loss), torch.OutOfMemoryError("CUDA out of memory")])
    measured = measure_step_time(
        StepTimeRequest(configuration=configuration()), Toy(on_loss=fails), toy_data(), on_cpu()
    )
    assert measured.out_of_memory
    assert (measured.step_seconds, measured.evaluation_seconds, measured.steps_timed) == (None, None, 0)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(WorkloadError, match="200 must be <= 100"):
        measure_step_time(StepTimeRequest(configuration=configuration(200)), Toy(), toy_data(), on_cpu())


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18), (100, 40)])
def test_the_interval_of_the_median_has_the_ranks_of_the_sign_test(count: int, rank: int) -> None:
    """The ranks are from tables of the sign test at 5 %, two-sided (David & Nagaraja, § 7.1)."""
    assert median_interval(range(1, count + 1)) == (rank, count + 1 - rank)


@given(st.lists(st.floats(0, 1e3), min_size=6, max_size=60))
def test_the_interval_holds_the_median_of_the_values(values: list[float]) -> None:
    low, high = median_interval(values)
    assert low <= float(np.median(values)) <= high


def test_the_interval_covers_the_median_in_95_of_100_samples() -> None:
    """Log-normal values, as step times are: their median is 1."""
    samples = np.exp(np.random.default_rng(1).normal(size=(2000, 25)))
    assert 0.94 <= sum(low <= 1 <= high for low, high in map(median_interval, samples.tolist())) / 2000 <= 0.98


@pytest.mark.parametrize(
    ("step_seconds", "evaluation_seconds", "full_limit", "steps"),
    [
        (0.001, 0.0, 10.0, 10),  # a thousand evaluations in 10 s
        (0.001, 0.0, 10.5, 11),  # no more than that
        (0.001, 0.01, 10.0, 40),  # an evaluation of 10 ms is a fifth of 40 ms of steps and itself
        (0.001, 0.01, 100.0, 100),
        (0.001, 1.0, 10.0, 500),  # twenty evaluations in 10 s, whatever they cost
        (1.0, 0.0, 10.0, 1),
        (1.0, 100.0, 1.0, 1),
    ],
)
def test_evaluations_are_at_most_a_thousand_and_a_fifth_of_the_time_and_at_least_twenty(
    step_seconds: float, evaluation_seconds: float, full_limit: float, steps: int
) -> None:
    assert eval_every_steps(step_seconds, evaluation_seconds, full_limit) == steps


@pytest.mark.parametrize(
    ("step_seconds", "evaluation_seconds", "cadence"), [(0.001, 0.01, 40), (None, 0.01, None), (0.001, None, None)]
)
def test_a_step_time_is_kept_with_the_cadence_that_follows_from_it(
    step_seconds: float | None, evaluation_seconds: float | None, cadence: int | None
) -> None:
    measured = StepTime(
        batch_size=64, micro_batch_size=32, step_seconds=step_seconds, evaluation_seconds=evaluation_seconds,
        steps_timed=7, peak_memory_bytes=123, step_seconds_low=0.0005, contended=True, reason="a neighbour",
    )  # fmt: skip
    found = probe_record(measured, 10.0)
    assert found.eval_every_steps == cadence
    for name in ("batch_size", "micro_batch_size", "step_seconds", "steps_timed", "step_seconds_low", "reason"):
        assert getattr(found, name) == getattr(measured, name)


# Memory ---------------------------------------------------------------------------------------------------------------


REQUEST = MemoryRequest(configuration=Configuration(batch_size=20, micro_batch_size=20, learning_rate=0.1))


def test_three_whole_steps_and_an_evaluation_are_run() -> None:
    done: list[str] = []

    def evaluated(metrics):  # type: ignore[no-untyped-def]
        done.append("evaluation")
        return metrics

    use = measure_memory(REQUEST, Toy(on_loss=lambda: done.append("step"), on_evaluate=evaluated), toy_data(), on_cpu())
    assert (use.micro_batch_size, use.fits, use.reason) == (20, True, None)
    assert use.peak_memory_bytes is not None
    assert done.count("step") == WARM_UP_STEPS + STEPS
    assert done[-STEPS - 1 :] == ["step"] * STEPS + ["evaluation"]


@pytest.mark.parametrize("where", ["loss", "evaluate"])
def test_out_of_memory_is_an_answer_wherever_it_comes_and_has_its_reason(where: str) -> None:
    failing: Any = {f"on_{where}": Mock(side_effect=MemoryError("no room\nfor that"))}
    use = measure_memory(REQUEST, Toy(**failing), toy_data(), on_cpu())
    assert (use.fits, use.reason) == (False, "MemoryError: no room")


def test_other_errors_of_the_workload_are_raised() -> None:
    with pytest.raises(RuntimeError, match="a mistake"):
        measure_memory(REQUEST, Toy(on_loss=Mock(side_effect=RuntimeError("a mistake"))), toy_data(), on_cpu())


def test_an_allocator_that_thrashes_counts_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    of_kernels, of_training = 3, [4, 5]  # as kernels are chosen, and later on: 2 at the last step

    def retries(device: torch.device) -> int:
        trained = len(steps) - WARM_UP_STEPS
        return of_kernels if trained == 0 else of_training[trained == STEPS]

    monkeypatch.setattr("bssearch.training.probes.allocation_retries", retries)
    reset_at: list[int] = []
    monkeypatch.setattr("bssearch.training.probes.reset_peak_memory", lambda device: reset_at.append(len(steps)))
    use = measure_memory(REQUEST, Toy(on_loss=lambda: steps.append("step")), toy_data(), on_cpu())
    assert reset_at == [WARM_UP_STEPS], "the peak has no workspaces that were tried"
    assert not use.fits
    assert use.reason == "the allocator had to release memory and retry 2 times in 3 steps and 2 evaluations"


def test_a_reserve_is_kept_free_if_the_limit_of_the_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_within_reserve(CPU, None) is None
    assert bytes_within_reserve(CPU, 2**30) == 2**30 - CPU_RESERVE_BYTES
    assert bytes_within_reserve(CPU, 100 * 2**30) == pytest.approx((1 - RESERVE) * 100 * 2**30, abs=1)
    limits: list[int] = []
    monkeypatch.setattr("bssearch.training.probes.limit_memory", lambda device, limit: limits.append(limit))
    assert measure_memory(REQUEST, Toy(), toy_data(), on_cpu(), memory_bytes=990).fits
    assert limits == [990]


def test_the_peak_of_a_process_is_its_high_water_mark(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t   99 kB\nVmHWM:\t     12 kB\nVmRSS:\t 7 kB\n")
    assert peak_resident_bytes(status) == 12 * 1024
    assert peak_resident_bytes(tmp_path / "absent") is None


@pytest.mark.parametrize(("hard", "soft"), [(resource.RLIM_INFINITY, 5000), (4000, 4000)])
def test_on_the_cpu_the_limit_is_that_of_the_data_segment(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int
) -> None:
    set_to: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(memory, "_give_back_what_is_freed", lambda: None)  # this process lives on
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append((kind, limits)))
    monkeypatch.setattr(resource, "getrlimit", lambda kind, hard=hard: (hard, hard))
    limit_memory(CPU, 5000)
    assert set_to.pop() == (resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.gpu
def test_on_a_gpu_the_limit_is_that_of_the_allocator() -> None:
    device = torch.device("cuda")
    limit_memory(device, 2**30)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
    finally:
        limit_memory(device, 2**60)


# The noise scale ------------------------------------------------------------------------------------------------------


def request(**changes: Any) -> NoiseRequest:
    own = {"configuration": configuration(64), "train_seconds_limit": 20.0, "noise_seconds_limit": 60.0}
    return make_noise_request(**{**own, **changes})


def measured(toy: Toy, samples: int = 600, **changes: Any) -> NoiseMeasurement:
    return measure_noise(request(**changes), toy, toy_data(samples), on_cpu())


def test_it_measures_near_the_target_until_the_interval_is_narrow() -> None:
    found = measured(Toy(on_evaluate=metric_by_evaluation([0.5, 0.7, 0.85, 0.88])))
    assert (found.step, found.metric, found.batch_size, found.micro_batch_size) == (15, 0.88, 64, 64)
    noise = found.noise
    assert noise.scale and noise.low and noise.high and noise.passes
    assert (noise.high - noise.low) / 2 <= PRECISION * noise.scale
    assert noise.adam_scale is None
    assert found.reason is None


def test_the_same_seed_trains_to_the_same_weights_and_draws_the_same_passes() -> None:
    one, other = (measured(Toy(), target=Target(metric="accuracy", value=0.8)) for _ in range(2))
    assert one == other
    assert one.step > 0


def test_the_training_ends_at_its_limit_wherever_it_is() -> None:
    found = measured(Toy(on_evaluate=metric_by_evaluation([0.5])), train_seconds_limit=0.01, eval_every_steps=10**9)
    assert 0 < found.step < 10_000
    assert found.metric == 0.5
    assert found.noise.passes
    assert found.reason == "the limit of 0.01 train seconds passed before the target was near"


def test_the_training_ends_with_the_schedules_horizon() -> None:
    wanted = configuration(64, parameters={"schedule": "cosine", "horizon_samples": 7 * 64})
    assert measured(Toy(on_evaluate=metric_by_evaluation([0.5])), configuration=wanted).step == 7


def test_a_measurement_without_time_is_empty() -> None:
    found = measured(Toy(on_evaluate=metric_by_evaluation([0.95])), noise_seconds_limit=0.0)
    assert (found.step, found.noise) == (0, GradientNoise())


def test_the_measurement_ends_at_its_limit_however_wide_the_interval_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr("bssearch.training.probes.time.perf_counter", lambda: float(next(seconds)))
    found = measured(Toy(on_evaluate=metric_by_evaluation([0.95])), noise_seconds_limit=FEWEST_PASSES + 3.0)
    assert found.noise.passes == FEWEST_PASSES + 2


def test_a_workload_that_makes_its_batches_is_told_how_to_have_a_noise_scale() -> None:
    class Streaming(Toy):
        def train_batches(self, batch_size: int, seed: int) -> list[object]:
            return []

    with pytest.raises(WorkloadError, match=r"a workload with train_batches\(\) has no gradient noise scale") as caught:
        measured(Streaming())
    assert "let load() return the training samples" in not_none(caught.value.hint)


@pytest.mark.parametrize(
    ("toy", "changes", "error", "said"),
    [
        (
            Toy(on_evaluate=metric_by_evaluation([0.5, math.nan])),
            {},
            WorkloadError,
            "accuracy = nan is not finite at step 5",
        ),
        (
            Toy(),
            {"samples": 31, "configuration": configuration(2)},
            WorkloadError,
            "31 training samples are too few for 32",
        ),
        (
            Toy(on_loss=Mock(side_effect=torch.OutOfMemoryError("full"))),
            {},
            LaunchError,
            "64 in micro-batches of 64: full",
        ),
    ],
    ids=["a metric that is not finite", "too few samples", "out of memory"],
)
def test_a_failed_measurement_is_an_error(toy: Toy, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        measured(toy, **changes)
