"""Revision 0008 on a database with rows: down to 0007 and up again, on every kind of database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bssearch.records import GradientNoise, MemoryBasis, NoiseMeasurement
from bssearch.storage import migrate
from bssearch.storage.repository import open_store
from tests.factories import make_environment
from tests.storage.conftest import OUTCOME, add_study, start
from tests.storage.test_migrate import go_down_and_up

pytestmark = pytest.mark.usefixtures("migrations")

SHORT = GradientNoise(passes=1, trace=-3.5, square=-0.25, adam_trace=2.0, adam_square=0.5, seconds=0.007)
"""Of a single pass: the moments may be below zero."""

BASES = (MemoryBasis.DEVICE, MemoryBasis.RESIDENT, MemoryBasis.RESIDENT_SAMPLED)


def test_a_gpus_peak_keeps_its_kind_and_a_resident_one_is_unknown_to_the_revision_before(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    probed = NoiseMeasurement(batch_size=8, micro_batch_size=8, step=4, metric=0.5, noise=SHORT)
    with open_store(empty_url) as store:
        add_study(store)
        for basis in BASES:
            number = start(store)
            ended = replace(OUTCOME, noise=SHORT, peak_memory_basis=basis)
            store.finish_trial("toy", number, ended, steps_x_step_time_s=None)
        store.save_noise("toy", make_environment(), probed)
        outcomes = [trial.outcome for trial in store.trials("toy")]
        assert [(one.peak_memory_basis, one.noise) for one in outcomes if one] == [(basis, SHORT) for basis in BASES]
        assert store.noise("toy") == [probed]
    go_down_and_up(empty_url, "0007")
    with open_store(empty_url) as store:
        outcomes = [trial.outcome for trial in store.trials("toy")]
        assert [(one.peak_memory_bytes, one.peak_memory_basis) for one in outcomes if one] == [
            (OUTCOME.peak_memory_bytes, MemoryBasis.DEVICE),
            (None, None),
            (None, None),
        ]
        assert [one.noise for one in outcomes if one] == [GradientNoise(passes=1)] * 3
