from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.records.scaling import (
    LARGEST_DROPOUT,
    LearningRateRule,
    is_said_to_need_warmup,
    learning_rate_factor,
    sqrt_dropout,
    sqrt_weight_decay,
    timescale_weight_decay,
)

SIZES = st.integers(min_value=1, max_value=2**20)
RATES = st.floats(min_value=1e-6, max_value=10.0)


def test_rates_follow_the_papers_own_numbers() -> None:
    # Goyal et al. 2017: 0.1 at 256 is 3.2 at 8,192.
    assert 0.1 * learning_rate_factor(LearningRateRule.LINEAR, 8192, 256) == pytest.approx(3.2)
    assert learning_rate_factor(LearningRateRule.SQRT, 8192, 256) == pytest.approx(math.sqrt(32))
    assert learning_rate_factor(LearningRateRule.NONE, 8192, 256) == 1


def test_a_warmup_is_said_to_be_needed_from_eight_times_the_batch_on() -> None:
    assert not is_said_to_need_warmup(255, 32)
    assert is_said_to_need_warmup(256, 32)


@given(SIZES, SIZES, RATES, RATES, RATES)
def test_the_timescale_in_epochs_is_what_it_was(
    batch: int, reference: int, decay: float, old: float, new: float
) -> None:
    scaled = timescale_weight_decay(decay, batch / reference, old / new)
    assert batch / (new * scaled) == pytest.approx(reference / (old * decay))


@given(SIZES, SIZES, RATES)
def test_weight_decay_by_the_root_is_the_timescale_where_the_rate_grows_by_the_root(
    batch: int, reference: int, decay: float
) -> None:
    rate = 0.1 * learning_rate_factor(LearningRateRule.SQRT, batch, reference)
    assert sqrt_weight_decay(decay, batch / reference) == pytest.approx(
        timescale_weight_decay(decay, batch / reference, 0.1 / rate)
    )


def test_dropout_by_the_root_stays_below_one() -> None:
    assert sqrt_dropout(0.1, 128, 32) == pytest.approx(0.2)
    assert sqrt_dropout(0.1, 32, 128) == pytest.approx(0.05)
    assert sqrt_dropout(0.5, 4096, 32) == LARGEST_DROPOUT < 1
