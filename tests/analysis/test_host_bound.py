"""The caveat of a host-bound optimum, on a study whose device and host are known: t = max(device, host)."""

from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer, predict_for_device
from bssearch.analysis.law.batch_model import fit_step_time
from bssearch.analysis.notices import device_bound
from bssearch.records import Phase, ProbeRecord, StudyRecord, TrialRecord
from bssearch.spec import StudySpec
from tests.factories import EPOCH, make_environment, make_probe, make_spec, make_trial

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


def confirmed(probed: ProbeRecord, **changes: Any) -> list[TrialRecord]:
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


def answer(
    probes: list[ProbeRecord], *, compile_mode: str = "none", objective: str = "time_to_target", **outcome: Any
) -> Answer:
    spec = make_spec(objective=objective)
    trials = [run for one in probes for run in confirmed(one, **outcome)]
    return build_answer(study(spec, compile_mode), spec, trials, {one.batch_size: one for one in probes})


def study(spec: StudySpec, compile_mode: str = "none") -> StudyRecord:
    environment = make_environment(device_type="cuda", device_name="Test GPU", compile_mode=compile_mode)
    return StudyRecord.created(spec.new_study("tester"), EPOCH, environment)


def said(found: Answer) -> str:
    return next((notice.message for notice in found.warnings if notice.code == "host_bound"), "")


def test_the_optimum_without_the_host_s_time_follows_from_the_batch_sizes_that_the_device_bounds() -> None:
    found = answer([probe(size) for size in SIZES])
    assert found.optimal.batch_size == 64, "√(B_crit·α/β) with the host's 3 ms for α is 110 at most"
    own = {size: steps(size) * (ALPHA + BETA * size) for size in SIZES}
    assert min(own, key=own.__getitem__) == 32, "with the device's own time it is √(200·10) = 45"
    told = said(found)
    assert "at batch 64: the host-bound share is 81%" in told
    assert "the law's optimum would be about batch 32 [" in told and NAMED in told


def test_where_the_optimum_stays_it_is_said() -> None:
    assert "the law's optimum would still be batch 32" in said(answer([probe(size, host=1e-3) for size in SIZES]))


def test_no_more_is_taken_off_a_step_than_the_host_s_share_allows() -> None:
    """The line through the large batch sizes would have the smallest ones at next to nothing; their waits forbid it."""
    probes = [probe(size) if size > 64 else probe(size, host_bound_share=0.2) for size in SIZES]
    assert "the law's optimum would still be batch 64" in said(answer(probes))


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
    told = said(answer([probe(size) for size in sizes]))
    assert "is unknown" in told and words in told and NAMED in told


def test_without_a_law_or_a_rising_line_it_says_that_it_cannot_tell() -> None:
    single = [make_trial(size, batch_size=size, steps=steps(size), seconds=1.0 + abs(size - 64)) for size in SIZES]
    spec, probes = make_spec(), [probe(size) for size in SIZES]
    told = said(build_answer(study(spec), spec, single, {one.batch_size: one for one in probes}))
    assert "the law does not fit, or too few batch sizes were tuned" in told
    falling = {1024: 0.09, 2048: 0.08, 4096: 0.07}
    probes = [replace(one, step_seconds=falling.get(one.batch_size, one.step_seconds)) for one in map(probe, SIZES)]
    assert fit_step_time(device_bound(probes), 2) is None
    assert "take no longer with a larger batch" in said(answer(probes))


def test_an_optimum_that_the_device_bounds_is_not_warned_of_nor_one_of_which_nothing_is_known() -> None:
    assert said(answer([probe(size, host=1e-4) for size in SIZES])) == ""
    unknown = answer([probe(size, host_bound_share=None) for size in SIZES])
    assert said(unknown) == "" and {row.host_bound_share for row in unknown.batches} == {None}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_study_with_cuda_graphs_is_not_sent_to_them(mode: str) -> None:
    told = said(answer([probe(size) for size in SIZES], compile_mode=mode))
    assert "about batch 32" in told and "compile:" not in told


def test_an_objective_without_seconds_has_no_other_optimum_to_tell() -> None:
    told = said(answer([probe(size) for size in SIZES], objective="samples_to_target"))
    assert NAMED in told and "would" not in told.split(NAMED)[0] and "cannot" not in told


def test_a_batch_size_s_share_is_that_of_its_runs_or_of_its_steps_timed_alone() -> None:
    probes = [probe(size) for size in SIZES]
    rows = {row.batch_size: row.host_bound_share for row in answer(probes).batches}
    assert rows[8] == 1.0 and rows[64] == pytest.approx(HOST / (ALPHA + BETA * 64))
    by_runs = answer(probes, host_bound_share=0.05)
    assert {row.host_bound_share for row in by_runs.batches} == {0.05} and said(by_runs) == ""


def test_the_shares_of_the_study_s_trials_say_nothing_of_another_device() -> None:
    spec = make_spec()
    probes = {size: probe(size) for size in SIZES}
    trials = [run for one in probes.values() for run in confirmed(one, host_bound_share=0.9)]
    elsewhere = {size: replace(one, host_bound_share=None) for size, one in probes.items()}
    moved = predict_for_device(study(spec), spec, trials, elsewhere, "another")
    assert {row.host_bound_share for row in moved.batches} == {None} and said(moved) == ""
