from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import LaunchError, WorkloadError
from bssearch.training.computation import (
    Computation,
    allow_tf32,
    autocast,
    available_precisions,
    resolve_precision,
)
from tests.training.toys import CPU, Toy, on_cpu, toy_data

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    yield
    on_cpu()


class Images(Toy):
    """Convolutions and a batch norm over images (3, 8, 8)."""

    def build_model(self, *, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(288, 2)
        )


def images(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def built(computation: Computation, workload: Any = None, seed: int = 3, dropout: float = 0.0) -> Any:
    torch.manual_seed(seed)
    return computation.build_model(workload or Images(), dropout)


def test_the_plain_settings_are_fp32_and_uncompiled_on_the_cpu() -> None:
    computation = Computation(CPU)
    assert (computation.precision, computation.compiles, computation.fused) == ("fp32", False, False)
    assert computation.new_scaler() is None
    assert computation.warnings == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"channels_last": True},
        {"ghost_batch_size": 2},
        {"precision": "bf16"},
        {"compile": "default"},
        {"deterministic": True},
    ],
)
def test_a_fresh_model_is_the_workloads_of_that_seed(settings: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = Images().build_model(dropout=0.2)
    random_state = torch.get_rng_state()
    model = built(on_cpu(**settings), dropout=0.2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training and isinstance(model, nn.Sequential)
    assert list(model.state_dict()) == list(expected.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())


def test_training_and_evaluation_compute_in_bf16_and_noise_in_fp32() -> None:
    computation = on_cpu(precision="bf16")
    model = built(computation)
    with computation.training():
        assert model(images()).dtype == torch.bfloat16
    with computation.evaluating():
        assert model(images()).dtype == torch.bfloat16
    with computation.exact():
        assert model(images()).dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_noise_is_measured_without_tf32_and_training_continues_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bssearch.training.computation.resolve_precision", lambda wanted, device: wanted)
    computation = on_cpu(precision="tf32")
    allowed = [torch.backends.cuda.matmul.allow_tf32]
    with pytest.raises(KeyError), computation.exact():
        allowed.append(torch.backends.cuda.matmul.allow_tf32)
        raise KeyError
    allowed.append(torch.backends.cuda.matmul.allow_tf32)
    assert allowed == [True, False, True]


def test_deterministic_sets_the_process_and_its_absence_sets_it_back() -> None:
    on_cpu(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not fills, "each new tensor would be written twice"
    on_cpu()
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark


def test_channels_last_holds_for_images_and_filters_alone() -> None:
    computation = on_cpu(channels_last=True)
    inputs = computation.inputs(images())
    assert inputs.is_contiguous(memory_format=torch.channels_last) and torch.equal(inputs, images())
    for other in (torch.zeros(4, 5, 6), torch.zeros(2, 3, 4, 5, dtype=torch.int64), torch.zeros(2, 2, 2, 2, 2)):
        assert computation.inputs(other) is other
    model = built(computation)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not built(on_cpu())[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(model(inputs), built(on_cpu())(images()), atol=1e-6)
    plain = images()
    assert on_cpu().inputs(plain) is plain


def test_ghost_batch_norm_normalises_each_group_separately() -> None:
    computation = on_cpu(ghost_batch_size=2)
    grouped = built(computation)(images(6))
    plain = built(on_cpu())
    assert torch.allclose(grouped, torch.cat([plain(group) for group in torch.split(images(6), 2)]), atol=1e-6)
    assert computation.warnings == []


def test_ghost_batches_without_batch_norm_are_one_warning() -> None:
    computation = on_cpu(ghost_batch_size=2)
    built(computation, Toy())
    built(computation, Toy())
    assert computation.warnings == ["ghost_batch_size = 2 changes nothing: the model has no batch normalisation"]


def test_reduce_overhead_on_the_cpu_is_said_to_be_no_more_than_default() -> None:
    [said] = on_cpu(compile="reduce-overhead").warnings
    assert said == "compile = 'reduce-overhead' acts like 'default' on cpu, which has no CUDA graphs"


CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(("wanted", "resolved"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_cpu_has_fp32_and_bf16(wanted: str, resolved: str) -> None:
    assert resolve_precision(wanted, CPU) == resolved


@pytest.mark.parametrize("wanted", ["tf32", "fp16"])
def test_a_precision_that_the_cpu_lacks_is_refused(wanted: str) -> None:
    with pytest.raises(LaunchError, match=f"precision = '{wanted}' is not available on cpu; choose from fp32") as info:
        resolve_precision(wanted, CPU)
    assert info.value.exit_code == 6
    assert "compute capability 8.0" in str(info.value.hint)


@pytest.mark.parametrize(
    ("capability", "available", "by_itself"),
    [
        ((7, 5), ("fp32", "fp16"), "fp32"),
        ((8, 0), ("fp32", "tf32", "bf16", "fp16"), "bf16"),
        ((12, 0), ("fp32", "tf32", "bf16", "fp16"), "bf16"),
    ],
)
def test_a_gpu_has_tf32_and_bf16_since_ampere_and_takes_bf16_by_itself(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], available: tuple[str, ...], by_itself: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert available_precisions(CUDA) == available
    assert resolve_precision("auto", CUDA) == by_itself
    for wanted in ("fp32", "tf32", "bf16", "fp16"):
        with nullcontext() if wanted in available else pytest.raises(LaunchError, match="compute capability 7"):
            assert resolve_precision(wanted, CUDA) == wanted


def test_tf32_is_switched_for_products_and_convolutions_alike() -> None:
    def switches() -> tuple[bool, bool, str]:
        matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return matmul, cudnn, torch.get_float32_matmul_precision()

    allow_tf32(True)
    assert switches() == (True, True, "high")
    allow_tf32(False)
    assert switches() == (False, False, "highest")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_only_the_half_precisions_are_under_autocast(precision: str, dtype: torch.dtype) -> None:
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


class Blocks(Toy):
    """Two wide blocks with dropout and batch norms, which may be recomputed."""

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
def test_running_statistics_count_a_recomputed_step_once(ghost_batch_size: int | None) -> None:
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


def test_in_evaluation_mode_activations_are_not_recomputed() -> None:
    assert gradients_and_saved_bytes(True, mode=False)[1] == gradients_and_saved_bytes(False, mode=False)[1]


@pytest.mark.parametrize(
    ("toy", "said"),
    [
        (Toy(), r"needs a workload that has checkpointed_modules\(model\); Toy has no such method"),
        (Toy(checkpointed_modules=lambda model: []), "returned no module"),
    ],
)
def test_a_workload_without_modules_to_checkpoint_is_refused(toy: Toy, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        on_cpu(activation_checkpointing=True).build_model(toy, 0.0)
