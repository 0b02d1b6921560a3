"""Trials on a GPU: precisions, compilation, repetition, placement of the data, and what the device tells."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bssearch import LaunchError, Workload
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.slots import LocalExecutor
from bssearch.records import MemoryRequest, Observation, TrialOutcome, TrialRequest, TrialState
from bssearch.spec import TrainingSpec
from bssearch.training import nvml
from bssearch.training.batches import place
from bssearch.training.clock import RUN_AHEAD, clock_for
from bssearch.training.computation import Computation, available_precisions
from bssearch.training.loop import TrialLoop
from bssearch.workloads.digits import Digits
from tests.evidence.task import can_build_kernels
from tests.executors.line_workload import run_to_the_end
from tests.factories import changed, not_none
from tests.training.toys import configuration, request, run_trial

# As in a worker's environment; cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MakeComputation = Callable[..., Computation]


@pytest.fixture(scope="session", autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture
def computation(device: torch.device) -> Iterator[MakeComputation]:
    """Make computations on the device; afterwards the process's switches are as on the CPU."""

    def make(**settings: Any) -> Computation:
        return Computation(device, TrainingSpec(**{"measure_noise": False, **settings}))

    yield make
    Computation(torch.device("cpu"))


# A busy process says when it has begun, and ends with its standard input: it never outlives who started it.
BUSY_GPU = """
import os, sys, threading, torch
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
square = torch.randn(4096, 4096, device="cuda")
torch.cuda.synchronize()
print(flush=True)
while True:
    [square @ square for _ in range(20)]
    torch.cuda.synchronize()
"""


def digits_request(**changes: Any) -> TrialRequest:
    """Return a request that takes a few hundred steps to 97 %."""
    settings = configuration(changes.pop("batch_size", 64), learning_rate=0.05, warmup_epochs=0.5, dropout=0.1)
    return changed(request(settings, target=0.97, train_seconds_limit=60.0, eval_every_steps=10), **changes)


def run(
    computation: Computation,
    trial: TrialRequest | None = None,
    workload: Workload | None = None,
    *,
    stop: Callable[[], tuple[TrialState, str] | None] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[TrialOutcome, list[Observation]]:
    """Run a trial in this process, of the digits unless another workload is given."""
    workload = workload or Digits()
    data, _ = place(workload.load(torch.device("cpu")), computation)
    seen: list[Observation] = []
    whole = TrialLoop(
        trial or digits_request(),
        workload,
        data,
        computation,
        clock=clock_for(computation.device),
        stop=stop,
        on_progress=on_progress,
    )
    return run_trial(whole, seen.append), seen


def curve(seen: list[Observation]) -> list[tuple[int, float, float | None]]:
    """Return the observations of a trial without their seconds."""
    return [(one.step, one.metric, one.loss) for one in seen]


@contextmanager
def worker(workload: str = "digits", *, folder: Path | None = None, **options: Any) -> Iterator[LocalExecutor]:
    """Yield an executor on the GPU; options that the executor lacks are settings of the training."""
    own = {name: options.pop(name) for name in ("memory_limit_bytes", "allow_busy") if name in options}
    training = TrainingSpec(**{"measure_noise": False, **options})
    settings = ExecutorSettings(workload=workload, folder=folder or Path.cwd(), device="cuda", training=training, **own)
    with closing(LocalExecutor(settings)) as executor:
        yield executor


def run_in(executor: LocalExecutor, trial: TrialRequest) -> tuple[TrialOutcome, list[tuple[int, float, float | None]]]:
    """Run a trial in an executor's worker; return its outcome and its curve."""
    outcome, observations = run_to_the_end(executor, trial)
    return outcome, curve(observations)


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_of_the_device_reaches_the_target(
    computation: MakeComputation, device: torch.device, precision: str
) -> None:
    if precision not in available_precisions(device):
        pytest.skip(f"the device has no {precision}")
    outcome, _ = run(computation(precision=precision))
    assert outcome.state is TrialState.REACHED
    assert (outcome.skipped_steps is None) == (precision != "fp16")


def test_auto_is_bf16_if_the_device_has_it(computation: MakeComputation, device: torch.device) -> None:
    expected = "bf16" if "bf16" in available_precisions(device) else "fp32"
    assert computation(precision="auto").precision == expected


class SteepDigits(Digits):
    """Digits with 2¹⁰ times the loss, so that the first scaled gradients overflow fp16."""

    def loss(
        self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        return super().loss(model, inputs, targets, label_smoothing=label_smoothing) * 1024


def test_steps_whose_gradients_overflow_fp16_are_skipped_and_counted(computation: MakeComputation) -> None:
    plain = digits_request()
    gentle = changed(plain, configuration=replace(plain.plan.configuration, learning_rate=0.05 / 1024))
    outcome, _ = run(computation(precision="fp16"), gentle, SteepDigits())
    assert outcome.skipped_steps is not None and 0 < outcome.skipped_steps < outcome.steps
    assert outcome.state is TrialState.REACHED


needs_compiler = pytest.mark.skipif(not can_build_kernels(), reason="the C compiler or Python's header is missing")


def test_channels_last_and_fused_optimizers_reach_the_target(computation: MakeComputation) -> None:
    outcome, _ = run(computation(channels_last=True, fused=True))
    assert outcome.state is TrialState.REACHED


def test_a_deterministic_request_gives_the_same_curve_every_time() -> None:
    with worker(deterministic=True) as executor:
        runs = [run_in(executor, replace(digits_request(), number=number)) for number in range(3)]
    with worker(deterministic=True) as executor:
        runs.append(run_in(executor, digits_request()))
    assert len({outcome.steps_to_target for outcome, _ in runs}) == 1
    assert all(curve == runs[0][1] for _, curve in runs)
    assert runs[0][0].state is TrialState.REACHED


def test_data_on_the_host_and_on_the_device_make_the_same_trial() -> None:
    found = {}
    for placement in ("device", "host"):
        with worker(deterministic=True, data=placement) as executor:
            found[placement] = run_in(executor, digits_request())
    assert {name: outcome.data_placement for name, (outcome, _) in found.items()} == {
        "device": "device",
        "host": "host",
    }
    assert found["device"][1] == found["host"][1]


def test_measuring_the_noise_does_not_change_the_steps(computation: MakeComputation) -> None:
    trial = digits_request(stop_at_target=False, train_seconds_limit=2.0, eval_every_steps=20)
    curves = {}
    for measure_noise in (False, True):
        outcome, seen = run(computation(deterministic=True, measure_noise=measure_noise), trial)
        curves[measure_noise] = curve(seen)
        assert measure_noise or outcome.noise.passes is None
    shared = min(map(len, curves.values()))
    assert shared > 2
    assert curves[True][:shared] == curves[False][:shared]


class NoisyDigits(Digits):
    """Digits with an augmentation that draws from the device's generator."""

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.05 * torch.randn_like(inputs)


def pause_after(computation: Computation, request: TrialRequest, steps: int) -> list[tuple[int, float, float | None]]:
    """Pause a trial after ``steps`` and resume it; return the curves of both parts as one."""
    on_progress = Mock()

    def stop() -> tuple[TrialState, str] | None:
        return (TrialState.PAUSED, "later") if on_progress.call_count > steps else None

    paused, first = run(computation, request, NoisyDigits(), stop=stop, on_progress=on_progress)
    assert paused.state is TrialState.PAUSED and paused.steps > 0
    outcome, second = run(computation, changed(request, resumes=True), NoisyDigits())
    assert outcome.train_seconds > paused.train_seconds > 0
    assert outcome.steps > paused.steps
    return curve([*first, *second])


@pytest.mark.parametrize("data", ["device", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_paused_trial_has_the_curve_of_an_unpaused_trial(
    computation: MakeComputation, device: torch.device, tmp_path: Path, precision: str, optimizer: str, data: str
) -> None:
    if precision not in available_precisions(device):
        pytest.skip(f"the device has no {precision}")
    plain = digits_request()
    configuration = replace(
        plain.plan.configuration,
        optimizer=optimizer,
        learning_rate=0.05 if optimizer == "sgd" else 0.003,
        parameters={"horizon_samples": 64 * 95, "schedule": "cosine", "ema_decay": 0.9, "clip_norm": 1.0},
    )
    target = replace(plain.target, value=1.0)
    request = changed(plain, configuration=configuration, target=target, checkpoint=str(tmp_path / "trial"))
    made = computation(precision=precision, deterministic=True, data=data, loader_workers=0)
    _, whole = run(made, replace(request, checkpoint=None), NoisyDigits())
    assert len(whole) > 5
    assert [pause_after(made, request, steps) for steps in (20, 33)] == [curve(whole)] * 2


# The device -----------------------------------------------------------------------------------------------------------


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
    command = [sys.executable, "-c", BUSY_GPU]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        not_none(process.stdout).readline()
        listed = nvml.listed_processes(device) or set()
        if process.pid not in listed:
            pytest.skip(f"NVML lists {sorted(listed)} instead of process {process.pid}")
        yield process.pid


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


# Compilation, last because it takes longest --------------------------------------------------------------------------


@needs_compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_compiled_model_takes_about_the_same_steps_and_is_compiled_once_per_shape(
    computation: MakeComputation, mode: str
) -> None:
    eager, _ = run(computation(precision="fp32"))
    compiling = computation(precision="fp32", compile=mode)
    first, _ = run(compiling)
    from torch._dynamo.utils import counters  # takes seconds to import, and most machines have no GPU

    graphs = counters["stats"]["unique_graphs"]
    other = digits_request()
    second, _ = run(
        compiling, changed(other, configuration=replace(other.plan.configuration, dropout=0.2, learning_rate=0.04))
    )
    assert counters["stats"]["unique_graphs"] == graphs > 0
    again, _ = run(compiling)
    assert compiling.compiles and not compiling.warnings
    assert [outcome.state for outcome in (eager, first, second, again)] == [TrialState.REACHED] * 4
    assert not_none(first.steps_to_target) <= 2 * not_none(eager.steps_to_target)


@needs_compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_accumulation_is_the_same_under_cuda_graphs_of_a_compiled_model(computation: MakeComputation) -> None:
    trial = digits_request()
    micro = replace(trial.plan.configuration, micro_batch_size=16, accumulation_steps=4, dropout=0.0)
    trial = changed(trial, configuration=micro, stop_at_target=False, train_seconds_limit=1.0)
    _, eager = run(computation(precision="fp32"), trial)
    _, graphs = run(computation(precision="fp32", compile="reduce-overhead"), trial)
    assert graphs[1].loss == pytest.approx(eager[1].loss, rel=1e-2)
