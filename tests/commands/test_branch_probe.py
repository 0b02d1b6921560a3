"""`probe branch`: what it says of a run's checkpoints, what it stores, and what it refuses."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bssearch import LaunchError, Store, StudySpec, UsageError, open_store
from bssearch.analysis.law.branches import LocalCriticalBatch, plan_branches
from bssearch.commands.branch_probe import (
    BranchedCheckpoint,
    Branching,
    BranchPoint,
    branch_points,
    check_room,
    configuration_at,
    notices,
    rate_rule,
    samples_of,
    sentences,
)
from bssearch.commands.opening import OpenStudy
from bssearch.executors.base import Event
from bssearch.records import (
    LearningRateRule,
    Observation,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from tests.cli.task import INLINE, bssearch, printed, refused
from tests.commands.conftest import SPEC as TOY, ProbedExecutor, open_study
from tests.factories import make_spec, not_none

LINE = """
import torch

import bssearch


class Line:
    metrics = {"loss": bssearch.MetricInfo(low=0)}
    tokens_per_sample = 4

    def load(self, device):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 8, generator=generator)
        targets = inputs @ torch.ones(8, 1) + torch.randn(4096, 1, generator=generator)
        part = lambda a, b: bssearch.Part(inputs[a:b], targets[a:b])
        return bssearch.Data(train=part(0, 3072), validation=part(3072, 3584), test=part(3584, 4096))

    def build_model(self, *, dropout):
        return torch.nn.Linear(8, 1)

    def loss(self, model, inputs, targets, *, label_smoothing):
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def evaluate(self, model, part):
        return {"loss": self.loss(model, part.inputs, part.targets, label_smoothing=0).item()}
"""
"""A line of eight slopes under noise: far from it large batches lose, near it the noise decides."""

LINE_SPEC: dict[str, Any] = {
    "schema_version": 1,
    "name": "line",
    "workload": "line.py:Line",
    "target": {"metric": "loss", "value": 1.01, "goal": "minimize"},
    "space": {
        "batch_size": {"low": 4, "high": 256},
        "learning_rate": 0.01,
        "optimizer": {"name": "sgd", "momentum": 0.0, "nesterov": False},
    },
    "default": {"batch_size": 4, "learning_rate": 0.01},
    "budget": {"trials": 8, "trial_train_seconds": 1},
    "executor": INLINE,
}


def weights(error: float) -> dict[str, torch.Tensor]:
    """Return a line whose slopes are all off by so much."""
    return {"weight": torch.full((1, 8), 1.0 - error), "bias": torch.zeros(1)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(LINE)
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(LINE_SPEC))
    for name, error, step in (("early.pt", 1.0, 100), ("late.pt", 0.1, 4000)):
        torch.save({"model": weights(error), "step": step}, tmp_path / name)
    return tmp_path


def probe(folder: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(folder, "probe", "branch", "line.yaml", "--format", "json", *words))
    return found


@pytest.mark.slow
def test_a_run_has_a_batch_size_at_each_checkpoint_in_the_order_of_training(folder: Path) -> None:
    found = probe(folder, "--checkpoint", "late.pt", "--checkpoint", "early.pt", "--tokens", "4096", "--octaves", "5")
    early, late = found["checkpoints"]
    assert (early["step"], early["samples"], late["samples"]) == (100, 400, 16000)
    assert (found["batch_size"], found["branch_samples"], found["branch_tokens"]) == (4, 1024, 4096)
    assert found["rules"] == {"learning_rate": "linear", "betas": "none", "weight_decay": "none"}
    rates = {row["batch_size"]: row["learning_rate"] for row in late["branches"]}
    assert rates[4] == pytest.approx(0.01) and rates[8] == pytest.approx(0.02)
    for one in found["checkpoints"]:
        assert one["verdict"] in {"found", "at_least", "below", "cannot_tell"}
        assert one["interval"][0] == max([row["batch_size"] for row in one["branches"] if row["holds"]], default=None)
        assert one["interval"][1] == next((row["batch_size"] for row in one["branches"] if row["holds"] is False), None)
    assert [row["samples"] for row in found["schedule"]] == [
        one["samples"] for one in found["checkpoints"] if one["batch_size"] is not None
    ]


@pytest.mark.slow
def test_what_is_stored_is_not_trained_again_and_a_changed_checkpoint_is(folder: Path) -> None:
    words = "--checkpoint", "early.pt", "--tokens", "512", "--octaves", "1"
    first = probe(folder, *words)
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        stored = store.probes.branches("line")
    assert len(stored) == sum(len(row["ends"]) for row in first["checkpoints"][0]["branches"])
    (folder / "early.pt").rename(folder / "moved.pt")
    done = bssearch("probe", "branch", "line.yaml", "--checkpoint", "moved.pt", *words[2:], cwd=folder)
    assert "ends at" not in done.stderr and done.returncode == 0
    torch.save({"model": weights(0.9), "step": 100}, folder / "moved.pt")
    done = bssearch("probe", "branch", "line.yaml", "--checkpoint", "moved.pt", *words[2:], cwd=folder)
    assert "ends at" in done.stderr and done.returncode == 0


@pytest.mark.slow
def test_a_plain_state_dict_is_told_to_be_without_optimizer_state(folder: Path) -> None:
    torch.save(weights(1.0), folder / "plain.pt")
    found = probe(folder, "--checkpoint", "plain.pt", "--tokens", "512", "--octaves", "1", "--warmup-steps", "2")
    assert any("has no optimizer state" in one["message"] for one in found["warnings"])
    assert (found["checkpoints"][0]["step"], found["checkpoints"][0]["samples"]) == (None, None)


@pytest.mark.parametrize(("saved", "is_told"), [(0.01, False), (0.002, True), (0.05, True)])
def test_a_run_that_was_saved_at_another_learning_rate_is_told(folder: Path, saved: float, is_told: bool) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(8, 1).parameters(), lr=saved)
    torch.save({"model": weights(1.0), "optimizer": optimizer.state_dict(), "step": 1}, folder / "c.pt")
    spec = StudySpec.model_validate(LINE_SPEC)
    told = list(notices(spec, True, branch_points(spec, [folder / "c.pt"], None), 4))
    assert [f"has learning rate {saved:g}" in one for one in told] == [True] * is_told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "none.pt", "--tokens", "512"], "the file does not exist"),
        (["--checkpoint", "line.py", "--tokens", "512"], "cannot be read as tensors"),
        (
            ["--checkpoint", "early.pt", "--tokens", "28"],
            "--tokens 28 must be >= 32, one step of the batch size 2B = 8 at 4 tokens a sample",
        ),
        (["--checkpoint", "other.pt", "--tokens", "512"], "weight is of shape (1, 3); expected shape (1, 8)"),
        (["--checkpoint", "early.pt", "--tokens", "512", "--at", "1", "--at", "2"], "2 --at for"),
        (["--checkpoint", "early.pt", "--tokens", "512", "--at", str(2**63)], f"samples must be <= {2**63 - 1}"),
        (["--checkpoint", "plain.pt", "--checkpoint", "early.pt", "--tokens", "512"], "neither step nor samples"),
        (["--checkpoint", "early.pt", "--checkpoint", "early.pt", "--tokens", "512"], "both have 400 samples"),
    ],
)
def test_what_cannot_be_branched_is_refused_in_words(folder: Path, words: list[str], message: str) -> None:
    torch.save(weights(1.0), folder / "plain.pt")
    torch.save({"model": {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}}, folder / "other.pt")
    done = bssearch("probe", "branch", "line.yaml", *words, cwd=folder)
    assert done.returncode in {2, 3}
    assert message in " ".join(done.stderr.split())


def with_schedule(spec: StudySpec) -> StudySpec:
    fields = spec.model_dump(mode="json")
    fields["space"]["schedule"] = {"name": "linear", "horizon_samples": 1000}
    return StudySpec.model_validate(fields)


def test_a_branch_beyond_the_horizon_is_refused(tmp_path: Path) -> None:
    spec = with_schedule(TOY)
    torch.save({"model": {}, "samples": 900}, tmp_path / "c.pt")
    points = branch_points(spec, [tmp_path / "c.pt"], None)
    with pytest.raises(UsageError, match=r"900 samples \+ 200 of a branch must be <= schedule.horizon_samples = 1000"):
        check_room(spec, points, 200)
    check_room(spec, points, 100)
    torch.save({"model": {}}, tmp_path / "c.pt")
    with pytest.raises(UsageError, match="has neither step nor samples"):
        branch_points(spec, [tmp_path / "c.pt"], None)
    assert branch_points(spec, [tmp_path / "c.pt"], [300])[0].samples == 300


@pytest.mark.parametrize(
    ("optimizer", "written", "rule"),
    [("sgd", None, "linear"), ("sgd", "sqrt", "sqrt"), ("adamw", None, "sqrt"), ("adafactor", None, "sqrt")],
)
def test_the_learning_rate_follows_the_rule_that_is_written_or_else_the_optimizers(
    optimizer: str, written: str | None, rule: str
) -> None:
    space = {"batch_size": [8, 16], "learning_rate": {"reference_batch": 8, "low": 0.01, "high": 0.1}}
    rate = {**space["learning_rate"], **({} if written is None else {"rule": written})}  # type: ignore[dict-item]
    assert rate_rule(
        make_spec(
            space={**space, "learning_rate": rate, "optimizer": {"name": optimizer}},
            default={"batch_size": 8, "learning_rate": 0.02},
        )
    ) == (LearningRateRule(rule), optimizer != "adafactor")


def test_betas_and_weight_decay_follow_the_rules_of_the_space_from_the_default_on() -> None:
    found = configuration_at(
        make_spec(
            space={
                "batch_size": [8, 16, 64],
                "learning_rate": {"reference_batch": 16, "low": 0.01, "high": 0.1},
                "weight_decay": 0.1,
                "optimizer": {"name": "adamw", "beta2": 0.99},
                "batch_rules": {"betas": "half_life", "weight_decay": "timescale"},
            },
            default={
                "batch_size": 8,
                "learning_rate": 0.02,
                "weight_decay": 0.2,
                "optimizer": {"name": "adamw", "beta2": 0.95},
            },
        ),
        32,
        8,
        LearningRateRule.SQRT,
    )
    assert (found.batch_size, found.micro_batch_size, found.accumulation_steps) == (32, 8, 4)
    assert found.learning_rate == pytest.approx(0.04)
    assert found.parameters["beta2"] == pytest.approx(0.95**4)
    assert found.weight_decay == pytest.approx(0.2 * 4 / 2)  # λκ·η0/η


@dataclass
class BranchingExecutor(ProbedExecutor):
    """Ends the branches of a batch size as a test has it: at a loss, diverged, or out of memory."""

    ends: dict[int, float | TrialState] = field(default_factory=dict)
    at_once_up_to: float = float("inf")
    asked: list[TrialRequest] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        self.asked.append(request)

    def events(self, timeout: float) -> list[Event]:
        request = self.asked[-1]
        end = self.ends[request.plan.configuration.batch_size]
        if request.plan.configuration.micro_batch_size > self.at_once_up_to:
            end = TrialState.OOM
        if isinstance(end, TrialState):
            return [
                TrialObserved(1, observation(0, 0.5)),
                TrialEnded(1, TrialOutcome(state=end, reason="as the test has it")),
            ]
        last = observation(not_none(request.branch).samples, end + (0.001 * (request.plan.seed % 7 - 3)))
        return [TrialObserved(1, observation(0, 0.5)), TrialObserved(1, last), TrialEnded(1, exhausted(last.samples))]


def observation(samples: int, metric: float) -> Observation:
    return Observation(step=samples, samples=samples, train_seconds=1.0, metric=metric, loss=None, learning_rate=0.1)


def exhausted(samples: int) -> TrialOutcome:
    return TrialOutcome(state=TrialState.EXHAUSTED, reason="its samples", samples=samples)


@pytest.fixture
def point(tmp_path: Path) -> BranchPoint:
    return BranchPoint(path=tmp_path / "c.pt", digest="abc", samples=1000, step=None)


def branching(study: OpenStudy, octaves: int = 4) -> Branching:
    size = TOY.default.batch_size
    return Branching(study, LearningRateRule.SQRT, plan_branches(size, 512 * size, octaves), 3, rise_samples=0)


B = TOY.default.batch_size


def test_a_batch_size_that_does_not_fit_at_once_runs_in_micro_batches_of_the_defaults(
    store: Store, point: BranchPoint
) -> None:
    executor = BranchingExecutor(ends={B: 0.9, 2 * B: 0.9}, at_once_up_to=B)
    found = branching(open_study(store, executor), octaves=1).at(point)
    assert found.found.verdict == "at_least" and found.notice is None
    tried = [(one.plan.configuration.batch_size, one.plan.configuration.micro_batch_size) for one in executor.asked]
    assert tried == [(B, B)] * 3 + [(2 * B, 2 * B)] + [(2 * B, B)] * 3


def test_a_batch_size_that_runs_out_of_memory_ends_the_range_with_a_notice(store: Store, point: BranchPoint) -> None:
    executor = BranchingExecutor(ends={B: 0.9, 2 * B: 0.9, 4 * B: TrialState.OOM})
    found = branching(open_study(store, executor)).at(point)
    assert (found.found.verdict, found.found.low, found.found.high) == ("at_least", 2 * B, None)
    assert found.notice is not None and f"batch size {4 * B} ran out of memory" in found.notice
    with pytest.raises(LaunchError, match=f"batch size {B} ran out of memory"):
        branching(open_study(store, BranchingExecutor(ends={B: TrialState.OOM}))).at(replace(point, digest="d"))


def test_a_batch_size_that_diverges_does_not_hold_and_larger_ones_are_not_tried(
    store: Store, point: BranchPoint
) -> None:
    executor = BranchingExecutor(ends={B: 0.9, 2 * B: TrialState.DIVERGED})
    found = branching(open_study(store, executor)).at(point)
    assert (found.found.verdict, found.found.low, found.found.high) == ("below", None, 2 * B)
    assert [one.plan.configuration.batch_size for one in executor.asked] == [B, B, B, 2 * B]
    assert len({one.plan.seed for one in executor.asked[:3]}) == 3


def test_a_branch_that_ends_before_its_samples_is_an_error(store: Store, point: BranchPoint) -> None:
    executor = BranchingExecutor(ends={B: TrialState.FAILED})
    with pytest.raises(UsageError, match=f"the branch at batch size {B} from .* ended: as the test has it"):
        branching(open_study(store, executor)).at(point)
    executor = BranchingExecutor(ends={B: TrialState.EXHAUSTED})
    with pytest.raises(UsageError, match="ended after 0 of"):
        branching(open_study(store, executor)).at(point)


SCRIPT = """
import sys

import torch

import bssearch

trial = bssearch.current_trial(batch_size=4, learning_rate=0.01)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(1024, 8, generator=generator)
targets = inputs @ torch.ones(8, 1) + torch.randn(1024, 1, generator=generator)
model = torch.nn.Linear(8, 1)
if trial.checkpoint is not None:
    model.load_state_dict(torch.load(trial.checkpoint, weights_only=True)["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
data = torch.utils.data.TensorDataset(inputs[:768], targets[:768])
loader = torch.utils.data.DataLoader(data, batch_size=trial.micro_batch_size, sampler=trial.sampler(data))


def evaluate():
    with torch.no_grad():
        return {"loss": torch.nn.functional.mse_loss(model(inputs[768:]), targets[768:]).item()}


for x, y in trial.batches(loader, evaluate=evaluate):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("samples", "sizes", "said"),
    [
        ((400, 1600), (4, 4), "is the same at all"),
        ((400, 1600), (8, 4), "falls between"),
        ((400, 1600), (4, 8), "grows from"),
        ((400, 1600), (8, 16), "`bssearch trial add toy batch_size=4 batch_stages='400:8 1600:16'`"),
        ((400, 1600), (4, 16), "`bssearch trial add toy batch_size=4 batch_stages='1600:16'`"),
        ((0, 1600), (8, 16), "`bssearch trial add toy batch_size=8 batch_stages='1600:16'`"),
        ((400, 1600, 3200), (8, None, 16), "`bssearch trial add toy batch_size=4 batch_stages='400:8 3200:16'`"),
    ],
)
def test_the_schedule_that_is_proposed_has_each_batch_size_from_its_checkpoint_on_if_it_grows(
    point: BranchPoint, samples: tuple[int, ...], sizes: tuple[int | None, ...], said: str
) -> None:
    plan = plan_branches(4, 256, 2)
    found = [
        BranchedCheckpoint(
            point=replace(point, samples=at),
            plan=plan,
            start=1.0,
            sizes=(),
            found=LocalCriticalBatch(verdict="cannot_tell" if size is None else "found", batch_size=size),
        )
        for at, size in zip(samples, sizes, strict=True)
    ]
    assert said in " ".join(sentences(make_spec(), found, 3))


@pytest.mark.slow
def test_a_script_begins_with_the_checkpoint_that_it_reads(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    spec = {**LINE_SPEC, "workload": "train.py", "executor": {"device": "cpu"}}
    (folder / "line.yaml").write_text(yaml.safe_dump(spec))
    found = probe(folder, "--checkpoint", "early.pt", *("--tokens", "256", "--octaves", "1", "--at", "400"))
    early = found["checkpoints"][0]
    assert early["samples"] == 400 and found["branch_samples"] == 256 and found["branch_tokens"] is None
    assert early["start_metric"] == pytest.approx(9, rel=0.2)  # all slopes are off by 1, under noise of 1
    assert len(early["branches"][0]["ends"]) == 3
    assert any("--tokens counts samples" in one["message"] for one in found["warnings"])


def test_a_command_cannot_be_told_of_a_checkpoint(folder: Path) -> None:
    spec = {name: value for name, value in LINE_SPEC.items() if name not in {"workload", "executor"}}
    command = ["python", "train.py", "{batch_size}", "{learning_rate}"]
    report = {"loss": "loss=([0-9.]+)", "step": "step=([0-9]+)"}
    (folder / "line.yaml").write_text(yaml.safe_dump({**spec, "command": command, "report": report}))
    told = refused(folder, "probe", "branch", "line.yaml", "--checkpoint", "early.pt", "--tokens", "512", code=2)
    assert "a command cannot receive a checkpoint" in told


def test_tokens_are_whole_samples_and_too_few_are_told_in_tokens() -> None:
    assert samples_of(1000, None, 2000) == 1000, "a workload without tokens counts samples"
    assert samples_of(1000, 32, 16) == 31
    with pytest.raises(
        UsageError, match=r"--tokens 500 must be >= 512, one step of the batch size 2B = 16 at 32 tokens"
    ):
        samples_of(500, 32, 16)
