"""What an answer says of memory, step time, gradient noise, and an optimum that the host bounds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.answer import Answer, Batch
from bssearch.analysis.batches import steps_to_target
from bssearch.analysis.build_answer import build_answer, predict_for_device
from bssearch.analysis.law.batch_model import fit_memory, fit_step_time
from bssearch.analysis.measured import about_devices, measured, noise_of_batches
from bssearch.analysis.notices import device_bound
from bssearch.analysis.optimum import Candidate, median_steps
from bssearch.records import (
    DeviceUse,
    GradientNoise,
    MemoryUse,
    NoiseMeasurement,
    Phase,
    ProbeRecord,
    StudyRecord,
    TrialRecord,
    TrialState,
)
from bssearch.records.noise_scale import pooled
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary
from tests.analysis.test_report import answer, confirmed, searched
from tests.factories import EPOCH, make_environment, make_probe, make_spec, make_trial, not_none, with_outcome
from tests.figures.test_plots import answer_of

NOISE = GradientNoise(scale=100.0, low=80.0, high=130.0, passes=16)


def test_nothing_measured_is_null_and_not_zero() -> None:
    found = measured([], [], UNKNOWN, [], [make_trial(1)])
    assert (found.step_time, found.memory, found.noise_scale) == (None, None, None)


def test_step_times_give_a_line_and_a_knee() -> None:
    seconds = {8: 0.0104, 64: 0.0132, 512: 0.0356, 4096: 0.2148}  # 10 ms + 0.05 ms a sample
    step_time = not_none(
        measured(
            [make_probe(size, step_seconds=value) for size, value in seconds.items()], [], UNKNOWN, [], []
        ).step_time
    )
    assert [step_time.alpha_s, step_time.beta_s] == pytest.approx([0.01, 5e-5])
    assert step_time.throughput_knee == 4096
    assert step_time.max_residual == pytest.approx(0, abs=1e-9)


def test_memory_is_what_was_run_and_the_line_through_the_peaks() -> None:
    uses = [MemoryUse(micro_batch_size=size, fits=True, peak_memory_bytes=1000 + 3 * size) for size in (10, 20, 40)] + [
        MemoryUse(micro_batch_size=80, fits=False, peak_memory_bytes=None, reason="full")
    ]
    memory = not_none(measured([], uses, MemoryBoundary(fits=40, too_large=80), [], []).memory)
    assert (memory.largest_that_fits, memory.smallest_that_does_not) == (40, 80)
    assert [memory.fixed_bytes, memory.bytes_per_sample] == pytest.approx([1000, 3])
    assert fit_memory(uses[1:]) is None


def test_a_probe_of_the_noise_scale_comes_before_what_trials_measured_in_passing() -> None:
    runs = [make_trial(4, noise=replace(NOISE, passes=8)), make_trial(5, noise=NOISE), make_trial(6)]
    in_passing = not_none(measured([], [], UNKNOWN, [], runs).noise_scale)
    assert (in_passing.trial, in_passing.step, in_passing.passes) == (5, None, 16)
    unknown, bound = GradientNoise(passes=16), GradientNoise(low=300.0, passes=16)
    probes = [
        NoiseMeasurement(batch_size=64, micro_batch_size=64, step=40, metric=0.9, noise=noise)
        for noise in (unknown, bound)
    ]
    probed = not_none(measured([], [], UNKNOWN, probes, runs).noise_scale)
    assert (probed.scale, probed.low, probed.high, probed.step, probed.trial) == (None, 300.0, None, 40, None)
    far = [replace(one, reason="the limit passed before") for one in probes]
    assert measured([], [], UNKNOWN, far, runs).noise_scale == in_passing
    only = not_none(measured([], [], UNKNOWN, far, [make_trial(6)]).noise_scale)
    assert only.far_from_target == "the limit passed before"


def test_what_all_runs_of_the_optimum_warn_of_is_told_once() -> None:
    runs = confirmed(32, 0.5, 0.6, 0.4, warnings=("it was compiled in vain",))
    runs[0] = with_outcome(runs[0], warnings=("it was compiled in vain", "a gap"))
    found = answer([*searched(), *runs], probes={16: make_probe(16, contended=True)})
    told = {notice.code: notice.message for notice in found.warnings}
    assert told["measurement"] == "it was compiled in vain"
    assert "other work disturbed the step times of batch 16" in told["step_times_contended"]
    assert all(run.phase is Phase.CONFIRM for run in runs)


def short(number: int, noise: GradientNoise, batch_size: int = 32, **changes: Any) -> TrialRecord:
    return make_trial(number, batch_size=batch_size, noise=noise, **changes)


PARTS = [
    GradientNoise(passes=passes, trace=trace, square=square)
    for passes, trace, square in ((1, 90.0, 1.1), (2, 110.0, 0.9), (1, 100.0, 1.0), (3, 105.0, 1.05))
]


def test_each_batch_size_has_the_noise_scale_pooled_over_its_trials_that_came_near_the_target() -> None:
    trials = [
        *(short(number, noise) for number, noise in enumerate(PARTS)),
        make_trial(10),
        short(11, PARTS[0], state=TrialState.LOST),
        *(short(20 + number, noise, batch_size=64) for number, noise in enumerate(PARTS[:2])),
        short(30, NOISE, batch_size=128),
        short(31, replace(NOISE, passes=32, scale=200.0), batch_size=128),
    ]
    found = noise_of_batches(trials)
    whole = pooled(PARTS)
    assert (found[32].scale, found[32].low, found[32].high) == (whole.scale, whole.low, whole.high)
    assert (found[32].trials, found[32].passes) == (4, 7)
    assert 64 not in found, "two trials give no interval"
    assert (found[128].scale, found[128].trials) == (200.0, 1), "of trials without moments, the one with most passes"


def test_the_answers_noise_scale_is_pooled_over_the_trials_of_the_optimums_batch_size() -> None:
    trials = [*(short(number, noise) for number, noise in enumerate(PARTS)), short(9, NOISE, batch_size=64)]
    runs = [make_trial(5)]
    found = not_none(measured([], [], UNKNOWN, [], runs, noise_of_batches(trials)).noise_scale)
    assert (found.batch_size, found.trials, found.trial, found.passes) == (32, 4, None, 7)
    near = NoiseMeasurement(batch_size=64, micro_batch_size=64, step=40, metric=0.9, noise=NOISE)
    probed = measured([], [], UNKNOWN, [near], runs, noise_of_batches(trials)).noise_scale
    assert probed is not None and (probed.step, probed.trials) == (40, None), "a probe near the target comes first"
    pooled_before = measured(
        [], [], UNKNOWN, [replace(near, reason="the limit passed before")], runs, noise_of_batches(trials)
    ).noise_scale
    assert pooled_before == found


def on_device(number: int, device: str | None, pace: float, batch_size: int = 32, **changes: Any) -> TrialRecord:
    """Return a trial whose steps took ``pace`` times as long as on any other device."""
    return with_outcome(
        make_trial(number, batch_size=batch_size, seconds=pace * batch_size, device_uuid=device, **changes), steps=100
    )


def node(pace: float, device: str | None = "GPU-7", trials: int = 2, **changes: Any) -> list[TrialRecord]:
    """Return trials at two batch sizes on three devices, of which one is as fast as that."""
    paces = [("GPU-1", 1.0), ("GPU-2", 1.02), (device, pace)]
    return [
        on_device(number, name, factor, size, **(changes if name == device else {}))
        for number, (size, name, factor) in enumerate(
            [(size, name, factor) for size in (16, 64) for name, factor in paces for _ in range(trials)]
        )
    ]


def test_a_device_slower_than_its_siblings_is_named_with_how_much() -> None:
    ((code, sentence),) = about_devices(node(1.2))
    assert code == "device_slower" and "GPU-7 take 1.19 times" in sentence
    assert "device_slower" in {notice.code for notice in answer([*searched(), *node(1.2)]).warnings}


@pytest.mark.parametrize(
    "trials",
    [
        node(1.04),
        node(1.2, contended=True),
        node(1.2, device=None),
        node(1.2, trials=1),
        [on_device(number, "GPU-7" if number % 2 else "GPU-1", 1.0, 16 << number % 2) for number in range(8)],
        [on_device(number, "GPU-7", 1.0 + number) for number in range(8)],
    ],
    ids=["within 5 %", "contended", "the CPU", "too few trials", "other batch sizes", "alone"],
)
def test_a_device_is_not_called_slow_for_what_is_not_its_own(trials: list[TrialRecord]) -> None:
    assert [*about_devices(trials)] == []


# Batch sizes ----------------------------------------------------------------------------------------------------------


def two_runs(*steps: int, **changes: Any) -> list[TrialRecord]:
    return [
        make_trial(n, batch_size=64, phase=Phase.CONFIRM, seed=n, steps=one, seconds=0.01 * one, **changes)
        for n, one in enumerate(steps)
    ]


def row_of(answer: Answer, size: int) -> Batch:
    return next(row for row in answer.batches if row.batch_size == size)


def test_steps_are_whole_and_what_is_made_of_them_is_of_the_median() -> None:
    row = row_of(answer_of(two_runs(4, 5), make_spec(objective="samples_to_target", confirm={"runs": 2})), 64)
    assert (row.steps_to_target, row.samples_to_target, not_none(row.objective_value).median) == (5, 288, 288)
    assert row.steps_x_step_time_s == pytest.approx(4.5 * not_none(row.step_time_s))


def test_the_median_is_not_known_where_half_of_the_runs_missed() -> None:
    runs = two_runs(4, 5, 7)
    assert (median_of(runs), median_of(runs[:2])) == (5, 4.5)
    half = Candidate(runs[0].configuration, (runs[0], make_trial(9, batch_size=64, state=TrialState.EXHAUSTED)))
    assert (median_steps(half), steps_to_target(half)) == (None, None)


def median_of(runs: Sequence[TrialRecord]) -> float | None:
    return median_steps(Candidate(runs[0].configuration, tuple(runs)))


@pytest.mark.parametrize(
    ("objective", "bound"),
    [
        ("time_to_target", 7.2),
        ("samples_to_target", 300 * 8),
        ("cost_to_target", 7.2 * 2.0 / 3600),
        ("energy_to_target", None),
        ("metric_in_budget", None),
    ],
)
def test_a_bound_is_in_the_unit_of_the_objective(objective: str, bound: float | None) -> None:
    missed = make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300, best_metric=0.8)
    spec = make_spec(objective=objective, price_per_device_hour=2.0)
    row = row_of(
        answer_of([make_trial(0, batch_size=64, device_use=DeviceUse(mean_power_watts=100.0)), missed], spec), 8
    )
    assert row.objective_lower_bound == (None if bound is None else pytest.approx(bound))
    assert row.lower_bound_s == pytest.approx(7.2)


def test_runs_compared_by_steps_and_step_time_have_their_restricted_mean_in_the_same_seconds() -> None:
    runs = two_runs(200, 300, contended=True, product=1.0)
    missed = make_trial(
        9,
        batch_size=64,
        phase=Phase.CONFIRM,
        seed=9,
        state=TrialState.EXHAUSTED,
        seconds=9.0,
        last_miss_step=400,
        contended=True,
    )
    row = row_of(answer_of([*runs, missed]), 64)
    found, seconds = not_none(row.restricted), not_none(row.step_time_s)
    assert (found.mean_s, found.horizon_s) == pytest.approx((seconds * (200 + 300 + 400) / 3, seconds * 400))


SIZES = tuple(2**power for power in range(3, 13))
ALPHA, BETA, HOST = 5e-4, 5e-5, 3e-3
B_CRIT = 200
NAMED = "training: {compile: reduce-overhead}"


def steps(size: int) -> int:
    """Return the steps to the target by the law."""
    return round(1000 * (1 + B_CRIT / size))


def probe(size: int, host: float = HOST, **changes: Any) -> ProbeRecord:
    seconds = max(ALPHA + BETA * size, host)
    return make_probe(size, **{"step_seconds": seconds, "host_bound_share": host / seconds, **changes})


def bound_runs(probed: ProbeRecord, **changes: Any) -> list[TrialRecord]:
    """Return three confirmation runs, whose steps differ by a hundredth."""
    size, seconds = probed.batch_size, probed.step_seconds or 0.0
    return [
        make_trial(
            10 * size + seed,
            batch_size=size,
            seconds=one * seconds,
            steps=one,
            phase=Phase.CONFIRM,
            seed=seed,
            **changes,
        )
        for seed, one in enumerate([round(steps(size) * factor) for factor in (0.99, 1.0, 1.01)])
    ]


def bound_answer(
    probes: list[ProbeRecord], *, compile_mode: str = "none", objective: str = "time_to_target", **outcome: Any
) -> Answer:
    spec = make_spec(objective=objective)
    trials = [run for one in probes for run in bound_runs(one, **outcome)]
    return build_answer(study(spec, compile_mode), spec, trials, {one.batch_size: one for one in probes})


def study(spec: StudySpec, compile_mode: str = "none") -> StudyRecord:
    environment = make_environment(device_type="cuda", device_name="Test GPU", compile_mode=compile_mode)
    return StudyRecord.created(spec.new_study("tester"), EPOCH, environment)


def said(found: Answer) -> str:
    return next((notice.message for notice in found.warnings if notice.code == "host_bound"), "")


def test_the_optimum_without_the_host_s_time_follows_from_the_batch_sizes_that_the_device_bounds() -> None:
    found = bound_answer([probe(size) for size in SIZES])
    assert found.optimal.batch_size == 64, "√(B_crit·α/β) with the host's 3 ms for α is 110 at most"
    own = {size: steps(size) * (ALPHA + BETA * size) for size in SIZES}
    assert min(own, key=own.__getitem__) == 32, "with the device's own time it is √(200·10) = 45"
    told = said(found)
    assert "at batch 64: the host-bound share is 81 %" in told
    assert "the law's optimum would be about batch 32 [" in told and NAMED in told


def test_where_the_optimum_stays_it_is_said() -> None:
    assert "the law's optimum would still be batch 32" in said(bound_answer([probe(size, host=1e-3) for size in SIZES]))


def test_no_more_is_taken_off_a_step_than_the_host_s_share_allows() -> None:
    """The line through the large batch sizes would have the smallest ones at next to nothing; their waits forbid it."""
    probes = [probe(size) if size > 64 else probe(size, host_bound_share=0.2) for size in SIZES]
    assert "the law's optimum would still be batch 64" in said(bound_answer(probes))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (SIZES[:8], "only batch 1024 has"),
        (SIZES[:7], "no batch size has"),
        (SIZES[3:4] + SIZES[8:9], "only batch 2048 has"),
    ],
)
def test_below_two_batch_sizes_that_the_device_bounds_it_says_that_it_cannot_tell(
    sizes: tuple[int, ...], words: str
) -> None:
    told = said(bound_answer([probe(size) for size in sizes]))
    assert "is unknown" in told and words in told and NAMED in told


def test_without_a_law_or_a_rising_line_it_says_that_it_cannot_tell() -> None:
    single = [make_trial(size, batch_size=size, steps=steps(size), seconds=1.0 + abs(size - 64)) for size in SIZES]
    spec, probes = make_spec(), [probe(size) for size in SIZES]
    told = said(build_answer(study(spec), spec, single, {one.batch_size: one for one in probes}))
    assert "the law needs three tuned batch sizes" in told
    falling = {1024: 0.09, 2048: 0.08, 4096: 0.07}
    probes = [replace(one, step_seconds=falling.get(one.batch_size, one.step_seconds)) for one in map(probe, SIZES)]
    assert fit_step_time(device_bound(probes), 2) is None
    assert "take no longer with a larger batch" in said(bound_answer(probes))


def test_an_optimum_that_the_device_bounds_is_not_warned_of_nor_one_of_which_nothing_is_known() -> None:
    assert said(bound_answer([probe(size, host=1e-4) for size in SIZES])) == ""
    unknown = bound_answer([probe(size, host_bound_share=None) for size in SIZES])
    assert said(unknown) == "" and {row.host_bound_share for row in unknown.batches} == {None}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_study_with_cuda_graphs_is_not_sent_to_them(mode: str) -> None:
    told = said(bound_answer([probe(size) for size in SIZES], compile_mode=mode))
    assert "about batch 32" in told and "compile:" not in told


def test_an_objective_without_seconds_has_no_other_optimum_to_tell() -> None:
    told = said(bound_answer([probe(size) for size in SIZES], objective="samples_to_target"))
    assert NAMED in told and "would" not in told.split(NAMED)[0] and "cannot" not in told


def test_a_batch_size_s_share_is_that_of_its_runs_or_of_its_steps_timed_alone() -> None:
    probes = [probe(size) for size in SIZES]
    rows = {row.batch_size: row.host_bound_share for row in bound_answer(probes).batches}
    assert rows[8] == 1.0 and rows[64] == pytest.approx(HOST / (ALPHA + BETA * 64))
    by_runs = bound_answer(probes, host_bound_share=0.05)
    assert {row.host_bound_share for row in by_runs.batches} == {0.05} and said(by_runs) == ""


def test_the_shares_of_the_study_s_trials_say_nothing_of_another_device() -> None:
    spec = make_spec()
    probes = {size: probe(size) for size in SIZES}
    trials = [run for one in probes.values() for run in bound_runs(one, host_bound_share=0.9)]
    elsewhere = {size: replace(one, host_bound_share=None) for size, one in probes.items()}
    moved = predict_for_device(study(spec), spec, trials, elsewhere, "another")
    assert {row.host_bound_share for row in moved.batches} == {None} and said(moved) == ""
