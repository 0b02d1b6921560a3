import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from bssearch.errors import WorkloadError
from bssearch.records import Configuration, StepTime, StepTimeRequest
from bssearch.training import probes
from bssearch.training.contention import Contention, CorePace
from bssearch.training.course import eval_every_steps, probe_record
from bssearch.training.probes import measure_step_time, median_interval
from bssearch.training.trainer import Updates
from tests.factories import not_none
from tests.training.toys import FakeTime, Toy, configuration, core_of_pace, on_cpu, toy_data

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
        ({"cpu_share": 0.5}, {"contended": True, "reason": "other work used the processor during the timing"}),
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


def test_five_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 values have no 95 % interval"):
        median_interval([1, 2, 3, 4, 5])


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
