"""A trial that is paused on a GPU goes on as if it had never stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bssearch.records import TrialRequest, TrialState
from bssearch.training.computation import Computation, available_precisions
from bssearch.workloads.digits import Digits
from tests.factories import changed
from tests.gpu.conftest import MakeComputation
from tests.gpu.runs import curve, digits_request, run

pytestmark = pytest.mark.gpu


class NoisyDigits(Digits):
    """Its augmentation draws from the device's own generator."""

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.05 * torch.randn_like(inputs)


def pause_after(computation: Computation, request: TrialRequest, steps: int) -> list[tuple[int, float, float | None]]:
    """Pause a trial after so many steps and let it go on; return the curves of both parts as one."""
    progress: list[None] = []

    def stop() -> tuple[TrialState, str] | None:
        return (TrialState.PAUSED, "later") if len(progress) > steps else None

    paused, first = run(computation, request, NoisyDigits(), stop=stop, on_progress=lambda: progress.append(None))
    assert paused.state is TrialState.PAUSED and paused.steps > 0
    outcome, second = run(computation, changed(request, resumes=True), NoisyDigits())
    assert outcome.train_seconds > paused.train_seconds > 0
    assert outcome.steps > paused.steps
    return curve([*first, *second])


@pytest.mark.parametrize("data", ["device", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_curve_is_that_of_a_trial_that_was_never_paused(
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
