"""What a machine that is to be quiet, or busy, must not do while a benchmark measures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bssearch.training.contention import CpuUse
from tests.frozen import Results
from tests.quiet import NotMeasuredError, Quietness, Watch, condition, others_seconds

LOOK = 0.1
CALM = Quietness(others_cpus=0.1, delay_share=0.02, slow_share=0.1, load=3.0)


@pytest.mark.parametrize(
    ("seen", "is_quiet"),
    [
        (CALM, True),
        (replace(CALM, others_cpus=0.3), False),
        (replace(CALM, delay_share=0.2), False),
        (replace(CALM, slow_share=0.4), False),
    ],
)
def test_a_machine_is_quiet_where_nothing_that_is_seen_is_above_its_bar(seen: Quietness, is_quiet: bool) -> None:
    assert seen.is_quiet(1.0) is is_quiet
    assert seen.is_quiet(3.0)


def test_what_others_use_is_what_is_busy_and_neither_ours_nor_our_parents() -> None:
    before = CpuUse(wall=10.0, busy=100.0, ours=40.0, parent=5.0, cpus=2)
    after = CpuUse(wall=12.0, busy=104.0, ours=41.5, parent=5.5, cpus=2)
    assert others_seconds(before, after) == pytest.approx(2.0)


def test_a_machine_that_is_to_be_quiet_gets_no_process_and_is_refused_where_it_is_not() -> None:
    with condition("quiet", math.inf, LOOK) as busy:
        assert busy == []
    with pytest.raises(NotMeasuredError), condition("quiet", -1.0, LOOK):
        pytest.fail("the block must not run")


def watch_in(folder: Path, busy: list[psutil.Process] | None = None) -> Watch:
    return Watch(Results(folder / "results.json", {}), "quiet", busy or [], tolerance=1.0)


def test_a_measurement_beside_others_does_not_count(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    watch.check()
    watch.seen.update(seconds=100.0, others_cpu_seconds=19.0)
    watch.check()
    watch.seen.update(others_cpu_seconds=21.0)
    with pytest.raises(NotMeasuredError):
        watch.check()
