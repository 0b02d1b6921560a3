"""What a trial decides of a Trainer's arguments, and which arguments it refuses."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from bssearch.errors import UsageError
from bssearch.executors.loops.own_loop import LoopTrial
from bssearch.executors.loops.transformers import MOST_STEPS, check_libraries, fit, training_arguments
from bssearch.executors.loops.trial_run import TrialRun
from tests.executors.loops.loops import FakeLine, asked, assign, clock_of
from tests.executors.loops.trainers import trainer_of
from tests.training.toys import FakeTime


def trial_with(**parameters: Any) -> LoopTrial:
    """Return a trial of twenty samples a batch whose study sets some parameters."""
    run = TrialRun(asked(), assign(asked(), given=parameters), FakeLine(), clock=clock_of(FakeTime()))
    return LoopTrial(run)


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("transformers", None, "transformers is missing: .*transformers>=5.22"),
        ("transformers", "5.9.3", "transformers 5.9.3 is too old: must be transformers>=5.22"),
        ("accelerate", None, "accelerate is missing: .*accelerate>=1.15"),
        ("accelerate", "0.99.0", "accelerate 0.99.0 is too old"),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_named_with_the_extra(
    name: str, version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = metadata.version

    def pretended(asked_for: str) -> str:
        if asked_for != name:
            return found(asked_for)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", pretended)
    with pytest.raises(UsageError, match=message) as raised:
        check_libraries()
    assert raised.value.hint == "pip install 'bssearch[transformers]'"


def test_the_arguments_are_those_of_the_trial_and_of_its_study(tmp_path: Path) -> None:
    trial = trial_with(
        weight_decay=0.1,
        label_smoothing=0.2,
        warmup_epochs=2.0,
        clip_norm=0.5,
        optimizer="sgd",
        momentum=0.8,
        nesterov=True,
    )
    made = training_arguments(trial, train_samples=100, output_dir=str(tmp_path), save_strategy="epoch")
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (20, 1)
    assert (made.learning_rate, made.seed, made.weight_decay) == (0.02, 3, 0.1)
    assert (made.label_smoothing_factor, made.warmup_steps, made.max_grad_norm) == (0.2, 10, 0.5)
    assert (made.optim, made.optim_args) == ("sgd", "momentum=0.8,nesterov=true")
    assert (made.eval_strategy, made.save_strategy, made.report_to) == ("no", "epoch", [])
    assert (made.max_steps, made.lr_scheduler_type) == (MOST_STEPS, "constant_with_warmup")
    assert not made.logging_nan_inf_filter
    adamw = training_arguments(trial_with(optimizer="adamw", beta1=0.8), output_dir=str(tmp_path))
    assert (adamw.optim, adamw.adam_beta1) == (TrainingArguments.default_optim, 0.8)
    assert training_arguments(trial_with(optimizer="adamw"), optim="adamw_torch").optim == "adamw_torch"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"per_device_train_batch_size": 16}, "per_device_train_batch_size=16 contradicts the trial: must be 20"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 contradicts"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True contradicts the trial: must be False"),
        ({"eval_strategy": "epoch"}, "eval_strategy=epoch contradicts the trial: must be no"),
        ({"learning_rate": 1.0}, "learning_rate=1.0 contradicts"),
        ({"weight_decay": 0.5}, "weight_decay=0.5 contradicts the trial: must be 0.1"),
        ({"optim": "adafactor"}, "optim=adafactor contradicts"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type='cosine' decays over max_steps"),
        ({"warmup_steps": 0.1}, "warmup_steps=0.1 is a share of max_steps"),
    ],
)
def test_an_argument_that_contradicts_the_trial_is_named(own: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        training_arguments(trial_with(weight_decay=0.1, optimizer="adamw"), output_dir=str(tmp_path), **own)
    if "max_steps" not in message:
        made = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False, **own)
        trainer = trainer_of(trial_with(), tmp_path, arguments=made)
        with pytest.raises(UsageError, match=message):
            fit(trainer, trial_with(weight_decay=0.1, optimizer="adamw"))


def test_warmup_in_epochs_takes_the_number_of_samples() -> None:
    with pytest.raises(UsageError, match=r"warmup_epochs = 2\.0 needs the number"):
        training_arguments(trial_with(warmup_epochs=2.0))


@pytest.mark.parametrize(
    ("parameters", "own", "named"),
    [
        ({"optimizer": "adagrad"}, {}, "space.optimizer: adagrad"),
        ({"optimizer": "adam"}, {}, "space.optimizer: adam"),
        ({"schedule": "cosine", "horizon_samples": 6000.0}, {"max_steps": 300}, "space.schedule: cosine"),
    ],
)
def test_what_no_argument_stands_for_is_refused_and_not_named_in_an_answer(
    parameters: dict[str, Any], own: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named):
        training_arguments(trial_with(**parameters), output_dir=str(tmp_path), **own)
    with pytest.raises(UsageError, match=named):
        trial = trial_with(**parameters)
        fit(trainer_of(trial, tmp_path, arguments=TrainingArguments(output_dir=str(tmp_path), **own)), trial)


def test_an_argument_of_ones_own_stands_for_it(tmp_path: Path) -> None:
    trial = trial_with(optimizer="adagrad", schedule="cosine", horizon_samples=6000.0)
    own: dict[str, Any] = {"optim": "adagrad", "lr_scheduler_type": "cosine", "max_steps": 300}
    made = training_arguments(trial, output_dir=str(tmp_path), **own)
    assert (made.optim, made.lr_scheduler_type, made.max_steps) == ("adagrad", "cosine", 300)
