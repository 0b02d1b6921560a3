"""A GPU's memory, counters and processes."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bssearch.errors import LaunchError
from bssearch.records import MemoryRequest, TrialState
from bssearch.training import nvml
from bssearch.training.clock import RUN_AHEAD, clock_for
from tests.benchmarks.repeatability import BUSY_GPU, busy_process
from tests.factories import changed
from tests.gpu.conftest import MakeComputation
from tests.gpu.runs import digits_request, run, run_in, worker
from tests.training.toys import configuration

pytestmark = pytest.mark.gpu

GIB = 2**30

# At least 2 × 16384 activations of 4 bytes for each sample: about 0.2 MiB.
WIDE = """
import torch
from torch import nn
from torch.nn import functional

from bssearch.records import MetricInfo
from bssearch.workloads.data import Data, Part


class Wide:
    metrics = {"accuracy": MetricInfo(low=0.0, high=1.0, chance=0.5)}

    def load(self, device):
        inputs = torch.randn(16384, 64, generator=torch.Generator().manual_seed(0)).to(device)
        targets = (inputs[:, 0] > 0).long()
        return Data(*(Part(inputs[rows], targets[rows]) for rows in (slice(None), slice(64), slice(64))))

    def build_model(self, *, dropout):
        return nn.Sequential(nn.Linear(64, 16384), nn.Tanh(), nn.Linear(16384, 2))

    def loss(self, model, inputs, targets, *, label_smoothing):
        return functional.cross_entropy(model(inputs), targets)

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).double().mean().item()}
"""


def test_a_memory_limit_lets_small_micro_batches_through_and_no_large_ones(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    with worker("wide.py:Wide", folder=tmp_path, precision="fp32", memory_limit_bytes=GIB) as executor:
        assert executor.describe().environment.device_memory_bytes == GIB
        small, large = (
            executor.measure_memory(MemoryRequest(configuration=configuration(size))) for size in (256, 16384)
        )
    assert small.fits and small.peak_memory_bytes is not None and 0 < small.peak_memory_bytes < GIB
    assert not large.fits and large.reason is not None
    with worker("wide.py:Wide", folder=tmp_path, precision="fp32") as executor:
        assert executor.measure_memory(MemoryRequest(configuration=configuration(16384))).fits


def test_a_trial_without_enough_memory_ends_as_oom_and_the_worker_survives(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    with worker("wide.py:Wide", folder=tmp_path, precision="fp32", memory_limit_bytes=GIB) as executor:
        trial = changed(digits_request(), train_seconds_limit=1.0)
        too_large, _ = run_in(executor, changed(trial, number=1, configuration=configuration(16384)))
        small, _ = run_in(executor, changed(trial, number=2, configuration=configuration(256)))
    assert too_large.state is TrialState.OOM
    assert small.state in {TrialState.REACHED, TrialState.EXHAUSTED}
    assert small.peak_memory_bytes is not None


def test_a_trial_reports_energy_power_and_clock(computation: MakeComputation, device: torch.device) -> None:
    if nvml.total_energy_joules(device) is None:
        pytest.skip("this device counts no energy, or nvidia-ml-py is missing")
    trial = digits_request(stop_at_target=False, train_seconds_limit=2.0, eval_every_steps=50)
    use = run(computation(), trial)[0].device_use
    assert use.energy_joules is not None and use.energy_joules > 0
    assert use.mean_power_watts is not None and 10 < use.mean_power_watts < 3000
    assert use.mean_clock_mhz is not None and 100 < use.mean_clock_mhz < 5000
    assert use.throttle_reasons is not None


@pytest.fixture
def busy(device: torch.device) -> Iterator[int]:
    """Keep the GPU busy with another process; yield the process's id."""
    with busy_process(BUSY_GPU) as pid:
        listed = nvml.listed_processes(device) or set()
        if pid not in listed:
            pytest.skip(f"NVML lists {sorted(listed)} instead of process {pid}")
        yield pid


def test_a_device_on_which_another_program_computes_is_refused(busy: int) -> None:
    with worker() as executor, pytest.raises(LaunchError, match=f"process {busy} ") as raised:
        executor.describe()
    assert raised.value.hint is not None and "--allow-busy" in raised.value.hint


def test_a_trial_beside_another_program_is_marked(busy: int) -> None:
    with worker(allow_busy=True) as executor:
        outcome, _ = run_in(executor, digits_request())
    assert outcome.contended
    assert any(f"process {busy} " in warning for warning in outcome.warnings)


def test_workers_of_one_driver_do_not_refuse_each_other() -> None:
    with worker() as first, worker() as second:
        assert first.describe().environment.device_type == "cuda"
        assert second.describe().environment.device_type == "cuda"


def work(device: torch.device, times: int) -> None:
    square = torch.randn(2048, 2048, device=device)
    for _ in range(times):
        square = square @ square / square.norm()


def test_a_segment_lasts_as_long_by_events_as_by_the_host(device: torch.device) -> None:
    clock = clock_for(device)
    with clock.ledger("warmup"):
        work(device, 10)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    with clock.ledger("train"):
        work(device, 500)
    assert clock.seconds("train") == pytest.approx(time.perf_counter() - started, rel=0.05)


def test_work_that_was_queued_before_a_segment_is_not_in_it(device: torch.device) -> None:
    clock = clock_for(device)
    with clock.ledger("evaluation"):
        work(device, 500)
    with clock.ledger("train"):
        work(device, 5)
    assert clock.seconds("train") < clock.seconds("evaluation") / 5


def test_the_host_does_not_run_further_ahead_than_stated(device: torch.device) -> None:
    clock = clock_for(device)
    done: list[torch.cuda.Event] = []
    furthest = 0
    with clock.ledger("train"):
        for _ in range(10 * RUN_AHEAD):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            done.append(event)
            clock.pace()
            furthest = max(furthest, sum(not event.query() for event in done))  # type: ignore[no-untyped-call]
    assert 1 < furthest <= RUN_AHEAD


def test_a_stop_takes_effect_at_the_next_step_of_the_host(computation: MakeComputation) -> None:
    on_progress = Mock()

    def stop() -> tuple[TrialState, str] | None:
        return (TrialState.PRUNED, "enough") if on_progress.call_count >= 40 else None

    endless = digits_request(stop_at_target=False, eval_every_steps=1000)
    outcome, _ = run(computation(), endless, stop=stop, on_progress=on_progress)
    assert outcome.state is TrialState.PRUNED
    assert outcome.steps <= 40


def test_the_ledgers_add_up_to_the_wall_time(computation: MakeComputation) -> None:
    outcome, _ = run(computation())
    ledgers = outcome.train_seconds + outcome.evaluation_seconds + outcome.warmup_seconds + outcome.other_seconds
    assert outcome.state is TrialState.REACHED
    assert ledgers == pytest.approx(outcome.wall_seconds, rel=0.01, abs=0.01)
