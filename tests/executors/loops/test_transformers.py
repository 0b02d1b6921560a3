"""A real Trainer of the library trains a trial: its arguments, steps, clock and end, and its mistakes."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from bssearch import Trial, UsageError
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.current import fit_made
from bssearch.executors.loops.passes import SeededSampler
from bssearch.executors.loops.transformers import (
    MOST_STEPS,
    AdvisorCallback,
    TrialCallback,
    both_names,
    check_libraries,
    fit,
    training_arguments,
)
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.records import Configuration, MemoryUse, StepTime, TrialState, WorkloadDescription
from bssearch.training.probes import WARM_UP_STEPS
from tests.executors.loops import test_lightning
from tests.executors.loops.loops import FakeLine, Started, asked, assign, clock_of
from tests.executors.loops.test_growing import grows
from tests.executors.loops.test_own_loop import LOOKS, looked
from tests.executors.loops.trainers import Texts, Watched, classifier, collate, trainer_of, weights
from tests.training.toys import FakeTime, configuration

HALVES = configuration(20, micro_batch_size=10, accumulation_steps=2)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def started(stop_at: int = 50, **changes: Any) -> Started:
    """Return a trial on a fake clock that the search stops after a step."""
    return Started(asked(**changes)).stop_at(stop_at)


def trained(found: Started, folder: Path, **changes: Any) -> Watched:
    """Train a trial with a Trainer; return the Trainer."""
    trainer = trainer_of(found.trial, folder, **changes)
    trainer.train()
    return trainer


def alone(steps: int | None = None, every: int | None = None) -> Trial:
    at = Configuration(batch_size=20, micro_batch_size=20, learning_rate=0.02)
    trial = Trial(Alone(at, 3, {}, every, steps))
    trial.device = "cpu"
    return trial


def test_the_library_is_one_of_the_two_that_the_extra_names() -> None:
    assert transformers.__version__.startswith(("5.22.", "5.23.")), transformers.__version__
    assert metadata.version("accelerate").startswith("1."), metadata.version("accelerate")


@pytest.mark.slow
def test_bssearch_does_not_import_the_library() -> None:
    code = "import sys, bssearch.executors.loops.current, bssearch.cli.app; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_step_is_of_one_whole_batch_and_is_evaluated_where_the_trial_says(tmp_path: Path) -> None:
    found = started(stop_at=9, configuration=HALVES)
    trainer = trained(found, tmp_path)
    assert [one.step for one in found.line.observations] == [0, 2, 4, 6, 8]
    assert found.line.outcome.steps == found.trial.steps == trainer.state.global_step == 9
    assert (found.line.outcome.state, found.line.outcome.reason) == (TrialState.PRUNED, "as the test says")
    assert trainer.seen.steps == [step for step in range(1, 10) for _ in range(2)]
    assert {len(rows) for rows in trainer.seen.rows} == {10}
    assert len({row for rows in trainer.seen.rows[:4] for row in rows}) == 40, "of fifty rows, ten make no whole batch"


def test_the_metric_is_that_of_all_samples(tmp_path: Path) -> None:
    found = started(stop_at=1, eval_every_steps=1)
    texts = Texts(11)
    right = [texts[row]["labels"] for row in range(11)].count(0) / 11
    trained(
        found,
        tmp_path,
        eval_dataset=texts,
        compute_metrics=lambda told: {"accuracy": float((told.label_ids == 0).mean())},
    )
    assert found.line.observations[0].metric == pytest.approx(right)


def test_the_clock_runs_from_an_evaluation_to_the_end_of_a_step_with_the_data(tmp_path: Path) -> None:
    found = started(stop_at=9, eval_every_steps=3)
    time = found.time

    def evaluated(prediction: Any) -> dict[str, float]:
        time.pass_by(100.0)
        return {"accuracy": 0.5}

    trainer = trainer_of(
        found.trial, tmp_path, train_dataset=Texts(60, time, 0.05), compute_metrics=evaluated, own={"logging_steps": 1}
    )
    trainer.after = lambda: time.pass_by(3.0)
    trainer.train()
    outcome = found.line.outcome
    assert outcome.evaluation_seconds == 400.0
    assert outcome.train_seconds + outcome.warmup_seconds == pytest.approx(9 * (3.0 + 20 * 0.05))
    assert outcome.wall_seconds == pytest.approx(436.0)


def language_model() -> LlamaForCausalLM:
    """Return a model whose loss counts the tokens of a whole batch."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, pad_token_id=0, **sizes))


def next_tokens(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("counts_tokens", [False, True])
def test_accumulated_micro_batches_train_as_the_whole_batch_does(counts_tokens: bool, tmp_path: Path) -> None:
    ended = []
    for at in (configuration(20), HALVES):
        found = started(stop_at=5, configuration=replace(at, learning_rate=0.5), metric="loss", target=100.0)
        parts = {"model": language_model(), "data_collator": next_tokens} if counts_tokens else {"model": classifier(0)}
        ended.append(weights(trained(found, tmp_path, compute_metrics=None, own={"optim": "sgd"}, **parts)))
    whole, halves = ended
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(whole, halves, strict=True))


def test_a_loss_that_does_not_count_the_items_of_a_batch_is_refused_where_one_is_accumulated(tmp_path: Path) -> None:
    found = started(stop_at=1)
    trainer_of(found.trial, tmp_path, model=classifier(takes_items=True)).train()
    assert found.line.outcome.steps == 1
    with pytest.raises(UsageError, match="the loss of BertForSequenceClassification ignores num_items_in_batch"):
        trainer_of(started(configuration=HALVES).trial, tmp_path, model=classifier(takes_items=True)).train()


def test_the_seed_gives_the_order_and_evaluations_do_not_change_the_training(tmp_path: Path) -> None:
    ended = []
    for seed, every in ((3, 1), (3, 3), (4, 3)):
        found = started(stop_at=5, seed=seed, eval_every_steps=every)
        trainer = trained(found, tmp_path, model=classifier(dropout=0.5))
        ended.append((trainer.seen.rows[:5], weights(trainer)))
    (first, often), (second, seldom), (other, _) = ended
    assert first == second != other
    assert first[:2] != first[2:4], "each pass has an order of its own"
    assert all(torch.equal(one, two) for one, two in zip(often, seldom, strict=True))


def test_a_subclass_has_the_order_of_bssearchs_own_loop(tmp_path: Path) -> None:
    found = started(stop_at=5)

    class Ordered(Watched):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return found.trial.sampler(self.train_dataset)

    trainer = trained(found, tmp_path, kind=Ordered)
    epochs = SeededSampler(50, 20, found.trial.seed)
    assert [row for rows in trainer.seen.rows for row in rows] == [row for _ in range(3) for row in epochs][:100]


@pytest.mark.parametrize("metric", ["accuracy", "eval_accuracy", "loss", "eval_loss"])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_metric_is_named_with_the_trainers_prefix_or_without(metric: str, is_named: bool, tmp_path: Path) -> None:
    found = started(target=-1.0, metric=metric)
    trainer_of(found.trial, tmp_path, metric=metric if is_named else None).train()
    assert found.line.outcome.state is TrialState.REACHED
    assert math.isfinite(found.line.observations[0].metric)


def test_a_model_that_is_not_finite_has_diverged_by_its_loss(tmp_path: Path) -> None:
    found = started()
    trainer = trainer_of(found.trial, tmp_path, metric="accuracy", compute_metrics=lambda _: {"accuracy": 0.5})

    def spoil() -> None:
        with torch.no_grad():
            next(trainer.model.classifier.parameters()).fill_(math.nan)

    trainer.after = spoil
    trainer.train()
    assert (found.line.outcome.state, found.line.outcome.steps) == (TrialState.DIVERGED, 2)
    assert "the loss" in str(found.line.outcome.reason)


@pytest.mark.parametrize(("own", "steps"), [({"max_steps": 4}, 4), ({"num_train_epochs": 2}, 6)])
def test_a_bound_of_the_trainers_own_ends_a_trial_and_is_its_reason(
    own: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    found = started()
    trainer = trained(found, tmp_path, own=own, train_dataset=Texts(60))
    assert (found.line.outcome.state, found.line.outcome.steps) == (TrialState.EXHAUSTED, steps)
    ((name, value),) = own.items()
    assert f"at step {steps}: {name}={value} of the Trainer" in str(found.line.outcome.reason)
    assert str(trainer.args.lr_scheduler_type.value) == "linear", "the library's own, over the user's bound"


def test_the_test_part_is_evaluated_after_the_training(tmp_path: Path) -> None:
    found = started(target=-1.0, tested=True)
    trainer = trained(found, tmp_path)
    found.trial.test(lambda: both_names(trainer.evaluate(Texts(7))))
    assert found.line.outcome.test_metric is not None
    assert found.line.outcome.test_metric * 7 == pytest.approx(round(found.line.outcome.test_metric * 7))


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Texts().__getitem__, range(50))


@pytest.mark.parametrize(
    ("own", "data"),
    [({}, {}), ({"max_steps": 2}, {}), ({"max_steps": 2}, {"train_dataset": Stream()})],
    ids=["no bound", "bound", "data without a length"],
)
def test_a_trainer_is_described_timed_and_measured_whatever_its_own_bound(
    own: dict[str, Any], data: dict[str, Any], tmp_path: Path
) -> None:
    fake, line = FakeTime(), FakeLine()
    taken = []
    for kind in LOOKS:
        trainer = trainer_of(Trial(looked(kind, fake, line)), tmp_path, metric="accuracy", own=own, **data)
        trainer.after = lambda: fake.pass_by(2.0)
        trainer.train()
        taken.append(len(trainer.seen.rows))
    described, timed, measured = line.replies
    assert isinstance(described, WorkloadDescription) and {"accuracy", "loss"} <= set(described.metrics)
    assert isinstance(timed, StepTime) and timed.step_seconds == pytest.approx(2.0)
    assert taken == [1, WARM_UP_STEPS + timed.steps_timed, 3]
    assert isinstance(measured, MemoryUse)


def test_a_trainer_that_nobody_searches_with_trains_its_epochs_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(alone(every=4), tmp_path, metric="accuracy")
    trainer.train()
    assert trainer.state.global_step == 9, "three epochs are the library's"
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split(" ")[1] for line in told] == ["4:", "8:"]
    assert told[0].count("accuracy") == 1
    ended = trainer_of(alone(steps=3), tmp_path)
    ended.train()
    assert ended.state.global_step == 3


def test_fit_sets_what_plain_arguments_lack_and_adds_the_callback_once(tmp_path: Path) -> None:
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False, disable_tqdm=True)
    found = started(stop_at=5, configuration=HALVES)
    trainer = trainer_of(found.trial, tmp_path, arguments=plain, callbacks=[])
    fit(trainer, found.trial)
    assert [one.step for one in found.line.observations] == [0, 2, 4] and found.line.outcome.steps == 5
    assert {len(rows) for rows in trainer.seen.rows} == {10} and len(trainer.seen.rows) == 10
    assert (plain.max_steps, plain.lr_scheduler_type, plain.learning_rate) == (MOST_STEPS, "constant_with_warmup", 0.02)
    found = started(stop_at=3)
    trainer = trainer_of(found.trial, tmp_path)
    fit_made(found.trial, trainer)
    assert sum(isinstance(one, TrialCallback) for one in trainer.callback_handler.callbacks) == 1
    assert found.line.outcome.steps == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_dataset": {"one": Texts(8), "two": Texts(8)}}, "eval_dataset has several datasets, such as eval_one"),
        ({"train_dataset": Texts(12)}, r"a pass has 12 samples \(micro-batches: 1\), too few for a step of 20 "),
        ({"train_dataset": Stream()}, "the training data has no length"),
        ({"metric": "f1"}, r"evaluate\(\) reports accuracy, .*; the callback's metric is 'f1'"),
        ({"compute_metrics": None}, "the evaluation reports eval_loss, loss; the study's target metric is 'accuracy'"),
    ],
)
def test_a_trainer_that_cannot_train_a_trial_is_told_why(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        trainer_of(started().trial, tmp_path, **changes).train()


def test_a_trainer_without_an_evaluation_set_is_refused(tmp_path: Path) -> None:
    trial = started().trial
    with pytest.raises(UsageError, match="has no eval_dataset"):
        fit(trainer_of(trial, tmp_path, eval_dataset=None), trial)
    with pytest.raises(ValueError, match="requires an eval_dataset"):
        trainer_of(trial, tmp_path, eval_dataset=None).train()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({}, "per_device_train_batch_size=8 contradicts the trial, which sets 20"),
        (
            {"per_device_train_batch_size": 20, "learning_rate": 0.02, "seed": 3, "auto_find_batch_size": True},
            "auto_find_batch_size=True contradicts the trial, which sets False",
        ),
    ],
)
def test_plain_arguments_beside_the_callback_are_held_against_the_trial(
    own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False, **own)
    with pytest.raises(UsageError, match=message):
        trainer_of(started().trial, tmp_path, arguments=plain).train()


def test_a_trial_that_was_paused_does_not_go_on_from_a_trainers_start(tmp_path: Path) -> None:
    trial = started().trial
    trial.steps = 4
    with pytest.raises(UsageError, match="the Trainer begins at step 0, but the trial begins at step 4"):
        trainer_of(trial, tmp_path).train()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_data_without_a_length_count_the_samples_that_the_model_sees(accumulation: int, tmp_path: Path) -> None:
    size = 20 // accumulation
    found = started(configuration=configuration(20, micro_batch_size=size, accumulation_steps=accumulation))
    trainer = trained(found, tmp_path, own={"max_steps": 6}, train_dataset=Stream())
    found.run.finish()
    seen = [len(rows) for rows in trainer.seen.rows]
    assert {size, 10} >= set(seen) and 10 in seen
    last = {step: sum(map(len, trainer.seen.rows[: place + 1])) for place, step in enumerate(trainer.seen.steps)}
    assert len(last) == 6
    assert [(one.step, one.samples) for one in found.line.observations] == [(0, 0), *((k, last[k]) for k in (2, 4, 6))]
    if accumulation == 1:
        assert last[6] == 100


@pytest.mark.parametrize("own", [{"max_steps": 7}, {"num_train_epochs": 3}])
def test_a_horizon_of_the_trainers_own_is_trained_to_its_end_with_incomplete_batches(
    own: dict[str, Any], tmp_path: Path
) -> None:
    found = started()
    trainer = trained(found, tmp_path, own={**own, "lr_scheduler_type": "linear"})
    steps = own.get("max_steps", 9)
    assert found.line.outcome.steps == trainer.state.global_step == steps
    assert found.line.outcome.samples == sum(map(len, trainer.seen.rows)) == (steps // 3) * 50 + steps % 3 * 20
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]


class Sets(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that sets the learning rate."""

    def on_step_begin(self, *given: Any, optimizer: Any, **others: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.3


def test_an_optimizer_or_a_callback_with_another_learning_rate_is_refused_unless_the_script_reads_the_trials(
    tmp_path: Path,
) -> None:
    model = classifier()
    own = {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.5), None)}
    with pytest.raises(UsageError, match=r"learning rate 0\.5, but the trial's learning rate is 0\.02"):
        trained(started(stop_at=3), tmp_path, **own)
    found = started(stop_at=3)
    callbacks = [TrialCallback(found.trial), Sets()]
    with pytest.raises(UsageError, match=r"a callback set the learning rate 0\.3"):
        trained(found, tmp_path, callbacks=callbacks)
    found = started(stop_at=3)
    assert found.trial.learning_rate == 0.02
    trained(found, tmp_path, **own)
    assert found.line.outcome.steps == 3


@pytest.mark.parametrize(("own", "warnings"), [({"warmup_steps": 5}, 1), ({"warmup_steps": 0.1, "max_steps": 9}, 0)])
def test_a_warmup_of_the_trainers_own_is_warned_of_if_it_is_in_steps(
    own: dict[str, Any], warnings: int, tmp_path: Path
) -> None:
    found = started(stop_at=3)
    trained(found, tmp_path, own=own)
    assert len([one for one in found.line.outcome.warnings if "warmup_steps = 5" in one]) == warnings


def trial_with(**parameters: Any) -> Trial:
    """Return a trial of twenty samples a batch whose study sets some parameters."""
    run = TrialRun(asked(), assign(asked(), given=parameters), FakeLine(), clock=clock_of(FakeTime()))
    return Trial(run)


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("transformers", None, "needs transformers>=5.22; no version is installed"),
        ("transformers", "5.9.3", "needs transformers>=5.22; 5.9.3 is installed"),
        ("accelerate", None, "needs accelerate>=1.15; no version"),
        ("accelerate", "0.99.0", "needs accelerate>=1.15; 0.99.0"),
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
        ({"per_device_train_batch_size": 16}, "per_device_train_batch_size=16 contradicts the trial, which sets 20"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 contradicts"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True contradicts the trial, which sets False"),
        ({"eval_strategy": "epoch"}, "eval_strategy=epoch contradicts the trial, which sets no"),
        ({"learning_rate": 1.0}, "learning_rate=1.0 contradicts"),
        ({"weight_decay": 0.5}, "weight_decay=0.5 contradicts the trial, which sets 0.1"),
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
        ({"optimizer": "adagrad"}, {}, "space.optimizer: .* adagrad on"),
        ({"optimizer": "adam"}, {}, "space.optimizer: .* adam on"),
        ({"schedule": "cosine", "horizon_samples": 6000.0}, {"max_steps": 300}, "space.schedule: .* cosine on"),
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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_advisor_s_callback_measures_the_noise_of_a_training(
    accumulation: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advisor = AdvisorCallback()
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=40,
        per_device_train_batch_size=10 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.01,
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
    )
    trainer = trainer_of(alone(), tmp_path, arguments=arguments)
    trainer.add_callback(advisor)
    trainer.remove_callback(TrialCallback)
    trainer.train()
    report = advisor.advisor.report()
    assert (report.batch_size, report.samples) == (10, 400)
    assert report.measured_steps > 0
    assert str(report) in capsys.readouterr().out


def test_a_training_with_one_micro_batch_measures_the_noise_near_the_target(tmp_path: Path) -> None:
    metrics = itertools.chain([0.1], itertools.repeat(0.49))
    found = started(100, target=0.5)
    trained(found, tmp_path, compute_metrics=lambda _: {"accuracy": next(metrics)})
    assert found.line.outcome.noise.passes


# Both Trainers --------------------------------------------------------------------------------------------------------


Prepare = Callable[[Trial], object]


def with_lightning(found: Started, folder: Path, prepare: Prepare) -> None:
    found.trial.given = test_lightning.GIVEN
    prepare(found.trial)
    test_lightning.fit(found.trial, found.time)


def with_transformers(found: Started, folder: Path, prepare: Prepare) -> None:
    arguments = training_arguments(found.trial, output_dir=str(folder), remove_unused_columns=False)
    prepare(found.trial)
    metric = lambda _: {"accuracy": found.trial.steps / 1000}  # noqa: E731
    trainer_of(found.trial, folder, arguments=arguments, compute_metrics=metric).train()


TWO_RANKS = configuration(20, micro_batch_size=10, world_size=2)

every_fit = pytest.mark.parametrize("fit", [with_lightning, with_transformers])


@pytest.mark.filterwarnings("ignore")
@every_fit
@pytest.mark.parametrize(("target", "steps"), [(0.0035, 4), (0.0, 0)])
def test_a_target_that_is_reached_ends_the_fit_at_its_evaluation(
    fit: Any, target: float, steps: int, tmp_path: Path
) -> None:
    found = Started(asked(target=target))
    fit(found, tmp_path, lambda trial: None)
    assert (found.line.outcome.state, found.line.outcome.steps) == (TrialState.REACHED, steps)


@pytest.mark.filterwarnings("ignore")
@every_fit
@pytest.mark.parametrize(
    ("changes", "prepare", "message"),
    [
        (
            {},
            lambda trial: trial.state(model=torch.nn.Linear(1, 1)),
            r"the script calls trial\.state\(\.\.\.\), but a Trainer",
        ),
        ({}, lambda trial: setattr(trial, "device", "cuda:1"), "trains on cpu, but the trial runs on cuda:1"),
        ({"configuration": grows()}, lambda trial: None, "Trainer cannot grow the batch"),
        ({"configuration": TWO_RANKS}, lambda trial: None, "world size is 1, but the trial needs 2"),
        ({"configuration": TWO_RANKS}, lambda trial: trial.sampler(range(40)), "already does"),
    ],
    ids=["a state beside it", "another device", "a batch that grows", "other ranks", "a second share"],
)
def test_what_a_trainer_cannot_do_is_refused_before_it_trains(
    fit: Any, changes: dict[str, Any], prepare: Prepare, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        fit(Started(asked(**changes)), tmp_path, prepare)
    assert caught.value.hint
