import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from bssearch.errors import LaunchError, WorkloadError
from bssearch.spec import TrainingSpec
from bssearch.training import computation as computations
from bssearch.training.computation import (
    Computation,
    TracedDropout,
    allow_tf32,
    autocast,
    available_precisions,
    resolve_precision,
    share_storage,
)
from bssearch.training.trainer import Trainer, warm_up
from tests.training.toys import CPU, Toy, configuration, on_cpu, toy_data

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
    assert computation.warnings == [
        "ghost_batch_size = 2 has no effect: the model has no batch normalisation; omit the option"
    ]


def test_reduce_overhead_on_the_cpu_is_said_to_be_no_more_than_default() -> None:
    [said] = on_cpu(compile="reduce-overhead").warnings
    assert "acts like 'default' on cpu, which has no CUDA graphs; set compile: default" in said


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
    assert available_precisions(CUDA) == available
    assert resolve_precision("auto", CUDA) == by_itself
    for wanted in ("fp32", "tf32", "bf16", "fp16"):
        with nullcontext() if wanted in available else pytest.raises(LaunchError, match="not available on cuda"):
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


# Compilation ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(computations, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computations, "BACKEND", "inductor")


class BatchNormed(Toy):
    """The toy with a batch norm, whose buffers a warm-up could leave changed."""

    def build_model(self, *, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))

    def checkpointed_modules(self, model: Any) -> Sequence[nn.Module]:
        return [model[0]]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def trained(
    computation: Computation, *, warmed_up: bool, steps: int = 4, batch_size: int = 20, dropout: float = 0.3
) -> list[torch.Tensor]:
    """Return the weights, buffers, optimizer state and random state after some steps from seed 3."""
    workload, data = BatchNormed(), toy_data()
    trial = configuration(batch_size, dropout=dropout)
    if warmed_up:
        warm_up(workload, trial, data, computation, "accuracy", 3)
    trainer = Trainer(workload, trial, data.train, computation, 3)
    for _ in range(steps):
        trainer.step()
    momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    return [*(tensor.clone() for tensor in trainer.model.state_dict().values()), *momenta, torch.get_rng_state()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("compile_mode", ["none", "default"])
@pytest.mark.parametrize("steps", [0, 4])
def test_a_trial_is_the_same_with_and_without_a_warm_up(compile_mode: str, steps: int) -> None:
    cold = trained(on_cpu(compile=compile_mode), warmed_up=False, steps=steps)
    torch.compiler.reset()
    torch.manual_seed(77)
    assert_same(cold, trained(on_cpu(compile=compile_mode), warmed_up=True, steps=steps))
    assert bool(graphs()) == (compile_mode == "default")


@pytest.fixture
def computation() -> Computation:
    return on_cpu(compile="default")


def test_a_trial_is_the_same_after_other_trials_of_the_worker(computation: Computation) -> None:
    first = trained(computation, warmed_up=True)
    trained(computation, warmed_up=True, batch_size=25, dropout=0.6)
    assert_same(first, trained(computation, warmed_up=True))


def test_a_compiled_trial_takes_the_steps_of_an_uncompiled_one() -> None:
    eager = trained(on_cpu(), warmed_up=True, dropout=0.0)[:-1]
    compiled = trained(on_cpu(compile="default"), warmed_up=True, dropout=0.0)[:-1]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(eager, compiled, strict=True))


def test_trials_compile_once_per_batch_size_whatever_their_dropout(computation: Computation) -> None:
    seen = []
    for dropout in (0.1, 0.23, 0.5):
        for batch_size in (5, 20):
            trained(computation, warmed_up=True, steps=1, batch_size=batch_size, dropout=dropout)
            seen.append(graphs())
    assert seen == [1, 2] + [2] * 4


@pytest.mark.slow
def test_a_ladder_of_batch_sizes_longer_than_torchs_own_limit_is_compiled_to_its_end() -> None:
    computation, small = on_cpu(compile="default"), Toy(network=lambda _: nn.Sequential(nn.Flatten()))
    for batch_size in range(10, 20):
        with torch.no_grad():
            computation.build_model(small, 0.1)(toy_data().train.inputs[:batch_size])
    assert graphs() == 10


def test_evaluation_and_noise_run_uncompiled(computation: Computation) -> None:
    model = computation.build_model(Toy(), 0.1)
    for around in (computation.evaluating, computation.exact):
        with around():
            model(toy_data().train.inputs)
    assert graphs() == 0
    with computation.training():
        model(toy_data().train.inputs)
    assert graphs() == 1


def test_ghost_norms_and_checkpointed_modules_compile_too() -> None:
    settings: dict[str, Any] = {"ghost_batch_size": 5, "activation_checkpointing": True}
    eager = trained(on_cpu(**settings), warmed_up=False, dropout=0.0)[:-1]
    computation = on_cpu(**settings, compile="default")
    compiled = trained(computation, warmed_up=False, dropout=0.0)[:-1]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(eager, compiled, strict=True))
    trained(computation, warmed_up=False, dropout=0.0)
    assert graphs() == 1


def test_dropout_as_data_drops_and_scales_as_dropout_does() -> None:
    torch.manual_seed(0)
    model: Any = on_cpu(compile="default").build_model(Toy(), 0.3)
    dropout = model[2]
    assert isinstance(dropout, TracedDropout) and "2.keep" not in model.state_dict()
    inputs = torch.ones(100_000)
    output = dropout(inputs)
    assert output.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert (output == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert dropout(inputs.bfloat16()).dtype == torch.bfloat16
    assert dropout.eval()(inputs) is inputs


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_with_probability_0_or_1_is_not_replaced(p: float) -> None:
    model: Any = on_cpu(compile="default").build_model(Toy(), p)
    assert type(model[2]) is nn.Dropout


def broken_backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise OSError("no compiler here")


def test_after_the_compiler_failed_the_same_worker_trains_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computations, "BACKEND", broken_backend)
    computation = on_cpu(compile="default")
    assert_same(trained(computation, warmed_up=True), trained(on_cpu(), warmed_up=True))
    assert not computation.compiles
    [said] = computation.warnings
    assert said.startswith("compile = 'default' failed") and "broken_backend" in said


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of PyTorch's inductor raise, so that ``torch.compile`` fails at construction."""
    monkeypatch.setattr(computations, "BACKEND", "inductor")
    computations._compiled_class.cache_clear()
    for name in ["torch._inductor", "torch._inductor.compiler_bisector", *sys.modules]:
        if name.partition(".")[0] == "torch" and name.startswith("torch._inductor"):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_inductor")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_trial_whose_model_cannot_be_compiled_at_construction_trains_eagerly(mode: str) -> None:
    computation = on_cpu(compile=mode)
    eager = trained(on_cpu(), warmed_up=True)
    assert_same(trained(computation, warmed_up=True), eager)
    assert not computation.compiles
    assert any("torch._inductor" in warning for warning in computation.warnings)
    assert_same(trained(computation, warmed_up=True), eager)


def test_an_error_of_the_model_itself_does_not_end_the_compiling() -> None:
    computation = on_cpu(compile="default", ghost_batch_size=4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        trained(computation, warmed_up=True, batch_size=1)
    assert computation.compiles and computation.warnings == []
    trained(computation, warmed_up=True, batch_size=20)
    assert graphs() > 0


def test_shared_storage_has_the_new_models_values_at_the_old_addresses() -> None:
    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        layers[2].weight = layers[0].weight
        layers(torch.randn(5, 4))
        return layers

    places: dict[str, torch.Tensor] = {}
    first, second = model(1), model(2)
    share_storage(first, places)
    addresses = {name: tensor.data_ptr() for name, tensor in first.state_dict().items()}
    share_storage(second, places)
    assert {name: tensor.data_ptr() for name, tensor in second.state_dict().items()} == addresses
    assert all(torch.equal(second.state_dict()[name], value) for name, value in model(2).state_dict().items())
    assert second[2].weight is second[0].weight and second[0].weight.requires_grad


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_with_the_whole_compiler_trials_are_the_same_with_and_without_a_warm_up_and_compile_once(
    computation: Computation,
) -> None:
    cold = trained(computation, warmed_up=False)
    assert graphs() == 1
    trained(computation, warmed_up=True, dropout=0.5)
    assert_same(cold, trained(computation, warmed_up=True))
    assert graphs() == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_cuda_graphs_take_the_steps_of_the_plain_loop(accumulation_steps: int) -> None:
    cuda = torch.device("cuda:0")

    def weights(compile_mode: str) -> list[torch.Tensor]:
        computation = Computation(cuda, TrainingSpec.model_validate({"precision": "fp32", "compile": compile_mode}))
        workload = BatchNormed()
        data = toy_data()
        train = type(data.train)(data.train.inputs.to(cuda), data.train.targets.to(cuda))
        trial = configuration(20, micro_batch_size=20 // accumulation_steps, accumulation_steps=accumulation_steps)
        for seed in (1, 2, 3):
            trainer = Trainer(workload, trial, train, computation, seed)
            for _ in range(10):
                trainer.step()
        return list(trainer.model.state_dict().values())

    plain, graphed = weights("none"), weights("reduce-overhead")
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(plain, graphed, strict=True))
