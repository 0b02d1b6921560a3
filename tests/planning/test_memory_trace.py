"""`plan memory --model`: a trace with fake tensors predicts the memory of a real step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import bssearch
from bssearch.errors import LaunchError, UsageError
from bssearch.planning.memory import MemoryPlan, MemoryPlanRequest
from bssearch.planning.memory.models import real_model
from bssearch.planning.memory.request import GIB
from bssearch.planning.memory.traced import Allocation, PeakByBatch, StepLifetimes
from tests.benchmarks import memory_plan

HERE = "tests.planning.test_memory_trace"


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.project = nn.Linear(64, 192)
        self.norm = nn.LayerNorm(64)
        self.dropout = dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        query, key, value = self.project(hidden).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        result: torch.Tensor = self.norm(hidden + mixed.transpose(1, 2).flatten(2))
        return result


def perceptron(width: int = 256, depth: int = 4) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(width, 10))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256), nn.LayerNorm(256))


def with_loss() -> tuple[nn.Module, Any]:
    return perceptron(), lambda model, size: model(torch.zeros(size, 256)).square().mean()


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.line(inputs[inputs[:, 0] > 0])
        return result


def not_a_module() -> int:
    return 3


def downloads() -> nn.Module:
    import urllib.request

    urllib.request.urlopen("http://weights.example/net.pt")
    return perceptron()


def from_the_hub() -> Any:
    return pytest.importorskip("transformers").AutoModel.from_pretrained("no-one/no-model")


def raises() -> nn.Module:
    raise ValueError("width must be even")


def leaves() -> nn.Module:
    raise SystemExit(3)


def plan(name: str, **asked: Any) -> MemoryPlan:
    shape = {"Attention": (128,), "convolutions": (3, 32, 32), "LooksAtValues": (8,), "with_loss": None}.get(
        name, (256,)
    )
    inputs = {"input_shape": shape, "vocabulary": 50 if name == "Attention" else None}
    return bssearch.plan_memory(model=f"{HERE}:{name}", **{**inputs, **asked})


def term(found: MemoryPlan, name: str, size: int | None = None) -> int:
    """Bytes of a term at a micro-batch size, by default the plan's."""
    lines = [one for one in found.terms if one.term == name]
    size = (found.micro_batch or 0) if size is None else size
    return sum(one.bytes + size * one.bytes_per_sample for one in lines)


@pytest.mark.parametrize(
    ("name", "size", "checkpointing"),
    [("perceptron", 512, False), ("perceptron", 512, True), ("convolutions", 64, False), ("Attention", 64, False)],
)
def test_the_predicted_peak_equals_a_real_steps_allocations(name: str, size: int, checkpointing: bool) -> None:
    """The benchmark `memory_plan.py` checks real models; this test checks sizes beyond the traced sizes."""
    found = plan(name, device="cpu", micro_batch=size, checkpointing=checkpointing)
    request = {"Attention": ((128,), 50), "convolutions": ((3, 32, 32), None)}.get(name, ((256,), None))
    case = memory_plan.Case(f"{HERE}:{name}", (size, size), shape=request[0], vocabulary=request[1])
    real = memory_plan.measured(case, size, checkpointing)
    assert found.peak_bytes == pytest.approx(real, rel=0.05)
    assert real > 2 * found.fixed_bytes or name == "perceptron"


@pytest.mark.parametrize("name", ["perceptron", "Attention"])
def test_the_terms_add_up_to_the_peak_with_the_gradients_of_earlier_micro_batches(name: str) -> None:
    found = plan(name, device="cpu", micro_batch=300)
    beside = sum(term(found, one.term, 300) for one in found.terms if one.when != "update")
    assert beside - found.gradients_bytes <= (found.peak_bytes or 0) <= beside * 1.001
    always = sum(one.bytes for one in found.terms if one.when == "always" and one.term != "workspaces")
    assert always == found.fixed_bytes


def test_weights_gradients_and_state_are_counted_and_not_a_function_of_the_batch() -> None:
    found = plan("perceptron", device="cpu", optimizer="adamw")
    parameters = 4 * (256 * 256 + 256) + 256 * 10 + 10
    assert found.parameters == parameters
    assert found.weights_bytes == found.gradients_bytes == 4 * parameters
    assert found.optimizer_bytes == pytest.approx(8 * parameters, rel=0.001)
    assert plan("perceptron", optimizer="sgd", device="cpu").optimizer_bytes == 0
    assert plan("perceptron", optimizer="momentum", device="cpu").optimizer_bytes == 4 * parameters
    unknown_to_torch = plan("perceptron", optimizer="adam8bit", device="cpu").optimizer_bytes
    assert unknown_to_torch == pytest.approx(2.03 * parameters, rel=0.01)


def test_a_gpu_updates_all_tensors_at_once_and_rounds_blocks() -> None:
    on_cpu, on_gpu = (
        plan("perceptron", device=device, micro_batch=1, model_settings={"depth": 12}) for device in ("cpu", "cuda")
    )
    assert term(on_gpu, "foreach_temporaries") > 3 * term(on_cpu, "foreach_temporaries") > 0
    assert term(on_gpu, "weights") % 512 == 0 < term(on_gpu, "weights") - term(on_cpu, "weights")


def test_autocast_copies_the_weights_and_pure_bf16_halves_all_terms() -> None:
    asked = {"device": "a100", "micro_batch": 64}
    full, mixed = plan("Attention", **asked), plan("Attention", precision="bf16", **asked)
    pure = plan("Attention", precision="bf16", mixed="pure", **asked)
    assert term(full, "autocast_copies") == 0 < term(mixed, "autocast_copies")
    assert mixed.fixed_bytes == full.fixed_bytes == pytest.approx(2 * pure.fixed_bytes, rel=0.05)
    assert term(mixed, "activations") < term(full, "activations")


def test_a_gpu_keeps_norms_in_fp32_under_autocast() -> None:
    on_cpu, on_gpu = (
        plan("normed", device=device, precision="bf16", micro_batch=1000).activation_bytes_per_sample or 0
        for device in ("cpu", "a100")
    )
    assert on_gpu - on_cpu > 0.9 * 256 * 2 * 2, "two more bytes of each number that goes into one"


@pytest.mark.parametrize(("device", "precision"), [("a100", "bf16"), ("a100", "fp32"), ("t4", "fp16")])
def test_attention_uses_the_devices_kernels(device: str, precision: str) -> None:
    """A CPU keeps the scores of attention with dropout; flash and memory-efficient attention do not."""
    asked: dict[str, Any] = {"model_settings": {"dropout": 0.1}, "input_shape": (1024,), "micro_batch": 8}
    scores = 4 * 1024**2 * 4
    on_cpu = plan("Attention", device="cpu", **asked).activation_bytes_per_sample or 0
    found = plan("Attention", device=device, precision=precision, **asked)
    assert (found.activation_bytes_per_sample or 0) < scores / 4 < scores < on_cpu


def test_logits_are_a_separate_term() -> None:
    found = plan("perceptron", device="cpu", micro_batch=1000)
    assert term(found, "logits") == 1000 * 10 * 4
    assert term(found, "activations") >= 1000 * 256 * 4 * 4 * 2


def test_a_stage_shards_its_terms() -> None:
    whole, second, third = (plan("perceptron", stage=stage, devices=4, device="cpu") for stage in (0, 2, 3))
    assert (second.weights_bytes, third.weights_bytes * 4) == (whole.weights_bytes, whole.weights_bytes)
    assert second.gradients_bytes * 4 == whole.gradients_bytes
    asked: dict[str, Any] = {"devices": 4, "device": "cpu", "precision": "bf16", "micro_batch": 300}
    autocast = [plan("perceptron", stage=stage, **asked) for stage in (2, 3)]
    assert term(autocast[0], "autocast_copies") == 4 * term(autocast[1], "autocast_copies") > 0
    assert second.optimizer_bytes * 4 == pytest.approx(whole.optimizer_bytes, rel=0.001)


def test_the_largest_micro_batch_is_the_last_whose_peak_fits() -> None:
    found = plan("perceptron", device="cpu", memory_gib=0.1)
    largest = found.largest_micro_batch or 0
    sums = [sum(term(found, one.term, size) for one in found.terms if one.when != "update") for size in (0, 1)]
    accumulating = [sums[0] + size * (sums[1] - sums[0]) for size in (largest, largest + 1)]
    assert accumulating[0] <= 0.1 * GIB < accumulating[1]
    assert (plan("perceptron", device="cpu", micro_batch=largest).peak_bytes or 0) <= 0.1 * GIB
    assert 0 < (found.safe_micro_batch or 0) < 0.85 * largest


def test_a_model_that_does_not_fit_is_refused_with_traceable_precisions() -> None:
    wide: dict[str, Any] = {"model_settings": {"width": 512}, "input_shape": (512,), "device": "cpu"}
    with pytest.raises(LaunchError, match="without activations") as caught:
        plan("perceptron", memory_gib=0.01, **wide)
    assert "--precision bf16 --mixed pure" in (caught.value.hint or "")
    assert plan("perceptron", memory_gib=0.01, precision="bf16", mixed="pure", **wide)


@pytest.mark.slow
def test_a_model_may_bring_its_loss_and_the_table_its_other_precisions() -> None:
    found = plan("with_loss", device="cuda", memory_gib=1.0, table=True)
    rows = {(one.precision, one.mixed, one.optimizer, one.checkpointing): one for one in found.table}
    assert {key[0] for key in rows} == {"fp32", "bf16"} and {key[3] for key in rows} == {False, True}
    plain, twice = (rows["fp32", None, "adamw", flag] for flag in (False, True))
    assert (plain.largest_micro_batch or 0) < (twice.largest_micro_batch or 0)
    assert plain.fixed_bytes == pytest.approx(found.fixed_bytes, rel=0.01), "the blocks of its state apart"


@pytest.mark.slow
def test_a_configuration_file_is_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    configuration = transformers.BertConfig(intermediate_size=64, **settings)
    configuration.architectures = ["BertForMaskedLM"]
    configuration.save_pretrained(tmp_path)
    asked: dict[str, Any] = {"sequence": 16, "device": "cpu", "micro_batch": 3}
    from_file = bssearch.plan_memory(model=f"transformers:{tmp_path}", **asked)
    settings["intermediate_size"] = 64
    named = bssearch.plan_memory(model="transformers:BertForMaskedLM", model_settings=settings, **asked)
    assert from_file.peak_bytes == named.peak_bytes
    assert term(from_file, "logits") >= 3 * 16 * 99 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("downloads", {}, "needs the network (weights.example)"),
        ("from_the_hub", {}, "needs the network"),
        ("LooksAtValues", {}, "reads tensor values"),
        ("not_a_module", {}, "returned int; return a torch.nn.Module"),
        ("raises", {}, "failed to build: ValueError: width must be even"),
        ("leaves", {}, "failed to build: SystemExit: 3"),
        ("perceptron", {"input_shape": None}, "needs --input"),
        ("perceptron", {"input_shape": (7,)}, "failed to train: "),
        ("perceptron", {"input_shape": (0,)}, "input_shape"),
        ("perceptron", {"precision": "bf16", "mixed": "master"}, "mixed"),
        ("convolutions", {"checkpointing": True}, "has no blocks to recompute"),
        ("nothing", {}, "has no 'nothing'"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_with_the_reason(
    name: str, asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # a hub that was imported before tries five times
    with pytest.raises(UsageError) as caught:
        plan(name, **asked)
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["net.py", "resnet50", "net.py:"])
def test_a_model_without_a_name_is_refused_with_the_forms_of_names(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"must be FILE\.py:NAME, package\.module:NAME, transformers:CLASS or timm:NAME"
    ):
        bssearch.plan_memory(model=name)


@pytest.mark.parametrize("name", ["transformers:google-bert/bert-base-uncased", "transformers:NoSuchClass"])
def test_a_hubs_name_is_no_model(name: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="transformers has no class") as caught:
        bssearch.plan_memory(model=name)
    assert "plans do not download" in (caught.value.hint or "")


def test_tied_weights_count_once() -> None:
    made = real_model(MemoryPlanRequest(model=f"{HERE}:Attention", input_shape=(8,), vocabulary=50))
    assert sum(one.numel() for one in made.module.parameters()) == plan("Attention", device="cpu").parameters


def test_the_peak_is_the_highest_line_of_all_events() -> None:
    def lifetimes(size: int) -> StepLifetimes:
        forward = Allocation(1, 10 * size, "forward", size, 1, end=3)
        update = Allocation(4, 100, "optimizer", 1, 1, end=5)
        return StepLifetimes(size, 0, [Allocation(0, 7, "build", 1, 1, term="weights"), forward, update])

    curve = PeakByBatch(lifetimes(2), lifetimes(4))
    assert [curve.peak_bytes(size) for size in (1, 9, 11, 100)] == [107, 107, 117, 1007]
    assert [curve.largest(limit) for limit in (106, 107, 117, 1010)] == [0, 10, 11, 100]
    assert curve.terms(100)["forward"] == (0, 10) and "optimizer" not in curve.terms(100)
