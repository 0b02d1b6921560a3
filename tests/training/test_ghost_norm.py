from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.training.computation import convert_batch_norms
from tests.training.toys import Frozen

SHAPES = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 2), nn.BatchNorm3d: (3, 2, 2, 2)}


def norm_and_ghost(kind: Any, ghost_batch_size: int, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return a batch norm with weights and statistics of its own, and the ghost batch norm made of it."""
    generator = torch.Generator().manual_seed(4)
    norm: nn.Module = kind(3, dtype=torch.float64, **settings)
    for tensor in [*norm.parameters(), *norm.buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    ghost = copy.deepcopy(norm)
    assert convert_batch_norms(ghost, ghost_batch_size) == 1
    return norm, ghost


def samples(count: int, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    inputs = 2 + 3 * torch.randn(count, *shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return inputs.requires_grad_()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("count", [12, 14, 3])
def test_each_group_is_normalised_as_a_batch_of_its_own(kind: Any, count: int) -> None:
    norm, ghost = norm_and_ghost(kind, 4)
    inputs = samples(count, SHAPES[kind])
    expected = torch.cat([norm(group) for group in torch.split(inputs, 4)])
    output = ghost(inputs)
    assert torch.allclose(output, expected, rtol=0, atol=1e-12)
    assert output.std() > 0.1

    weights = torch.randn(output.shape, dtype=torch.float64)
    ours = torch.autograd.grad((output * weights).sum(), [inputs, *ghost.parameters()])
    theirs = torch.autograd.grad((expected * weights).sum(), [inputs, *norm.parameters()])
    assert all(torch.allclose(one, other, rtol=0, atol=1e-11) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("count", [12, 14])
def test_the_running_statistics_move_toward_the_mean_over_the_groups(momentum: float | None, count: int) -> None:
    _, ghost = norm_and_ghost(nn.BatchNorm1d, 4, momentum=momentum)
    assert isinstance(ghost, nn.BatchNorm1d)
    assert ghost.running_mean is not None and ghost.running_var is not None and ghost.num_batches_tracked is not None
    inputs, rate = samples(count), 0.1 if momentum else 1.0
    mean = torch.stack([group.mean(0) for group in torch.split(inputs, 4)]).mean(0)
    variance = torch.stack([group.var(0, unbiased=True) for group in torch.split(inputs, 4)]).mean(0)
    expected_mean = (1 - rate) * ghost.running_mean + rate * mean
    expected_variance = (1 - rate) * ghost.running_var + rate * variance
    ghost(inputs)
    assert torch.allclose(ghost.running_mean, expected_mean)
    assert torch.allclose(ghost.running_var, expected_variance)
    assert ghost.num_batches_tracked == 1


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}])
def test_norms_without_weights_or_statistics_are_grouped_too(settings: dict[str, bool]) -> None:
    norm, ghost = norm_and_ghost(nn.BatchNorm1d, 4, **settings)
    inputs = samples(12)
    assert torch.allclose(ghost(inputs), torch.cat([norm(group) for group in torch.split(inputs, 4)]))


def test_evaluation_is_that_of_the_batch_norm() -> None:
    norm, ghost = norm_and_ghost(nn.BatchNorm1d, 4)
    inputs = samples(12)
    assert torch.equal(ghost.eval()(inputs), norm.eval()(inputs))


@pytest.mark.parametrize("count", [5, 13])
def test_a_single_sample_that_is_left_over_joins_the_last_group(count: int) -> None:
    norm, ghost = norm_and_ghost(nn.BatchNorm1d, 4)
    inputs = samples(count)
    groups = [*torch.split(inputs[: count - 5], 4), inputs[count - 5 :]] if count > 5 else [inputs]
    assert torch.allclose(ghost(inputs), torch.cat([norm(group) for group in groups]))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [(samples(1), "Expected more than 1 value per channel"), (samples(12, (3, 2, 2)), "expected 2D or 3D input")],
)
def test_an_input_is_refused_as_by_the_batch_norm(inputs: torch.Tensor, said: str) -> None:
    _, ghost = norm_and_ghost(nn.BatchNorm1d, 4)
    with pytest.raises(ValueError, match=said):
        ghost(inputs)


def test_norms_are_converted_wherever_they_are_and_keep_what_they_are() -> None:
    model: Any = nn.Sequential(
        nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), Frozen(3)), nn.SyncBatchNorm(3), nn.LayerNorm(3)
    )
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert convert_batch_norms(model, 4) == 2
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(model[0], nn.BatchNorm1d)
    assert type(model[2]) is nn.SyncBatchNorm
    assert not model.train()[1][1].training


def test_norms_of_a_kind_become_one_class() -> None:
    first, second = nn.BatchNorm2d(3), nn.BatchNorm2d(5)
    convert_batch_norms(first, 4)
    convert_batch_norms(second, 8)
    assert type(first) is type(second) is not nn.BatchNorm2d
