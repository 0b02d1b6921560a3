"""Steps on a GPU: precisions, compilation, repetition, placement of the data."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bssearch.records import TrialRequest, TrialState
from bssearch.training.computation import Computation, available_precisions
from bssearch.workloads.digits import Digits
from tests.evidence.task import can_build_kernels
from tests.factories import changed, not_none
from tests.gpu.conftest import MakeComputation
from tests.gpu.runs import curve, digits_request, run, run_in, worker

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
    for steps in (20, 33):
        assert pause_after(made, request, steps) == curve(whole)
