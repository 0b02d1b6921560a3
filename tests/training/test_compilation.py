"""Compilation through the whole of PyTorch's compiler but for its last stage, which takes seconds for each graph.

The slow tests have that stage too.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from bssearch.spec import TrainingSpec
from bssearch.training import computation as computations
from bssearch.training.computation import Computation, TracedDropout, share_storage
from bssearch.training.trainer import Trainer, warm_up
from tests.training.toys import Toy, configuration, on_cpu, toy_data

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


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
    assert computation.compile_mode == "none"
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
