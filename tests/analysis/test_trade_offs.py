"""What batch sizes trade against each other, and that it never contradicts the recommendation."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.generalisation import over_seeds
from bssearch.analysis.trade_offs import about_columns, trade_off_rows
from bssearch.records import DeviceUse, MemoryBasis, Phase, TrialRecord
from tests.analysis.test_report import answer, confirmed, study
from tests.factories import make_probe, make_spec, make_trial, not_none


def trade_offs(found: Answer) -> list[str]:
    return [notice.message for notice in found.warnings if notice.code == "trade_off"]


def on_front(found: Answer) -> list[int]:
    return [point.batch_size for point in found.front if point.on_front]


def powered(batch_size: int, seconds: float, watts: float, steps: int) -> list[TrialRecord]:
    return confirmed(
        batch_size, seconds, 1.01 * seconds, 0.99 * seconds, steps=steps, device_use=DeviceUse(mean_power_watts=watts)
    )


def test_another_batch_size_with_fewer_samples_or_less_energy_is_told_in_one_sentence() -> None:
    found = answer([*powered(16, 2.0, 100.0, 120), *powered(32, 1.5, 60.0, 100), *powered(64, 1.0, 200.0, 90)])
    assert found.optimal.batch_size == 64
    (message,) = trade_offs(found)
    assert "batch 16 takes the fewest samples, 1,920 against 5,760, at 2 times the time" in message
    assert "batch 32 takes the least energy, 90 against 200 J, at 1.5 times the time" in message


def test_a_batch_size_that_is_best_in_all_is_told_of_nothing_and_so_is_one_within_5_percent() -> None:
    best_in_all = [*powered(16, 1.0, 100.0, 100), *powered(64, 2.0, 100.0, 100)]
    assert trade_offs(answer(best_in_all)) == []
    assert on_front(answer(best_in_all)) == [16]
    near = [*confirmed(32, 2.0, 2.1, 1.9, steps=100), *confirmed(64, 1.0, 1.05, 0.95, steps=52)]
    assert trade_offs(answer(near)) == []


def test_under_another_objective_the_sentence_is_on_time_and_says_what_that_takes_more_of() -> None:
    spec = make_spec(objective="samples_to_target")
    trials = [*confirmed(16, 2.0, 2.1, 1.9, steps=120), *confirmed(64, 1.0, 1.1, 0.9, steps=90)]
    found = build_answer(study(spec), spec, trials, {16: make_probe(16), 64: make_probe(64)})
    assert found.optimal.batch_size == 16
    (message,) = trade_offs(found)
    assert "batch 64 takes the least time, 1 against 2 s, at 3 times the samples" in message


def test_the_recommended_batch_size_is_on_the_front_although_a_single_search_trial_looks_better() -> None:
    lucky = make_trial(1, batch_size=16, seconds=0.5, steps=10)
    slow = make_trial(2, batch_size=128, seconds=9.0, steps=100)
    found = answer([lucky, slow, *confirmed(64, 1.0, 1.1, 0.9, steps=90), *confirmed(32, 2.0, 2.1, 1.9, steps=100)])
    assert found.optimal.batch_size == 64
    assert on_front(found) == [32, 64]
    assert {point.batch_size for point in found.front} == {16, 32, 64, 128}
    assert "batch 16" not in trade_offs(found)[0], "nor is it held against it in words"


def test_a_batch_size_generalises_as_its_tested_runs_do_with_their_spread() -> None:
    def run(number: int, **outcome: Any) -> TrialRecord:
        return make_trial(number, phase=Phase.CONFIRM, seed=number, **outcome)

    tested = not_none(over_seeds([run(1, test_metric=0.8), run(2, test_metric=0.9), run(3, test_metric=0.85), run(4)]))
    assert (tested.part, tested.median, tested.runs) == ("test", 0.85, 3)
    assert tested.standard_deviation == pytest.approx(0.05)
    validated = not_none(over_seeds([run(1, best_metric=0.91)]))
    assert (validated.part, validated.median, validated.standard_deviation) == ("validation", 0.91, None)
    assert over_seeds([run(1, best_metric=None)]) is None


def test_the_answer_has_each_batch_sizes_generalisation_and_peak_memory_with_what_it_is_of() -> None:
    small = confirmed(16, 2.0, 2.1, 1.9, peak_memory_bytes=5 * 2**20, peak_memory_basis=MemoryBasis.RESIDENT)
    large = confirmed(64, 1.0, 1.1, 0.9, peak_memory_bytes=2**31, peak_memory_basis=MemoryBasis.RESIDENT)
    found = answer([*small, *large])
    rows = {row.batch_size: row for row in found.batches}
    assert (rows[16].peak_memory_bytes, rows[16].peak_memory_basis) == (5 * 2**20, MemoryBasis.RESIDENT)
    assert (found.optimal.peak_memory_bytes, found.optimal.peak_memory_basis) == (2**31, MemoryBasis.RESIDENT)
    assert rows[16].generalisation is not None
    assert (rows[16].generalisation.part, rows[16].generalisation.median) == ("test", 0.88)
    assert (rows[8].generalisation, rows[8].peak_memory_basis, rows[8].noise_scale) == (None, None, None)


def test_the_table_has_a_column_of_what_is_known_and_says_what_it_is() -> None:
    of_a_cpu: dict[str, Any] = {"peak_memory_bytes": 5 * 2**20, "peak_memory_basis": MemoryBasis.RESIDENT_SAMPLED}
    found = answer([*confirmed(16, 2.0, 2.1, 1.9, **of_a_cpu), *confirmed(64, 1.0, 1.1, 0.9)])
    headings, rows = trade_off_rows(found)
    assert headings == ["batch", "time", "samples", "peak memory", "test accuracy"]
    assert [row[0] for row in rows] == ["16", "64"]
    assert [row[3] for row in rows] == ["5 MiB", "–"]
    assert rows[0][4] == "0.88 ± 0"
    said = " ".join(about_columns(found))
    assert "sampled" in said and "Test metric" in said and "Validation" not in said and "Noise" not in said


def test_without_anything_beside_time_and_samples_there_is_no_table() -> None:
    assert trade_off_rows(answer([make_trial(1, batch_size=64, best_metric=None)])) == ([], [])
