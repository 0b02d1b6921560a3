"""A trial that branches off a checkpoint: the state that it loads, and the files that it refuses."""

import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import Branch, TrialState
from bssearch.training.schedule import RateSchedule
from bssearch.training.trainer import Trainer
from bssearch.training.trial_checkpoint import LARGEST_PICKLE, branch_schedule, load_weights, read_checkpoint
from tests.training.toys import Run, Toy, batches_of, configuration, on_cpu, request, toy_data

RATE = 0.05


def trained(steps: int, **changes: Any) -> Trainer:
    trainer = Trainer(Toy(), configuration(learning_rate=RATE, **changes), toy_data().train, on_cpu(), seed=1)
    for _ in range(steps):
        trainer.step()
    return trainer


def saved(path: Path, steps: int = 30, **changes: Any) -> tuple[Path, Trainer]:
    """Save a run's checkpoint with another learning rate."""
    trainer = trained(steps)
    state = trainer.optimizers[0].state_dict()
    for group in state["param_groups"]:
        group["lr"] = 7.0
    content = {"model": trainer.model.state_dict(), "optimizer": state, "step": steps, "samples": steps * 20}
    torch.save({**content, **changes}, path)
    return path, trainer


def branched(path: Path, *, batch_size: int = 20, samples: int = 200, **changes: Any) -> Run:
    wanted = configuration(batch_size, learning_rate=RATE, **changes.pop("settings", {}))
    branch = Branch(checkpoint=str(path), samples=samples, start_samples=600, **changes)
    limits = {"stop_at_target": False, "limit_state": TrialState.CAPPED, "eval_every_steps": 1}
    return Run(request(wanted, metric="loss", target=100.0, branch=branch, **limits))


def by_hand(trainer: Trainer, steps: int, seed: int) -> nn.Module:
    """Train further from a trainer's state with PyTorch alone, in the order of a fresh trial's seed."""
    batches = batches_of(toy_data().train, configuration(), on_cpu(), seed)
    for _ in range(steps):
        inputs, targets = next(batches)
        trainer.optimizers[0].zero_grad()
        nn.functional.cross_entropy(trainer.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        trainer.optimizers[0].step()
    return trainer.model.eval()


def test_a_branch_has_the_runs_weights_and_optimizer_and_its_own_data_order(tmp_path: Path) -> None:
    path, trainer = saved(tmp_path / "c.pt")
    run = branched(path)
    assert run.observations[0].metric == pytest.approx(trainer.evaluate(toy_data().validation, "loss"), rel=1e-6)
    trainer.model.train()
    model = by_hand(trainer, 10, seed=3)
    with torch.no_grad():
        expected = Toy().evaluate(model, toy_data().validation)
    assert run.observations[-1].metric == pytest.approx(expected["loss"], rel=1e-5)
    assert (run.outcome.state, run.outcome.samples) == (TrialState.EXHAUSTED, 200)


def test_its_learning_rate_is_its_own_and_not_the_one_that_was_saved(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "c.pt")
    run = branched(path, batch_size=50, rise_samples=100)
    assert [one.samples for one in run.observations] == [0, 50, 100, 150, 200]
    assert [one.learning_rate for one in run.observations[1:]] == pytest.approx([RATE / 3, RATE * 2 / 3, RATE, RATE])


def test_without_an_optimizers_state_the_optimizer_restarts(tmp_path: Path) -> None:
    path, trainer = saved(tmp_path / "c.pt")
    torch.save(trainer.model.state_dict(), tmp_path / "plain.pt")
    plain = read_checkpoint(tmp_path / "plain.pt")
    assert (plain.optimizer, plain.step, plain.samples) == (None, None, None)
    assert branched(path).observations[0].metric == branched(tmp_path / "plain.pt").observations[0].metric
    assert branched(path).observations[2].metric != branched(tmp_path / "plain.pt").observations[2].metric


def test_a_paused_trials_own_file_is_a_checkpoint(tmp_path: Path) -> None:
    stop = iter([None] * 12 + [(TrialState.PAUSED, "for later")] * 3)
    paused = Run(
        request(configuration(20, learning_rate=RATE), target=2.0, checkpoint=str(tmp_path / "t.trial")),
        stop=lambda: next(stop),
    )
    assert paused.outcome.state is TrialState.PAUSED
    assert read_checkpoint(tmp_path / "t.trial").samples == paused.outcome.samples == 20 * paused.outcome.steps > 0
    assert branched(tmp_path / "t.trial").outcome.state is TrialState.EXHAUSTED


def test_the_average_of_the_weights_starts_at_the_runs_weights(tmp_path: Path) -> None:
    path, trainer = saved(tmp_path / "c.pt")
    run = branched(path, settings={"parameters": {"ema_decay": 0.9}})
    assert run.observations[0].metric == pytest.approx(trainer.evaluate(toy_data().validation, "loss"), rel=1e-6)


def test_the_schedule_of_a_branch_is_the_runs_from_the_checkpoint_on() -> None:
    run = RateSchedule("linear", warmup_steps=4, horizon_steps=104)
    schedule = branch_schedule(run, Branch(checkpoint="c.pt", samples=100, start_samples=540), batch_size=10)
    assert [schedule.factor(step) for step in range(3)] == [run.factor(54), run.factor(55), run.factor(56)]
    assert not schedule.is_over(9) and schedule.is_over(10)
    unknown = Branch(checkpoint="c.pt", samples=100)
    assert branch_schedule(RateSchedule(warmup_steps=4), unknown, batch_size=10).factor(0) == 1.0
    with pytest.raises(UsageError, match="has neither step nor samples"):
        branch_schedule(run, unknown, batch_size=10)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, r"bias is missing; expected shape \(3,\)"),
        (
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)},
            r"weight is of shape \(2, 3\); expected shape \(3, 2\)",
        ),
        (
            {"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "head": torch.zeros(1)},
            "another model, which has head",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_its_first_difference(
    state: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_weights(nn.Linear(2, 3), state, Path("c.pt"))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "c.pt")
    with pytest.raises(UsageError, match=r"does not fit the study's optimizer: .* betas"):
        branched(path, settings={"optimizer": "adamw"})
    with pytest.raises(UsageError, match="does not fit the study's optimizer"):
        branched(saved(tmp_path / "d.pt", optimizer=[])[0])


def test_an_optimizers_state_in_one_group_of_plain_pytorch_is_loaded() -> None:
    trainer = trained(0)
    plain = torch.optim.SGD(trainer.model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    assert len(trainer.optimizers[0].param_groups) == 2, "with and without weight decay"
    for parameter in trainer.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    plain.step()
    trainer.updates.take_over(plain.state_dict(), None)
    for parameter in trainer.model.parameters():
        momentum = trainer.optimizers[0].state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, plain.state[parameter]["momentum_buffer"])


@pytest.mark.parametrize("groups", [None, [{"lr": "a"}], ["a"], [{"lr": None}]])
def test_an_optimizers_state_without_a_learning_rate_is_read(tmp_path: Path, groups: Any) -> None:
    assert read_checkpoint(saved(tmp_path / "c.pt", optimizer={"param_groups": groups})[0]).learning_rate is None


def test_weights_of_eight_bits_are_read(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2, dtype=torch.float8_e4m3fn)}}, tmp_path / "c.pt")
    assert read_checkpoint(tmp_path / "c.pt").model["weight"].dtype is torch.float8_e4m3fn


class Code:
    """An object that only code can read."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"weight": torch.tensor([1.0, float("nan")])}}, "weight has values that are not finite"),
        ({"model": {}, "step": -3}, "step = -3 must be a whole number >= 0"),
        ({"model": {}, "samples": 1.5}, "samples = 1.5 must be a whole number >= 0"),
        ({"weights": 1, "epoch": 2}, "has epoch, weights; expected 'model'"),
        ([1, 2], "is a list; expected a dict"),
        ({"model": Code()}, "cannot be read as tensors and plain values"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(UsageError, match=message):
        read_checkpoint(tmp_path / "c.pt")


def pickled(*programs: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file of `torch.save` with other pickles, all under one name."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice
        for program in programs:
            archive.writestr("c/data.pkl", program)
        archive.writestr("c/version", "3\n")
    return file.getvalue()


def in_old_form(program: bytes) -> bytes:
    """Return a file as before PyTorch 1.6, with another pickle after the first three."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    start = file.getvalue()
    return start[: start.rindex(b"\x80\x02}q\x00.")] + program


MANY = b"\x80\x02" + b"(N" * 600_000 + b"."
LONG = b"X" + LARGEST_PICKLE.to_bytes(4, "little") + bytes(LARGEST_PICKLE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: MANY, "torch.save did not write this file"),
        (lambda: in_old_form(MANY), "more than 1,000,000 operations"),
        (lambda: in_old_form(b"\x80\x02" + LONG + MANY), "remain"),
        (lambda: pickled(MANY), "more than 1,000,000 operations"),
        (lambda: pickled(MANY, b"\x80\x02}."), "more than 1,000,000 operations"),
        (lambda: pickled(LONG + b"."), r"data\.pkl has 16,777,222 bytes"),
        (lambda: pickled(MANY, compression=zipfile.ZIP_DEFLATED), "unpack to more bytes than the file has"),
        (lambda: pickled(MANY) + pickled(b"\x80\x02}."), "not at the start of the file"),
    ],
)
def test_a_checkpoint_that_would_take_minutes_to_read_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Callable[[], bytes], said: str
) -> None:
    (tmp_path / "c.pt").write_bytes(content())
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(UsageError, match=said):
        read_checkpoint(tmp_path / "c.pt")


def test_a_file_of_something_else_a_folder_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_text("not a checkpoint")
    with pytest.raises(UsageError, match="cannot be read as tensors"):
        read_checkpoint(tmp_path / "c.pt")
    with pytest.raises(UsageError, match="Is a directory"):
        read_checkpoint(tmp_path)
    with pytest.raises(NotFoundError, match="does not exist"):
        read_checkpoint(tmp_path / "none.pt")
