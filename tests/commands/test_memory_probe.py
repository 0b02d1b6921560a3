"""The search for the largest micro-batch that fits, against an executor whose memory ends at a known size."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.analysis.law.affine_step_time import fit_memory
from bssearch.commands.probe.memory import BRACKET, FINE, MemoryProbe, next_size, probe_memory
from bssearch.errors import LaunchError
from bssearch.records import MemoryRequest, MemoryUse
from bssearch.storage.repository import Store
from tests.commands.probing import HERE, SPEC, open_study
from tests.search.law import LawExecutor


def probe(store: Store, executor: LawExecutor, **environment: Any) -> MemoryProbe:
    return probe_memory(open_study(store, executor, **environment))


def test_whatever_the_boundary_it_is_bracketed_by_sizes_that_were_run() -> None:
    for ceiling in (1, 7, 1000):
        for boundary in range(1, ceiling + 2):
            uses: list[MemoryUse] = []
            while (size := next_size(uses, smallest=8, ceiling=ceiling)) is not None:
                assert 1 <= size <= ceiling and size not in {use.micro_batch_size for use in uses}
                uses.append(MemoryUse(micro_batch_size=size, fits=size < boundary, peak_memory_bytes=None))
            fitting = max((use.micro_batch_size for use in uses if use.fits), default=0)
            failing = min((use.micro_batch_size for use in uses if not use.fits), default=ceiling + 1)
            assert fitting < boundary <= failing
            assert failing <= max(fitting + 1, BRACKET * fitting)
            assert len(uses) <= 20


def test_sizes_are_doubled_then_bisected_and_only_those_are_returned(store: Store) -> None:
    executor = LawExecutor(fits_up_to=300)
    found = probe(store, executor)
    assert executor.sizes_run == [8, 16, 32, 64, 128, 256, 512, 384, 320, 288, 304, 296]
    assert [use.micro_batch_size for use in found.uses] == executor.sizes_run
    assert (found.largest_that_fits, found.smallest_that_does_not) == (296, 304)
    assert not found.whole_training_part_fits
    assert found.fit is not None
    assert found.fit.fixed_bytes == pytest.approx(10**6)
    assert found.fit.bytes_per_sample == pytest.approx(1000)
    assert found.fit.largest_residual == pytest.approx(0, abs=1e-9)


def test_whatever_is_marginal_the_ends_are_beside_it_and_are_no_marginal_sizes() -> None:
    ceiling = 300
    for reserve_ends in range(2, ceiling + 2, 7):
        for memory_ends in range(reserve_ends, ceiling + 2, 5):
            uses: list[MemoryUse] = []
            marginal: list[int] = []
            while (size := next_size(uses, smallest=8, ceiling=ceiling, marginal=marginal)) is not None:
                assert 1 <= size <= ceiling and size not in {use.micro_batch_size for use in uses} | set(marginal)
                if reserve_ends <= size < memory_ends:
                    marginal.append(size)
                else:
                    fits = size < reserve_ends
                    uses.append(MemoryUse(micro_batch_size=size, fits=fits, peak_memory_bytes=None))
            fitting = max((use.micro_batch_size for use in uses if use.fits), default=0)
            failing = min((use.micro_batch_size for use in uses if not use.fits), default=ceiling + 1)
            assert fitting < reserve_ends and memory_ends <= failing
            assert failing <= max(fitting + 1, BRACKET * fitting) or (
                reserve_ends <= max(fitting + 1, FINE * fitting)
                and (failing > ceiling or failing <= max(memory_ends, FINE * (memory_ends - 1)))
            ), (reserve_ends, memory_ends, fitting, failing)
            assert len(uses) + len(marginal) <= 30


def test_a_size_that_leaves_no_reserve_neither_fits_nor_is_too_large(store: Store) -> None:
    found = probe(store, LawExecutor(fits_up_to=300, leaves_reserve_up_to=260))
    assert found.largest_that_fits <= 260 and found.smallest_that_does_not is not None
    assert found.smallest_that_does_not > 300
    assert {260 < use.micro_batch_size <= 300 for use in found.marginal} == {True}
    assert all("only without a reserve" in (use.reason or "") for use in found.marginal)
    stored = {use.micro_batch_size for use in store.memory(SPEC.name, HERE)}
    assert stored.isdisjoint(use.micro_batch_size for use in found.marginal)


def test_where_the_whole_training_part_fits_it_was_run_and_nothing_is_named_above(store: Store) -> None:
    executor = LawExecutor()
    found = probe(store, executor)
    assert executor.sizes_run[-1] == found.largest_that_fits == found.ceiling == 1000
    assert found.smallest_that_does_not is None
    assert found.whole_training_part_fits


def test_a_probe_that_broke_off_goes_on_where_it_stopped_and_a_limit_is_another_device(store: Store) -> None:
    class Breaks(LawExecutor):
        def measure_memory(self, request: MemoryRequest, *, reserve: bool = False) -> MemoryUse:
            if len(self.sizes_run) == 4:
                raise KeyboardInterrupt
            return super().measure_memory(request, reserve=reserve)

    with pytest.raises(KeyboardInterrupt):
        probe(store, Breaks(fits_up_to=300))
    executor = LawExecutor(fits_up_to=300)
    found = probe(store, executor)
    assert executor.sizes_run[0] == 128
    assert found.largest_that_fits == 296
    assert probe(store, LawExecutor(fits_up_to=300)).uses == tuple(sorted(found.uses, key=lambda u: u.micro_batch_size))
    limited = LawExecutor(fits_up_to=20)
    assert probe(store, limited, device_memory_bytes=2**20).largest_that_fits <= 20
    assert limited.sizes_run[0] == 8


def test_below_the_smallest_batch_size_it_goes_down(store: Store) -> None:
    executor = LawExecutor(fits_up_to=3)
    found = probe(store, executor)
    assert executor.sizes_run == [8, 4, 2, 3]
    assert (found.largest_that_fits, found.smallest_that_does_not, found.fit) == (3, 4, None)


def test_where_not_even_one_sample_fits_the_error_has_the_probes_numbers(store: Store) -> None:
    with pytest.raises(LaunchError, match=r"not even .* Test CPU \(8 GiB\); these ran out of it: 8, 4, 2, 1 \(no") as e:
        probe(store, LawExecutor(fits_up_to=0))
    assert e.value.exit_code == 6
    assert [use.fits for use in store.memory(SPEC.name, HERE)] == [False] * 4


def test_the_fit_is_of_sizes_that_fit_and_says_how_far_off_it_is() -> None:
    peaks = [(10, 1100), (20, 1200), (30, 1330)]
    uses = [MemoryUse(micro_batch_size=size, fits=True, peak_memory_bytes=peak) for size, peak in peaks]
    uses.append(MemoryUse(micro_batch_size=40, fits=False, peak_memory_bytes=9999))
    fit = fit_memory(uses)
    assert fit is not None
    assert fit.bytes_per_sample == pytest.approx(11.5)
    assert fit.fixed_bytes == pytest.approx(980)
    assert fit.largest_residual == pytest.approx(10 / 1200)
    assert fit_memory(uses[1:]) is None
