"""A resumed trial repeats an unpaused trial."""

import functools
import io
import os
import pickle
import random
import re
import resource
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bssearch.errors import CheckpointError, NotFoundError, UsageError
from bssearch.records import Branch, Configuration, Goal, Observation, Target, TrialOutcome, TrialRequest, TrialState
from bssearch.spec import OPTIMIZERS
from bssearch.training import course, gradient_noise, trial_checkpoint
from bssearch.training.clock import LEDGERS, Clock
from bssearch.training.schedule import RateSchedule
from bssearch.training.trainer import Trainer
from bssearch.training.trial_checkpoint import LARGEST_PICKLE, branch_schedule, load_weights, read_checkpoint
from tests.factories import changed
from tests.torchvision import import_timm
from tests.training.test_loop import timeless
from tests.training.toys import FakeTime, Run, Toy, batches_of, configuration, on_cpu, request, toy_data


class Random(Toy):
    """A network with batch normalisation whose training draws from every generator."""

    def build_model(self, *, dropout: float) -> nn.Module:
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2)
        return nn.Sequential(*layers).to(self.dtype)

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * torch.randn_like(inputs) + 0.1 * float(np.random.normal()) + 0.1 * random.gauss(0, 1)


class StepClock(Clock):
    """A clock of a fake time that counts the steps of its part."""

    def __init__(self, fake: FakeTime) -> None:
        self.steps = 0
        super().__init__(
            now=lambda: fake.seconds, cpu_now=lambda: fake.cpu_seconds, delay_now=lambda: fake.waited_seconds
        )

    def pace(self, micro_batches: int = 1) -> None:
        self.steps += 1


@dataclass
class Parts:
    """Runs a request in parts, at one second a micro-batch, and keeps the observations of all parts."""

    request: TrialRequest
    settings: dict[str, Any] = field(default_factory=dict)
    toy: type[Toy] = Random
    observations: list[Observation] = field(default_factory=list)
    outcomes: list[TrialOutcome] = field(default_factory=list)
    time: FakeTime = field(default_factory=FakeTime)

    def run(self, stop_after: int | None = None, stop_seen: int | None = None, **changes: Any) -> TrialOutcome:
        """Run a part to its end, for ``stop_after`` steps, or until the step ``stop_seen`` is evaluated."""
        clock = StepClock(self.time)
        seen: list[int] = []
        observations: list[Observation] = []

        def stop() -> tuple[TrialState, str] | None:
            late = stop_after is not None and clock.steps >= stop_after
            return (TrialState.PAUSED, "later") if late or stop_seen in seen else None

        run = Run(
            changed(self.request, resumes=bool(self.outcomes), **changes),
            self.toy(on_loss=lambda: self.time.pass_by(1.0)),
            clock=clock,
            stop=stop,
            on_observation=lambda: seen.append(observations[-1].step),
            computation=on_cpu(**self.settings),
            keep=observations,
        )
        self.observations += observations
        self.outcomes.append(run.outcome)
        self.time.pass_by(1000.0)  # the time between the parts belongs to no part
        return run.outcome


SGD = configuration(30, parameters={"momentum": 0.9, "nesterov": True}, warmup_epochs=3.0)
ADAMW = configuration(
    24,
    micro_batch_size=8,
    accumulation_steps=3,
    learning_rate=0.01,
    optimizer="adamw",
    dropout=0.3,
    weight_decay=0.01,
    label_smoothing=0.1,
    warmup_epochs=2.0,
    parameters={"ema_decay": 0.9, "clip_norm": 0.5, "schedule": "cosine", "horizon_samples": 2000},
)


def asked(configuration: Configuration, folder: Path, **changes: Any) -> TrialRequest:
    """Return a request whose target is out of reach, with its checkpoint in the folder."""
    settings = {"target": 1.0, "train_seconds_limit": 90.0, "checkpoint": str(folder / "trial"), **changes}
    return changed(request(configuration, **settings), eval_every_steps=5)


def trained(parts: Parts) -> tuple[list[Observation], dict[str, Any], float]:
    """Return the values that pauses must not change: all except warm-up and other seconds."""
    outcome = parts.outcomes[-1]
    return parts.observations, timeless(outcome), outcome.train_seconds


def check_goes_on(make: Callable[[], Parts], *stops: Mapping[str, int]) -> tuple[Parts, Parts]:
    """Run a trial as a whole, and in parts up to each stop; check that both trained equally; return both."""
    whole, parts = make(), make()
    whole.run()
    for stop in stops:
        paused = parts.run(**stop)
        assert (paused.state, paused.reason) == (TrialState.PAUSED, "later")
    parts.run()
    assert len(whole.observations) > 4
    assert trained(parts) == trained(whole)
    return whole, parts


@pytest.mark.parametrize(
    ("configuration", "data", "where"),
    [
        pytest.param(ADAMW, "host", {"stop_after": 7}, id="between two evaluations"),
        pytest.param(SGD, "device", {"stop_after": 10}, id="when one is due"),
        pytest.param(ADAMW, "device", {"stop_seen": 10}, id="when one has been made"),
        pytest.param(ADAMW, "host", {"stop_seen": 0}, id="before the first step"),
        pytest.param(SGD, "host", {"stop_after": 9}, id="at the end of the warmup"),
        pytest.param(ADAMW, "device", {"stop_after": 12}, id="at the end of an epoch"),
        pytest.param(SGD, "host", {"stop_after": 12}, id="at the end of an epoch of a loader"),
    ],
)
def test_a_resumed_trial_repeats_an_unpaused_trial(
    configuration: Configuration, data: str, where: dict[str, int], tmp_path: Path
) -> None:
    settings = {"data": data, "loader_workers": 0}
    check_goes_on(lambda: Parts(asked(configuration, tmp_path), settings), where)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes(name: str, tmp_path: Path) -> None:
    import_timm()
    check_goes_on(lambda: Parts(asked(replace(ADAMW, optimizer=name), tmp_path)), {"stop_after": 21})


def test_a_trial_can_be_paused_again_and_again(tmp_path: Path) -> None:
    stops = [{"stop_after": steps} for steps in (7, 1, 3, 0, 4)]
    _, parts = check_goes_on(lambda: Parts(asked(ADAMW, tmp_path)), *stops)
    assert [outcome.steps for outcome in parts.outcomes[:-1]] == [7, 8, 11, 11, 15]
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]


def test_a_resumed_trial_crosses_its_target_in_the_interval_of_one_that_was_never_paused(tmp_path: Path) -> None:
    easy = replace(asked(SGD, tmp_path), target=Target(metric="accuracy", value=0.85))
    whole, parts = (Parts(easy) for _ in range(2))
    assert whole.run().state is TrialState.REACHED
    (hit,) = [seen.step for seen in whole.observations if seen.metric >= 0.85]
    parts.run(stop_after=hit)
    assert parts.observations[-1].step < hit
    parts.run()
    first, second = whole.outcomes[-1], parts.outcomes[-1]
    assert trained(parts) == trained(whole)
    assert (first.time_to_target_s, first.last_miss_seconds) == (second.time_to_target_s, second.last_miss_seconds)


def test_the_limit_is_that_of_the_new_request(tmp_path: Path) -> None:
    parts = Parts(asked(SGD, tmp_path))
    parts.run(stop_after=12)
    capped = parts.run(train_seconds_limit=5.0, limit_state=TrialState.CAPPED)
    assert (capped.state, capped.steps, capped.train_seconds) == (TrialState.CAPPED, 12, 12.0)
    assert parts.observations[-1].step == 10


@pytest.mark.parametrize("stop_after", [7, 21])
def test_a_trial_resumed_after_its_target_keeps_its_first_crossing(stop_after: int, tmp_path: Path) -> None:
    met = changed(asked(SGD, tmp_path), target=Target(metric="accuracy", value=0.7), stop_at_target=False)
    met = changed(met, train_seconds_limit=40.0)
    whole, parts = check_goes_on(lambda: Parts(met), {"stop_after": stop_after})
    reached, (paused, again) = whole.outcomes[0], parts.outcomes
    assert reached.state is TrialState.REACHED and (reached.first_hit_step or 99) <= 20
    assert paused.time_to_target_s is None
    assert (again.time_to_target_s, again.reason) == (reached.time_to_target_s, reached.reason)


def test_the_noise_scale_is_that_of_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_noise, "NOISE_SHARE", 1e6)
    monkeypatch.setattr(course, "WINDOW_SHARE", 0.05)
    monkeypatch.setattr(gradient_noise, "PASSES_AT_ONCE", 3)
    lowest = Target(metric="loss", value=0.0, goal=Goal.MINIMIZE)
    whole, parts = (Parts(replace(asked(ADAMW, tmp_path), target=lowest)) for _ in range(2))
    whole.run()
    assert parts.run(stop_after=21).noise.passes is not None
    parts.run()
    noise = whole.outcomes[-1].noise
    assert noise.passes is not None and noise.adam_low is not None
    first, both = (replace(outcome.noise, seconds=None) for outcome in (parts.outcomes[0], parts.outcomes[-1]))
    assert both == replace(noise, seconds=None) != first
    assert (parts.outcomes[-1].noise.seconds or 0) > (parts.outcomes[0].noise.seconds or 0) > 0


def test_ledgers_add_up_over_both_parts_without_the_pause(tmp_path: Path) -> None:
    whole, parts = (Parts(asked(ADAMW, tmp_path)) for _ in range(2))
    whole.run()
    paused, outcome = parts.run(stop_after=7), parts.run()
    assert (paused.train_seconds, outcome.train_seconds) == (21.0, whole.outcomes[-1].train_seconds)
    assert outcome.warmup_seconds == 2 * paused.warmup_seconds == 2 * whole.outcomes[-1].warmup_seconds > 0
    assert outcome.wall_seconds == sum(getattr(outcome, f"{name}_seconds") for name in LEDGERS)


def test_saving_and_restoring_count_as_other_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(asked(SGD, tmp_path))

    def slowly(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        parts.time.pass_by(0.25)
        return work(*arguments, **named)

    monkeypatch.setattr(torch, "save", functools.partial(slowly, torch.save))
    monkeypatch.setattr(torch, "load", functools.partial(slowly, torch.load))
    paused, outcome = parts.run(stop_after=7), parts.run()
    assert paused.other_seconds >= 0.25 and outcome.other_seconds >= paused.other_seconds + 0.25
    for one in (paused, outcome):
        assert one.wall_seconds == sum(getattr(one, f"{name}_seconds") for name in LEDGERS)


def test_progress_shows_while_a_trial_is_saved_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_checkpoint, "CHUNK_BYTES", 100)
    wanted = asked(SGD, tmp_path)
    shown: list[int] = []
    Run(wanted, stop=lambda: (TrialState.PAUSED, "later"), on_progress=lambda: shown.append(1))
    assert len(shown) > 100
    shown.clear()
    again = changed(wanted, resumes=True)
    Run(again, stop=lambda: (TrialState.PRUNED, "enough"), on_progress=lambda: shown.append(1))
    assert len(shown) > 100


class Unpicklable(Random):
    """A model with a state that cannot be saved."""

    def build_model(self, *, dropout: float) -> nn.Module:
        class Keeping(nn.Sequential):
            def get_extra_state(self) -> Any:
                return lambda: None

        return Keeping(*super().build_model(dropout=dropout).children())


class TestWhatCannotBeSaved:
    def pruned(self, parts: Parts, folder: Path) -> str:
        outcome = parts.run(stop_after=7)
        assert (outcome.state, outcome.steps) == (TrialState.PRUNED, 7)
        assert list(folder.iterdir()) == []
        prefix = "later; could not be paused: "
        assert outcome.reason.startswith(prefix)
        return outcome.reason.removeprefix(prefix)

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        why = self.pruned(Parts(asked(SGD, tmp_path / "file")), tmp_path / "empty")
        assert "FileExistsError" in why and str(tmp_path / "file") in why

    def test_a_folder_that_somebody_has_removed_is_made_again(self, tmp_path: Path) -> None:
        assert Parts(asked(SGD, tmp_path / "removed")).run(stop_after=7).state is TrialState.PAUSED
        assert len(list((tmp_path / "removed").iterdir())) == 1

    def test_a_state_that_cannot_be_pickled(self, tmp_path: Path) -> None:
        assert "get_extra_state.<locals>" in self.pruned(Parts(asked(SGD, tmp_path), toy=Unpicklable), tmp_path)

    @pytest.mark.parametrize("bound", ["LARGEST_JSON", "LARGEST_PICKLE", "MOST_OPERATIONS"])
    def test_a_state_that_would_not_be_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
    ) -> None:
        monkeypatch.setattr(trial_checkpoint, bound, 100)
        assert "100" in self.pruned(Parts(asked(SGD, tmp_path)), tmp_path)

    def test_a_disk_that_takes_no_more_leaves_an_earlier_checkpoint_whole(self, tmp_path: Path) -> None:
        parts = Parts(asked(SGD, tmp_path))
        parts.run(stop_after=7)
        before = (tmp_path / "trial").read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            stopped = parts.run(stop_after=3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert stopped.state is TrialState.PRUNED and "File too large" in stopped.reason
        assert (tmp_path / "trial").read_bytes() == before


def assert_refused(parts: Parts, said: str = "checkpoint", **changes: Any) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        parts.run(**changes)
    assert parts.request.checkpoint is not None and parts.request.checkpoint in str(caught.value)


def cut_to(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, round(share * path.stat().st_size))


def flip_a_bit_at(share: float) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo("training.pt")
        broken = bytearray(path.read_bytes())
        broken[member.header_offset + 100 + round(share * (member.file_size - 100))] ^= 1
        path.write_bytes(broken)

    return spoil


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("trial.json", "training.pt", "measured.json"):
            archive.writestr(name, b" " * 10**7)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("evil"),)  # type: ignore[return-value]


class TestWhatCannotBeReadBack:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> Parts:
        parts = Parts(asked(SGD, tmp_path))
        parts.run(stop_after=7)
        return parts

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (Path.unlink, "does not exist"),
            (cut_to(0.0), "BadZipFile"),
            (cut_to(0.5), "BadZipFile"),
            (lambda path: os.truncate(path, path.stat().st_size - 1), "BadZipFile"),
            (flip_a_bit_at(0.1), "CRC"),
            (flip_a_bit_at(0.9), "CRC"),
            (bomb, "unpack to more bytes"),
        ],
    )
    def test_one_that_is_missing_or_cut_off_or_has_a_single_wrong_bit_or_is_a_bomb(
        self, parts: Parts, tmp_path: Path, spoil: Callable[[Path], None], words: str
    ) -> None:
        spoil(tmp_path / "trial")
        assert_refused(parts, words)

    def test_one_that_would_run_code(self, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with zipfile.ZipFile(tmp_path / "trial") as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "trial", "w") as archive:
            for name, data in content.items():
                archive.writestr(name, pickle.dumps(Evil()) if name == "training.pt" else data)
        assert_refused(parts)
        assert not (tmp_path / "evil").exists()

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("seed", {"seed": 4}),
            ("target", {"target": Target(metric="accuracy", value=0.5)}),
            ("configuration", {"configuration": replace(SGD, learning_rate=0.03)}),
            ("eval_every_steps", {"eval_every_steps": 4}),
        ],
    )
    def test_one_of_another_trial(self, parts: Parts, name: str, changes: Mapping[str, Any]) -> None:
        assert_refused(parts, f"belongs to another trial: {name} is ", **changes)

    def test_one_of_another_precision_or_workload(self, parts: Parts) -> None:
        parts.settings = {"precision": "bf16"}
        assert_refused(parts, "precision is")
        parts.settings, parts.toy = {}, Toy
        assert_refused(parts, "workload is")

    def test_one_of_a_model_that_has_changed_although_its_file_has_not(
        self, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Random, "build_model", lambda self, dropout: nn.Linear(6, 2))
        assert_refused(parts, "parameter weight of shape (2, 6) is missing in the checkpoint")

    def test_a_request_without_one(self, parts: Parts) -> None:
        with pytest.raises(CheckpointError, match="trial 7 cannot resume: the request names no checkpoint"):
            parts.run(checkpoint=None)


class Growing(Toy):
    """A model that creates a buffer in its first step."""

    def build_model(self, *, dropout: float) -> nn.Module:
        class Model(nn.Module):
            scale: torch.Tensor | None

            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(6, 2)
                self.register_buffer("scale", None)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                self.scale = 0.99 * (torch.ones(()) if self.scale is None else self.scale)
                scaled: torch.Tensor = self.layer(inputs) * self.scale
                return scaled

        return Model()


def test_a_buffer_that_the_first_step_made_is_there_again(tmp_path: Path) -> None:
    check_goes_on(lambda: Parts(asked(SGD, tmp_path), toy=Growing), {"stop_after": 7})


def test_the_placement_of_the_data_may_change_at_a_pause(tmp_path: Path) -> None:
    whole, parts = (Parts(asked(SGD, tmp_path), {"data": "device"}) for _ in range(2))
    whole.run()
    parts.settings = {"data": "host", "loader_workers": 0}
    assert parts.run(stop_after=7).data_placement == "host"
    parts.settings = {"data": "device"}
    assert parts.run().data_placement == "device"
    assert trained(parts) == trained(whole)


# Branches -------------------------------------------------------------------------------------------------------------


RATE = 0.05


def branch_trained(steps: int, **changes: Any) -> Trainer:
    trainer = Trainer(Toy(), configuration(learning_rate=RATE, **changes), toy_data().train, on_cpu(), seed=1)
    for _ in range(steps):
        trainer.step()
    return trainer


def saved(path: Path, steps: int = 30, **changes: Any) -> tuple[Path, Trainer]:
    """Save a run's checkpoint with another learning rate."""
    trainer = branch_trained(steps)
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
            "another model: the study's model lacks head",
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
    trainer = branch_trained(0)
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


MANY = b"\x80\x02" + b"(N" * 600_000 + b"."
LONG = b"X" + LARGEST_PICKLE.to_bytes(4, "little") + bytes(LARGEST_PICKLE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: MANY, "torch.save of PyTorch 1.6 or later did not write this file"),
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


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("c.pt", UsageError, "cannot be read as tensors"),
        (".", UsageError, "Is a directory"),
        ("none.pt", NotFoundError, "does not exist"),
    ],
)
def test_a_file_of_something_else_a_folder_and_no_file_are_refused(
    tmp_path: Path, name: str, error: type[Exception], said: str
) -> None:
    (tmp_path / "c.pt").write_text("not a checkpoint")
    with pytest.raises(error, match=said):
        read_checkpoint(tmp_path / name)
