"""What `compile: auto` and `channels_last: auto` come to."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.commands.check import check
from bssearch.commands.opening import Launch, opened
from bssearch.commands.run import run_study
from bssearch.commands.target import advise_target
from bssearch.errors import UsageError
from bssearch.executors.base import Executor, ExecutorSettings
from bssearch.executors.inline import InlineExecutor
from bssearch.executors.local import LocalExecutor
from bssearch.probes import compile_mode
from bssearch.probes.compile_mode import Fastest, Tried, chosen, fastest
from bssearch.records import Configuration, Environment, StepTime, TrainingSettings, WorkloadDescription
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store, open_store
from bssearch.training import compilation
from bssearch.training.computation import Computation
from tests.executors.line_workload import request_trial, run_to_the_end, write_workload
from tests.factories import make_spec
from tests.training.fake_graphs import FakeGraphs
from tests.training.toys import CPU, Toy, configuration, toy_data

OPEN = TrainingSettings(compile="auto", channels_last="auto")
MODES = ("default", "reduce-overhead", "capture")
LOSSES = (2.0, 1.0)


def choice(found: dict[str, Tried], settings: TrainingSettings = OPEN) -> Fastest:
    """Choose among modes by name, ``+`` for channels last; others take a second a step."""

    def tried(one: TrainingSettings) -> Tried:
        return found.get(one.compile + "+" * bool(one.channels_last), Tried(LOSSES, 1.0))

    return chosen(settings, tried, MODES, tolerance=0.01)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param({}, "none", id="all alike"),
        pytest.param({"capture": Tried(LOSSES, 0.2)}, "capture", id="the fastest"),
        pytest.param({"capture": Tried(LOSSES, 0.98)}, "none", id="hardly faster"),
        pytest.param({"default": Tried(LOSSES, 0.3), "capture": Tried(LOSSES, 0.295)}, "default", id="two alike"),
        pytest.param({"capture": Tried((2.0, 1.02), 0.2)}, "none", id="disagrees"),
        pytest.param({"capture": Tried((2.0, 1.005), 0.2)}, "capture", id="agrees within the tolerance"),
        pytest.param({"capture": Tried((2.0, math.nan), 0.2)}, "none", id="not finite"),
        pytest.param({"capture": Tried(reason="out of memory")}, "none", id="cannot be"),
        pytest.param({"none+": Tried(LOSSES, 0.5)}, "none channels_last", id="the layout"),
        pytest.param({"none+": Tried(LOSSES, 0.5), "capture+": Tried(LOSSES, 0.1)}, "capture channels_last", id="both"),
    ],
)
def test_the_fastest_that_agrees_with_eager_steps_is_taken(found: dict[str, Tried], expected: str) -> None:
    assert choice(found).compile_mode == expected


def test_what_the_spec_gives_stays_and_is_no_part_of_the_mode() -> None:
    faster = {"none+": Tried(LOSSES, 0.5), "default+": Tried(LOSSES, 0.2), "capture+": Tried(LOSSES, 0.1)}
    assert choice(faster, TrainingSettings(compile="auto", channels_last=True)).compile_mode == "capture"
    assert choice(faster, TrainingSettings(compile="default", channels_last="auto")).compile_mode == (
        "default channels_last"
    )


CAPTURE = TrainingSettings(compile="capture")


@pytest.mark.parametrize(
    ("captured", "expected"),
    [
        pytest.param(Tried(LOSSES, 2.0), "capture", id="slower, but asked for"),
        pytest.param(Tried((2.0, 1.02), 0.2), "none", id="disagrees"),
        pytest.param(Tried(reason="the optimizer waits"), "none", id="cannot be"),
    ],
)
def test_captured_steps_that_are_asked_for_are_those_of_all_trials_or_of_none(captured: Tried, expected: str) -> None:
    found = {"capture": captured, "default": Tried(LOSSES, 0.01)}
    assert choice(found, CAPTURE).compile_mode == expected
    faster = found | {"none+": Tried(LOSSES, 0.5), "capture+": captured}
    both = choice(faster, TrainingSettings(compile="capture", channels_last="auto"))
    assert both.compile_mode == f"{expected} channels_last"


def test_on_a_device_without_graphs_nothing_is_tried_for_captured_steps() -> None:
    def tried(settings: TrainingSettings) -> Tried:
        raise AssertionError(settings)

    found = chosen(CAPTURE, tried, ("default",), tolerance=0.01)
    assert found == Fastest("none", "steps are computed as none: capture is for devices with CUDA graphs")


def test_what_was_found_of_each_mode_is_said() -> None:
    found = choice({"default": Tried(reason="no compiler"), "capture": Tried((2.0, 1.5), 0.2)})
    assert found.notice == (
        "steps are computed as none: none 1e+03 ms a step; none, channels last 1e+03 ms a step; default no compiler; "
        "reduce-overhead 1e+03 ms a step; capture disagrees with eager steps: losses differ by 0.5 of them, more than "
        "0.01"
    )


@pytest.mark.parametrize(
    ("compile_mode", "expected"),
    [("none", ("none", False)), ("capture", ("capture", False)), ("capture channels_last", ("capture", True))],
)
def test_settings_are_settled_as_an_environment_says(compile_mode: str, expected: tuple[str, bool]) -> None:
    settled = OPEN.settled(compile_mode)
    assert (settled.compile, settled.channels_last) == expected and OPEN.leave_open
    assert CAPTURE.leave_open and CAPTURE.settled(compile_mode).compile == expected[0]
    given = TrainingSettings(compile="default", channels_last=False)
    assert given.settled(compile_mode) == given
    if expected[0] == "none":
        assert Computation(CPU, OPEN, compile_mode).compile_mode == compile_mode


def test_a_layout_that_is_given_is_no_part_of_the_mode_and_one_that_is_chosen_is() -> None:
    modes = [
        Computation(CPU, TrainingSettings(channels_last=given), "none channels_last").compile_mode
        for given in (True, "auto", False)
    ]
    assert modes == ["none", "none channels_last", "none"]


class Captures(Computation):
    """A computation on a CPU that records steps where that is asked."""

    def __init__(self, device: torch.device, settings: TrainingSettings, mode: str | None = None) -> None:
        super().__init__(device, settings, mode)
        self.core = None
        if self.settings.compile == "capture":
            self.graphs = FakeGraphs
            self.warnings.clear()


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(request: Any, workload: Any, data: Any, computation: Computation) -> StepTime:
        seconds = 0.1 if computation.settings.compile == "capture" else 1.0
        return StepTime(
            batch_size=20,
            micro_batch_size=20,
            step_seconds=seconds,
            step_seconds_low=seconds,
            step_seconds_high=seconds,
            settled=True,
            steps_timed=9,
            update_seconds=0.1,
            evaluation_seconds=0.1,
            peak_memory_bytes=None,
            contended=False,
            reason=None,
        )

    monkeypatch.setattr(compile_mode, "Computation", Captures)
    monkeypatch.setattr(compile_mode, "MODES", {"cpu": ("capture",)})
    monkeypatch.setattr(compile_mode, "measure_step_time", timed)


def found_on_the_toy(optimizers: tuple[str, ...] = (), workload: Any = None, compile: str = "auto") -> Fastest:
    settings = TrainingSettings(compile=compile, fused=True)
    wanted = configuration(20, dropout=0.5)
    return fastest(workload or Toy(), wanted, toy_data(), CPU, settings, optimizers)


@pytest.mark.usefixtures("_captures")
def test_a_captured_step_is_tried_without_dropout_and_taken_where_its_losses_are_those_of_eager_ones() -> None:
    built_with: set[float] = set()

    class Noted(Toy):
        def build_model(self, *, dropout: float) -> nn.Module:
            built_with.add(dropout)
            return super().build_model(dropout=dropout)

    assert found_on_the_toy(("sgd", "adamw"), Noted()).compile_mode == "capture"
    assert built_with == {0.0}


@pytest.mark.parametrize("compile", ["auto", "capture"])
@pytest.mark.usefixtures("_captures")
def test_no_step_is_captured_in_a_study_that_has_an_optimizer_whose_steps_cannot_be(compile: str) -> None:
    assert found_on_the_toy(("sgd",), compile=compile).compile_mode == "capture"
    found = found_on_the_toy(("sgd", "adafactor"), compile=compile)
    assert found.compile_mode == "none" and "the optimizer Adafactor waits for the device" in found.notice


class WithWidth(Toy):
    """A model that cannot be built without an own parameter, which it has no default of."""

    def build_model(self, *, dropout: float, width: int) -> nn.Module:  # type: ignore[override]
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


@pytest.mark.usefixtures("_captures")
def test_a_captured_step_is_tried_with_the_own_parameters_of_the_model() -> None:
    wanted = configuration(20, parameters={"model.width": 4})
    settings = TrainingSettings(compile="auto", fused=True)
    workload: Any = WithWidth()
    assert fastest(workload, wanted, toy_data(), CPU, settings, ("adamw",)).compile_mode == "capture"


class KnowsSGD(Toy):
    def build_optimizer(self, model: nn.Module, wanted: Configuration) -> torch.optim.Optimizer:
        rates = {"sgd": 0.01}  # the same whatever the trial's is
        return torch.optim.SGD(model.parameters(), lr=rates[wanted.optimizer], fused=True)


@pytest.mark.usefixtures("_captures")
def test_what_a_workload_raises_of_another_optimizer_is_a_reason_and_no_crash() -> None:
    found = found_on_the_toy(("adamw",), KnowsSGD())
    assert found.compile_mode == "none" and "capture 'adamw'" in found.notice


@pytest.mark.usefixtures("_captures")
def test_a_warning_about_something_else_rules_no_mode_out() -> None:
    assert found_on_the_toy(workload=KnowsSGD()).compile_mode == "capture"
    settings = TrainingSettings(compile="auto", fused=True, ghost_batch_size=10)
    found = fastest(Toy(), configuration(20), toy_data(), CPU, settings)
    assert found.compile_mode == "capture" and "changes nothing" not in found.notice


@pytest.mark.usefixtures("_captures")
def test_compiling_that_was_given_up_is_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compilation, "BACKEND", refuse)
    monkeypatch.setattr(compile_mode, "MODES", {"cpu": ("default",)})
    found = found_on_the_toy(workload=Toy())
    assert found.compile_mode == "none" and "default compile = 'default' failed and was given up" in found.notice


@pytest.mark.usefixtures("_captures")
def test_losses_that_are_not_finite_are_called_so() -> None:
    class Infinite(Toy):
        def loss(self, *arguments: Any, **settings: Any) -> torch.Tensor:
            return super().loss(*arguments, **settings) * math.inf

    assert found_on_the_toy(workload=Infinite()) == Fastest(
        "none",
        "steps are computed as none, the only mode that was tried: its first losses are not finite, so that no other "
        "can be compared with them",
    )
    assert "capture disagrees with eager steps: its losses are not finite" in (
        choice({"capture": Tried((math.nan, 1.0), 0.2)}).notice
    )


@pytest.mark.usefixtures("_captures")
def test_a_captured_step_that_is_refused_is_not_taken() -> None:
    class Waiting(Toy):
        def augment(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs if inputs.sum().item() > -1e9 else -inputs

    found = found_on_the_toy(workload=Waiting())
    assert found.compile_mode == "none" and "called a synchronizing operation" in found.notice


@pytest.mark.usefixtures("_captures")
def test_what_the_steps_raise_with_which_others_are_compared_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "eager")

    def fail() -> None:
        raise ZeroDivisionError("of the workload")

    for given in (TrainingSettings(compile="auto"), TrainingSettings(compile="default", channels_last="auto")):
        with pytest.raises(ZeroDivisionError, match="of the workload"):
            fastest(Toy(on_loss=fail), configuration(20), toy_data(), CPU, given)


LEFT_OPEN = {"training": TrainingSettings(channels_last="auto"), "default": configuration(8, learning_rate=0.05)}


def line_settings(folder: Path, **changes: Any) -> ExecutorSettings:
    write_workload(folder)
    return ExecutorSettings(workload="line.py:Line", folder=folder, device="cpu", **{**LEFT_OPEN, **changes})


def test_all_workers_of_an_executor_have_what_the_first_one_decided(tmp_path: Path) -> None:
    with closing(LocalExecutor(line_settings(tmp_path, slots=2))) as executor:
        run_to_the_end(executor, request_trial(1))  # nobody has asked for a description before
        mode = executor._settings.compile_mode
        executor._discard(executor._slots[0])
        again = executor.describe()
    assert mode in {"none", "none channels_last"}
    assert again.environment.compile_mode == mode and again.notice is None


OPEN_SPEC = make_spec(
    workload="line.py:Line",
    target={"metric": "score", "value": 0.9, "goal": "maximize"},
    space={"batch_size": 8, "learning_rate": 0.05},
    default={"batch_size": 8, "learning_rate": 0.05},
    confirm={"runs": 0},
    budget={"trials": 1, "trial_train_seconds": 2.0},
    training={"channels_last": "auto"},
    executor={"name": "inline", "device": "cpu"},
)
WITH_A_SECOND = OPEN_SPEC.model_copy(update={"budget": OPEN_SPEC.budget.model_copy(update={"trials": 2})})


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was decided in this test; the first time it is another mode than later."""
    found: list[str] = []

    def once(*arguments: Any, **named: Any) -> Fastest:
        found.append("none channels_last" if not found else "none")
        return Fastest(found[-1], "so it was found")

    monkeypatch.setattr(compile_mode, "fastest", once)
    return found


def fingerprint(url: str) -> str:
    with open_store(url, write=False) as store:
        environment = store.study(OPEN_SPEC.name).environment
    assert environment is not None
    return environment.fingerprint


def test_a_study_keeps_what_was_decided_when_it_began(tmp_path: Path, decided: list[str]) -> None:
    write_workload(tmp_path)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    for spec in (OPEN_SPEC, WITH_A_SECOND):
        run_study(spec, db=url, folder=tmp_path)
    assert fingerprint(url).endswith("compile none channels_last") and decided == ["none channels_last"]


def assert_both_have_what_the_other_decided(url: str, decided: list[str]) -> None:
    assert decided == ["none channels_last", "the other's is none", "none"]
    assert fingerprint(url).endswith("compile none")
    with open_store(url, write=False) as store:
        assert len(store.trials(OPEN_SPEC.name)) == 2


def test_who_opens_a_new_study_beside_another_has_what_the_other_decided(
    tmp_path: Path, decided: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workload(tmp_path)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    describe = InlineExecutor.describe

    def late(self: InlineExecutor) -> WorkloadDescription:
        monkeypatch.setattr(InlineExecutor, "describe", describe)
        found = describe(self)
        decided.append("the other's is none")
        run_study(OPEN_SPEC, db=url, folder=tmp_path)
        return found

    monkeypatch.setattr(InlineExecutor, "describe", late)
    run_study(WITH_A_SECOND, db=url, folder=tmp_path)
    assert_both_have_what_the_other_decided(url, decided)


def test_who_binds_a_new_study_after_another_has_what_the_other_decided(
    tmp_path: Path, decided: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workload(tmp_path)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    bind = Store.bind_environment

    def late(self: Store, *given: Any, **named: Any) -> None:
        monkeypatch.setattr(Store, "bind_environment", bind)
        decided.append("the other's is none")
        run_study(OPEN_SPEC, db=url, folder=tmp_path)
        bind(self, *given, **named)

    monkeypatch.setattr(Store, "bind_environment", late)
    run_study(WITH_A_SECOND, db=url, folder=tmp_path)
    assert_both_have_what_the_other_decided(url, decided)


def test_a_study_of_another_device_is_joined_by_no_second_try(
    tmp_path: Path, decided: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workload(tmp_path)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    bind = Store.bind_environment

    def late(self: Store, name: str, environment: Environment, **named: Any) -> None:
        bind(self, name, replace(environment, device_name="another device"))
        bind(self, name, environment, **named)

    monkeypatch.setattr(Store, "bind_environment", late)
    with pytest.raises(UsageError, match="never pooled"):
        run_study(OPEN_SPEC, db=url, folder=tmp_path)
    assert decided == ["none channels_last"]


def test_check_and_target_and_pretended_memory_have_what_was_decided_for_the_stored_study(
    tmp_path: Path, decided: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workload(tmp_path)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    monkeypatch.setenv("BSSEARCH_DB_URL", url)
    quick = OPEN_SPEC.model_copy(update={"budget": OPEN_SPEC.budget.model_copy(update={"trial_train_seconds": 0.05})})
    assert {"code": "environment", "message": "so it was found"} in [
        note.model_dump(include={"code", "message"}) for note in check(quick, folder=tmp_path).notes
    ]
    assert decided == ["none channels_last"]
    assert "so it was found" in advise_target(quick, runs=1, folder=tmp_path).notes
    assert len(decided) == 2
    run_study(OPEN_SPEC, folder=tmp_path)
    assert fingerprint(url).endswith("compile none") and len(decided) == 3
    decided.clear()
    assert not check(OPEN_SPEC, folder=tmp_path).notes
    advise_target(OPEN_SPEC, runs=1, folder=tmp_path)
    asked: list[str | None] = []

    def executor(self: Launch, spec: StudySpec, given: object, mode: str | None) -> Executor:
        asked.append(mode)
        raise UsageError("enough is known")

    monkeypatch.setattr(Launch, "executor", executor)
    with pytest.raises(UsageError, match="enough"), opened(OPEN_SPEC, Launch(folder=tmp_path, pretended_gib=1.0)):
        pass
    assert asked == ["none"] and decided == []


def test_where_eager_steps_run_out_of_memory_nothing_is_compared_with_them() -> None:
    found = choice({"none": Tried(reason="out of memory")})
    assert found == Fastest("none", "steps are computed as none, the only mode that was tried: out of memory")


def test_what_is_said_names_the_mode_that_is_given() -> None:
    given = TrainingSettings(compile="default", channels_last="auto")
    found = choice({"default": Tried(reason="out of memory")}, given)
    assert found == Fastest("default", "steps are computed as default, the only mode that was tried: out of memory")
    assert given.settled(found.compile_mode).compile == "default"
