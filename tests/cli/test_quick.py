"""What ``bssearch quick`` prints for people."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.analysis.law.quick import QuickAnswer, QuickCriticalBatch, QuickOptimum, QuickRun
from bssearch.analysis.shape import Notice
from bssearch.cli.check import print_quick


def printed(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    optimal = QuickOptimum(batch_size=128, micro_batch_size=64, accumulation_steps=2, learning_rate=0.05)
    answer = QuickAnswer(
        study="study",
        metric="accuracy",
        target=0.97,
        default_batch_size=256,
        optimal=optimal,
        interval=[64, 200],
        flat_range=[90, 180],
        gain=1.6,
        learning_rate_gain=1.0,
        learning_rate_range=[0.01, 0.2],
        largest_micro_batch_size=64,
        b_crit=QuickCriticalBatch(estimate=120.0, low=60.0, high=240.0),
        noise_scale=None,
        alpha_s=None,
        beta_s=None,
        runs=[QuickRun(trial=1, batch_size=256, learning_rate=0.1, steps=None, train_seconds=3.0)],
        seconds=42.0,
        warnings=[Notice(code="one_batch_size", message="only one batch size came there")],
    )
    print_quick(answer.model_copy(update=changes))
    return " ".join(capsys.readouterr().out.split())


def test_the_first_word_says_that_it_is_unverified_and_all_that_it_rests_on_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys)
    assert out.startswith("Unverified: batch 128 (lr 0.05, 2 micro-batches of 64) is expected to reach accuracy 0.97")
    for part in (
        "1.6× faster than your 256",
        "between 64 and 200 (90 %)",
        "1 run in 42 s",
        "noise scale not measured",
        "retune it between 0.01 and 0.2",
        "note: only one batch size came there",
        "fine-tuning",
    ):
        assert part in out


def test_no_gain_is_no_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert "your 256 is expected to be as fast within 5%" in printed(capsys, gain=1.01)
    assert "it is your default's" in printed(capsys, default_batch_size=128)


def test_a_rate_that_was_faster_than_the_rules_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "took 3× as long there as 0.05" in printed(capsys, learning_rate_gain=3.0)
