from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.training.computation import checkpoint_activations
from tests.training.toys import Toy, on_cpu, toy_data


class Blocks(Toy):
    """Two wide blocks with dropout and batch norms that count what they see, which may be run twice."""

    def build_model(self, *, dropout: float) -> nn.Module:
        def block(width: int) -> nn.Module:
            norm = nn.BatchNorm1d(64)
            return nn.Sequential(nn.Linear(width, 64), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 16))

        return nn.Sequential(block(6), block(16), nn.Linear(16, 2))

    def checkpointed_modules(self, model: Any) -> Sequence[nn.Module]:
        return list(model[:2])


def gradients_and_saved_bytes(checkpointed: bool, mode: bool = True) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(1)
    workload, part = Blocks(), toy_data().train
    model = on_cpu(activation_checkpointing=checkpointed).build_model(workload, 0.3).train(mode)
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = workload.loss(model, part.inputs, part.targets, label_smoothing=0.0)
        saved_bytes = sum(saved.values())
    return list(torch.autograd.grad(loss, list(model.parameters()))), saved_bytes


def test_the_gradients_are_the_same_and_fewer_bytes_wait_for_them() -> None:
    plain, plain_bytes = gradients_and_saved_bytes(False)
    checkpointed, checkpointed_bytes = gradients_and_saved_bytes(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))
    assert checkpointed_bytes < 0.3 * plain_bytes


@pytest.mark.parametrize("ghost_batch_size", [None, 30])
def test_running_statistics_are_those_of_one_run(ghost_batch_size: int | None) -> None:
    def state_after_a_step(checkpointed: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        workload, part = Blocks(), toy_data().train
        computation = on_cpu(activation_checkpointing=checkpointed, ghost_batch_size=ghost_batch_size)
        model = computation.build_model(workload, 0.3)
        workload.loss(model, part.inputs, part.targets, label_smoothing=0.0).backward()  # type: ignore[no-untyped-call]
        gradients = {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {**model.state_dict(), **gradients}

    plain, checkpointed = state_after_a_step(False), state_after_a_step(True)
    assert int(checkpointed["0.1.num_batches_tracked"]) == 1
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_in_evaluation_mode_nothing_runs_twice() -> None:
    assert gradients_and_saved_bytes(True, mode=False)[1] == gradients_and_saved_bytes(False, mode=False)[1]


def test_a_workload_that_names_no_modules_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(WorkloadError, match=r"needs a workload that has checkpointed_modules\(model\); Toy lacks it"):
        on_cpu(activation_checkpointing=True).build_model(Toy(), 0.0)


def test_a_workload_that_returns_no_module_is_refused() -> None:
    workload: Any = Toy()
    workload.checkpointed_modules = lambda model: []
    with pytest.raises(WorkloadError, match="returned no module"):
        checkpoint_activations(workload, workload.build_model(dropout=0.0))
