"""What ``best`` prints for people beside the sentence and the batch sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.answer import Figure
from bssearch.cli.answer import print_answer
from bssearch.records import GradientNoise, MemoryBasis
from tests.analysis.test_report import answer, confirmed


def test_the_trade_offs_are_printed_with_memory_generalisation_and_noise_scale(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: dict[str, Any] = {"peak_memory_bytes": 3 * 2**20, "peak_memory_basis": MemoryBasis.RESIDENT}
    noises = [GradientNoise(passes=1, trace=trace, square=1.0) for trace in (90.0, 100.0, 110.0)]
    runs = [
        replace(run, outcome=replace(run.outcome, noise=noise))
        for run, noise in zip(confirmed(64, 1.0, 1.1, 0.9, **measured), noises, strict=True)
        if run.outcome is not None
    ]
    print_answer(answer([*confirmed(16, 2.0, 2.1, 1.9, **measured), *runs]))
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith(" 64") and "MiB" in line]
    assert "3 MiB" in row and "0.88 ± 0" in row and "100 [" in row
    assert "resident memory grew" in printed
    assert "pooled over 3 trials of batch 64" in printed


@pytest.mark.parametrize(("micro", "told"), [(64, "batch_size 64, "), (32, "batch_size 64 (2 × 32), ")])
def test_the_split_into_micro_batches_is_printed_where_there_is_one(
    micro: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(confirmed(64, 1.0, 1.1, 0.9))
    split = {"micro_batch_size": micro, "accumulation_steps": 64 // micro}
    print_answer(found.model_copy(update={"optimal": found.optimal.model_copy(update=split)}))
    assert f"Train with: {told}" in capsys.readouterr().out


def test_further_metrics_are_printed_where_the_workload_reports_some(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(confirmed(64, 1.0, 1.1, 0.9))
    print_answer(found)
    assert "also has" not in capsys.readouterr().out
    figures = {
        "forgetting": Figure(median=0.031, low=0.028, high=0.036, runs=3),
        "old_accuracy": Figure(median=0.9, low=None, high=None, runs=2),
    }
    print_answer(found.model_copy(update={"optimal": found.optimal.model_copy(update={"further_metrics": figures})}))
    told = "On the test part it also has forgetting 0.031 [0.028, 0.036] and old_accuracy 0.9."
    assert told in capsys.readouterr().out


def test_no_trade_offs_are_printed_where_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(confirmed(64, 1.0, 1.1, 0.9))
    rows = [row.model_copy(update={"generalisation": None}) for row in found.batches]
    print_answer(found.model_copy(update={"batches": rows}))
    assert "noise scale" not in capsys.readouterr().out


def test_the_host_bound_share_is_a_column_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [*confirmed(16, 2.0, 2.1, 1.9), *confirmed(64, 1.0, 1.1, 0.9, host_bound_share=0.256)]
    print_answer(answer(runs))
    printed = capsys.readouterr().out
    heading, *rows = [line for line in printed.splitlines() if "ms/step" in line or line.startswith((" 16 ", " 64 "))]
    assert heading.index("ms/step") < heading.index("host-bound") < heading.index(" lr ")
    assert ["26%" in row for row in rows[:2]] == [False, True]
    print_answer(answer(confirmed(64, 1.0, 1.1, 0.9)))
    assert "host-bound" not in capsys.readouterr().out
