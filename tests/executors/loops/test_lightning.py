"""A Lightning Trainer as a trial: with the real library, its own schedules, callbacks and accumulation."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bssearch import StudySpec, Trial, UsageError
from bssearch.commands.opening import program_of
from bssearch.executors.base import ExecutorSettings, Load
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.current import fit_made, train_made
from bssearch.executors.programs.script import LoadedScript
from bssearch.records import (
    Branch,
    TrialState,
    WorkloadDescription,
)
from tests.executors.loops.loops import FakeLine, Started, asked
from tests.executors.loops.test_own_loop import BRANCH, LOOKS, check_equals_workload, looked
from tests.executors.test_script import single_threaded
from tests.training.toys import FakeTime, configuration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning

    from bssearch.executors.loops import lightning as ours
    from bssearch.executors.loops.lightning import TrialCallback

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 50
GIVEN = {"batch_size": 20, "learning_rate": 0.1, "evaluate_every": None}


class Tiny(lightning.LightningModule):  # type: ignore[misc]
    """A linear map; a micro-batch takes a second of a fake time, a validation a hundred."""

    def __init__(self, time: FakeTime, optimizers: Callable[[nn.Module], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.time, self.optimizers_of = time, optimizers or (lambda module: torch.optim.SGD(module.parameters(), 0.1))
        self.validated: list[int] = []
        self.rates: list[float] = []
        self.seen: list[int] = []

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.time.pass_by(1.0)
        self.seen.append(len(batch[0]))
        self.log("training", 0.5)
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.time.pass_by(100.0)
            self.validated.append(self.global_step)
            torch.randn(5)
        self.log("accuracy", self.global_step / 1000)


def rows() -> TensorDataset:
    inputs = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def trainer_of(*callbacks: Any, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {"max_epochs": -1, "accelerator": "cpu", "enable_model_summary": False, **quiet, **settings}
    return lightning.Trainer(callbacks=list(callbacks), **settings)


def started(stop_at: int | None = None, **changes: Any) -> Started:
    """Return a trial that ends after 9 steps by default."""
    found = Started(asked(**changes)).stop_at(9 if stop_at is None else stop_at, TrialState.PRUNED)
    found.trial.given = GIVEN
    return found


def loader(trial: Trial, data: Any = None) -> DataLoader[Any]:
    return DataLoader(data or rows(), batch_size=trial.micro_batch_size)


def fit(trial: Trial, time: FakeTime, *callbacks: Any, module: Any = None, data: Any = None, **settings: Any) -> Any:
    """Fit a trial; return the module."""
    module = module or Tiny(time)
    trainer = trainer_of(TrialCallback(trial), *callbacks, **settings)
    trainer.fit(module, loader(trial, data), DataLoader(rows(), batch_size=25))
    return module


def fitted(*callbacks: Any, optimizers: Any = None, stop_at: int | None = None, **settings: Any) -> tuple[Started, Any]:
    """Fit a trial of the search to its end; return it and the module."""
    own = {name: settings.pop(name) for name in ("configuration", "eval_every_steps", "target") if name in settings}
    found = started(stop_at, **own)
    return found, fit(found.trial, found.time, *callbacks, module=Tiny(found.time, optimizers), **settings)


def test_the_version_of_the_library_is_one_of_those_that_are_known() -> None:
    assert metadata.version("lightning") in {"2.6.5", "2.6.6"}, "check that TrialCallback knows this version's loops"


@pytest.mark.parametrize(("version", "message"), [(None, "is missing"), ("2.6.4", "2.6.4"), ("2.7.0", "2.7.0")])
def test_a_library_that_is_missing_or_unknown_is_named_with_the_extra(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_of(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    with pytest.raises(UsageError, match=message) as caught:
        ours.library()
    assert "lightning>=2.6.5,<2.7" in caught.value.message and "bssearch[lightning]" in str(caught.value.hint)


def test_steps_are_the_optimizers_and_validation_runs_where_it_is_due_off_the_clock() -> None:
    at = configuration(20, micro_batch_size=10, accumulation_steps=2)
    found, module = fitted(configuration=at, eval_every_steps=4, max_epochs=100, val_check_interval=1)
    assert module.validated == [0, 4, 8]
    assert [(one.step, one.samples) for one in found.line.observations] == [(0, 0), (4, 80), (8, 160)]
    assert found.line.outcome.state is TrialState.PRUNED and found.line.outcome.steps == 9
    assert found.line.outcome.train_seconds == pytest.approx(18.0), "a micro-batch takes a second"
    assert found.line.outcome.evaluation_seconds == pytest.approx(300.0)
    assert module.seen == [10] * 18, "the fifth micro-batch of each epoch makes no window"


def test_an_epoch_without_a_whole_window_is_refused() -> None:
    with pytest.raises(UsageError, match="an epoch has 5 micro-batches of 10 samples, fewer than the 6"):
        fitted(configuration=configuration(60, micro_batch_size=10, accumulation_steps=6))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def test_a_short_window_of_a_loader_without_a_length_is_warned_of() -> None:
    found = started(configuration=configuration(20, micro_batch_size=10, accumulation_steps=2))
    fit(found.trial, found.time, data=Stream())
    assert "took 1 micro-batches instead of 2" in str(found.line.outcome.warnings)


def test_the_trial_ends_the_fit_whatever_the_trainer_still_wants() -> None:
    stopper = lightning.pytorch.callbacks.EarlyStopping("accuracy", patience=50, mode="max")
    found, module = fitted(stopper, stop_at=3, eval_every_steps=2, min_steps=40, min_epochs=30)
    assert found.line.outcome.state is TrialState.PRUNED and len(module.rates) == 3
    assert module.validated == [0, 2], "none where the fit ends"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_steps": 3}, "at step 3: Trainer(max_steps=3)"),
        ({"max_epochs": 1}, "at step 3: Trainer(max_epochs=1)"),
        ({"max_time": {"milliseconds": 200}, "stop_at": 10**9}, "Trainer(max_time=...)"),
        ({"fast_dev_run": True}, "at step 1: Trainer(max_steps=1)"),
    ],
)
def test_a_limit_of_the_trainers_own_ends_the_trial_by_its_name(settings: dict[str, Any], reason: str) -> None:
    found, _ = fitted(**settings)
    assert found.line.outcome.state is TrialState.EXHAUSTED and found.line.outcome.reason.endswith(reason)


def test_a_callback_that_stops_the_fit_is_named() -> None:
    stopper = lightning.pytorch.callbacks.EarlyStopping("accuracy", patience=1, mode="min")
    found, _ = fitted(stopper)
    assert found.line.outcome.reason.endswith("trainer.should_stop = True, set by EarlyStopping")


def test_a_fit_that_takes_no_step_says_why() -> None:
    with pytest.raises(UsageError, match=r"before its first step: Trainer\(max_steps=0\)"):
        fitted(max_steps=0)


def schedules(optimizer: Any) -> dict[str, Callable[[], Any]]:
    scheduler = torch.optim.lr_scheduler
    return {
        "lambda": lambda: scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cosine": lambda: scheduler.CosineAnnealingLR(optimizer, 12, eta_min=0.01),
        "one cycle": lambda: scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
        "in turn": lambda: scheduler.SequentialLR(
            optimizer, [scheduler.LinearLR(optimizer, 0.2, total_iters=3), scheduler.StepLR(optimizer, 2)], [3]
        ),
        "chained": lambda: scheduler.ChainedScheduler(
            [scheduler.ExponentialLR(optimizer, 0.9), scheduler.ConstantLR(optimizer, 0.5, 2)]
        ),
        "plateau": lambda: scheduler.ReduceLROnPlateau(optimizer, factor=0.6, patience=0, min_lr=0.03),
    }


@pytest.mark.parametrize("name", ["lambda", "cosine", "one cycle", "in turn", "chained", "plateau"])
def test_a_schedule_follows_the_trials_learning_rate_in_proportion(name: str) -> None:
    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        made = {"scheduler": schedules(optimizer)[name](), "interval": "step", "monitor": "training"}
        return {"optimizer": optimizer, "lr_scheduler": made}

    plain = Tiny(FakeTime(), optimizers)
    trainer = trainer_of(max_steps=9, check_val_every_n_epoch=None, val_check_interval=2)
    trainer.fit(plain, DataLoader(rows(), batch_size=20, drop_last=True), DataLoader(rows(), batch_size=25))
    _, module = fitted(optimizers=optimizers)
    assert len(set(plain.rates)) > 2 and len(module.rates) == 9
    assert module.rates == pytest.approx([0.2 * rate for rate in plain.rates], rel=1e-12)


def test_every_group_keeps_its_ratio_and_weight_decay_follows_where_the_study_sets_it() -> None:
    def optimizers(module: Any) -> Any:
        return torch.optim.SGD(
            [
                {"params": [module.layer.weight], "lr": 0.1, "weight_decay": 0.04},
                {"params": [module.layer.bias], "lr": 0.3, "weight_decay": 0.0},
            ]
        )

    found = started()
    found.trial.parameters._values["weight_decay"] = 0.01
    module = Tiny(found.time, optimizers)
    fit(found.trial, found.time, module=module)
    groups = module.trainer.optimizers[0].param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.02, 0.06])
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.01, 0.0])
    assert found.trial.has_asked("weight_decay")


@pytest.fixture
def found() -> Started:
    return started()


def test_a_script_that_reads_the_learning_rate_sets_its_rates_itself(found: Started) -> None:
    rate = found.trial.learning_rate
    module = Tiny(found.time, lambda module: torch.optim.SGD(module.parameters(), lr=rate))
    fit(found.trial, found.time, module=module)
    assert set(module.rates) == {0.02}


def test_alone_nothing_changes_but_that_validations_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def weights(*callbacks: Any) -> tuple[torch.Tensor, list[int]]:
        torch.manual_seed(1)
        module = Tiny(FakeTime())
        trainer = trainer_of(*callbacks, max_epochs=2, accumulate_grad_batches=2)
        trainer.fit(module, DataLoader(rows(), batch_size=10), DataLoader(rows(), batch_size=25))
        return module.layer.weight, module.validated

    trial = Trial(Alone(configuration(10, learning_rate=0.3), 0, {}))
    assert trial.batch_size == 10
    trial.given = GIVEN
    plain, callback = weights(), weights(TrialCallback(trial))
    assert torch.equal(plain[0], callback[0]) and plain[1] == callback[1]
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")] == [
        "step 3: accuracy 0.003",
        "step 6: accuracy 0.006",
    ]


def test_alone_a_cadence_and_an_end_that_the_script_asks_for_hold(capfd: pytest.CaptureFixture[str]) -> None:
    trial = Trial(Alone(configuration(20), 0, {}, evaluate_every=2, steps=5))
    trial.given = {**GIVEN, "evaluate_every": 2}
    module = fit(trial, FakeTime())
    assert module.validated[-2:] == [2, 4] and len(module.rates) == 5


def test_what_a_search_looks_at_before_it_goes_past_the_ends_of_the_users_training() -> None:
    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    fake, line = FakeTime(), FakeLine()
    for kind in LOOKS:
        trial = Trial(looked(kind, fake, line))
        trial.given = GIVEN
        stopper = lightning.pytorch.callbacks.EarlyStopping("accuracy", patience=1, mode="min")
        fit(trial, fake, stopper, module=Tiny(fake, optimizers), max_steps=2, max_time={"seconds": 1000})
    described, timed, memory = line.replies
    assert isinstance(described, WorkloadDescription)
    assert set(described.metrics) == {"accuracy"}, "not what training logs"
    assert "Trainer(max_steps=2) ends trials at this limit" in str(described.notice)
    assert memory.fits and timed.step_seconds == pytest.approx(1.0)  # type: ignore[union-attr]
    assert timed.evaluation_seconds == pytest.approx(100.0)  # type: ignore[union-attr]


class Manual(Tiny):
    automatic_optimization = False


class Unvalidated(Tiny):
    validation_step = lightning.LightningModule.validation_step


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (Manual, {}, r"Manual.automatic_optimization = False: a trial needs"),
        (Unvalidated, {}, "cannot validate"),
        (Tiny, {"limit_val_batches": 0}, "cannot validate: .*limit_val_batches = 0"),
    ],
)
def test_a_fit_that_cannot_be_a_trial_is_refused(
    module: type[Tiny], settings: dict[str, Any], message: str, found: Started
) -> None:
    with pytest.raises(UsageError, match=message):
        fit(found.trial, found.time, module=module(found.time), **settings)


class Loaders(lightning.LightningDataModule):  # type: ignore[misc]
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(), batch_size=25)


def test_a_made_trainer_is_fitted_with_a_datamodule_and_gets_the_callback(found: Started) -> None:
    fit_made(found.trial, (trainer_of(), Tiny(found.time), Loaders(found.trial.micro_batch_size)))
    assert found.line.outcome.steps == 9 and found.line.observations


@pytest.mark.parametrize(
    "name", ["BatchSizeFinder", "LearningRateFinder", "GradientAccumulationScheduler", "StochasticWeightAveraging"]
)
def test_a_callback_that_decides_what_the_trial_decides_is_refused(name: str, found: Started) -> None:
    kind = getattr(lightning.pytorch.callbacks, name)
    given: dict[str, list[Any]] = {
        "GradientAccumulationScheduler": [{0: 2}],
        "StochasticWeightAveraging": [1e-3],
    }
    trainer = trainer_of(kind(*given.get(name, [])))
    for data in (Loaders(found.trial.micro_batch_size), (loader(found.trial), DataLoader(rows()))):
        with pytest.raises(UsageError, match=f"the Trainer has the callback {name}"):
            fit_made(found.trial, (trainer, Tiny(found.time), data))


def test_a_metric_that_validation_does_not_log_is_named_with_what_it_logs(found: Started) -> None:
    callback = TrialCallback(found.trial, metric="training")
    with pytest.raises(UsageError, match="TrialCallback has metric = 'training', but validation logs accuracy"):
        trainer_of(callback).fit(Tiny(found.time), loader(found.trial), DataLoader(rows()))


NO_TRAINER = r"returned .*; expected a trainer"


@pytest.mark.parametrize(
    ("made", "message"),
    [*((one, NO_TRAINER) for one in (5, (5, 6), (trainer_of, 1), ())), (trainer_of(), "expected .trainer, module")],
)
def test_what_is_no_trainer_with_its_module_is_refused(made: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit_made(started().trial, made)


def test_a_file_without_the_function_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("trainer = None")
    with pytest.raises(UsageError, match=r"other.py has no function make_trainer"):
        train_made(f"{tmp_path}/other.py:make_trainer", configuration())


MADE = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from bssearch.workloads.digits import Digits


class Module(lightning.LightningModule):
    def __init__(self, digits):
        super().__init__()
        self.digits, self.model = digits, digits.build_model(dropout=0.2)
        self.validation = digits.load(torch.device("cpu")).validation

    def training_step(self, batch, batch_idx):
        return self.digits.loss(self.model, *batch, label_smoothing=0.0)

    def validation_step(self, batch, batch_idx):
        self.log_dict(self.digits.evaluate(self.model, self.validation))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.4, momentum=0.9, nesterov=True)


def make_trainer(trial):
    digits = Digits()
    part = digits.load(torch.device("cpu")).train
    train = TensorDataset(part.inputs, part.targets)
    loader = DataLoader(
        train, batch_size=trial.micro_batch_size, sampler=trial.sampler(train), generator=torch.Generator()
    )
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return lightning.Trainer(max_epochs=99, accelerator="cpu", **quiet), Module(digits), (loader, DataLoader([0]))
"""
SPEC: dict[str, Any] = {
    "name": "made",
    "workload": "made.py:make_trainer",
    "target": {"metric": "accuracy", "value": 0.95},
    "space": {"batch_size": [32, 64], "learning_rate": {"low": 0.01, "high": 1.0}},
    "default": {"batch_size": 32, "learning_rate": 0.4},
    "budget": {"trials": 3, "trial_train_seconds": 60},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedScript]:
    folder = tmp_path_factory.mktemp("made")
    (folder / "made.py").write_text(MADE)
    spec = StudySpec.model_validate(SPEC)
    settings = ExecutorSettings(workload=spec.workload, folder=folder, device="cpu", program=program_of(spec))
    with single_threaded(), closing(LoadedScript(Load(settings=settings, slot=0))) as loaded:
        assert loaded._server.notice is None, "lightning is safe to fork"
        yield loaded


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "seed"), [(64, 5), (32, 6)])
def test_digits_as_a_workload_and_with_a_trainer_take_identical_steps_to_the_target(
    micro: int, seed: int, made: LoadedScript
) -> None:
    check_equals_workload(made, micro, seed, rounding=1e-6)  # Lightning logs in float32


def test_a_make_trainer_is_a_program_and_its_file_is_what_a_database_may_not_name(tmp_path: Path) -> None:
    from bssearch.commands.opening import _location

    spec = StudySpec.model_validate(SPEC)
    assert spec.is_program and _location(spec) == "made.py"
    assert not StudySpec.model_validate({**SPEC, "workload": "made.py:Other"}).is_program


@pytest.mark.parametrize("stream", [False, True])
def test_a_smaller_last_batch_counts_its_own_samples(stream: bool) -> None:
    found = started(stop_at=6, eval_every_steps=2)
    assert fit(found.trial, found.time, data=Stream() if stream else None).seen == [20, 20, 10, 20, 20, 10]
    assert [(one.step, one.samples) for one in found.line.observations] == [(0, 0), (2, 40), (4, 70), (6, 100)]
    assert (found.line.outcome.steps, found.line.outcome.samples) == (6, 100)


def test_a_step_that_the_trainer_counts_and_its_gradient_scaler_skips_is_none() -> None:
    class Unstable(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if len(self.seen) in {1, 4} else loss

    found = started(stop_at=4, eval_every_steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    assert len(fit(found.trial, found.time, module=Unstable(found.time), plugins=[precision]).seen) == 6
    assert [(one.step, one.samples) for one in found.line.observations] == [(0, 0), (2, 50), (4, 100)]
    assert (found.line.outcome.steps, found.line.outcome.samples) == (4, 100)


class WarmsUp(Tiny):
    """Sets the learning rate at each step, as the library's documentation shows it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 500)


def test_a_module_that_sets_the_learning_rate_is_refused_unless_it_reads_the_trials(found: Started) -> None:
    with pytest.raises(UsageError, match="WarmsUp sets the learning rate"):
        fit(found.trial, found.time, module=WarmsUp(found.time))
    found = started()
    assert found.trial.learning_rate == 0.02
    assert len(fit(found.trial, found.time, module=WarmsUp(found.time)).seen) == 9


def test_a_batch_that_the_module_skips_counts_no_samples() -> None:
    class Skips(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    found = started(stop_at=6, eval_every_steps=3)
    assert fit(found.trial, found.time, module=Skips(found.time)).seen == [20, 20, 10, 20, 20, 10]
    assert found.line.outcome.samples == 60


@pytest.mark.parametrize(("branch", "hint"), [(None, "without ckpt_path"), (BRANCH, "trial.load_optimizer()")])
def test_a_trial_does_not_begin_in_the_middle_of_another_run(branch: Branch | None, hint: str, tmp_path: Path) -> None:
    data, before = DataLoader(rows(), batch_size=25), trainer_of(max_epochs=1)
    before.fit(Tiny(FakeTime()), data, data)
    before.save_checkpoint(tmp_path / "run.ckpt")
    found = started(branch=branch)
    with pytest.raises(UsageError, match=r"begins at step 2, with the learning rate") as caught:
        trainer_of(TrialCallback(found.trial)).fit(
            Tiny(found.time), loader(found.trial), data, ckpt_path=tmp_path / "run.ckpt", weights_only=False
        )
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_advisor_s_callback_measures_the_noise_of_a_fit(
    accumulation: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advisor = ours.AdvisorCallback(batch_size=20)
    inputs = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=0.01,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=tmp_path,
        callbacks=[advisor],
    )
    trainer.fit(
        Tiny(FakeTime()),
        DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=20 // accumulation),
    )
    found = advisor.advisor.report()
    assert (found.batch_size, found.samples) == (20, 4000)
    assert found.measured_steps > 0
    assert str(found) in capsys.readouterr().out


def test_a_fit_with_one_micro_batch_measures_the_noise_near_the_target() -> None:
    found, _ = fitted(stop_at=400, target=0.2)
    assert found.line.outcome.state is TrialState.REACHED
    assert found.line.outcome.noise.passes
