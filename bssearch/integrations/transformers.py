"""A Hugging Face Trainer as a trial: a callback that counts its steps, has it evaluated and ends it.

::

    trial = bssearch.current_trial(batch_size=32, learning_rate=5e-5)
    args = training_arguments(trial, output_dir="out")
    trainer = Trainer(model, args, ..., callbacks=[TrialCallback(trial)])
    trainer.train()

The name of this module is that of the library within bssearch only: ``import transformers`` is the library everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bssearch.errors import UsageError
from bssearch.integrations.accumulated_loss import check_counts_items
from bssearch.integrations.asked import refuse_state
from bssearch.integrations.own_loop import LoopTrial
from bssearch.integrations.trainer_arguments import MOST_STEPS, check, fill, training_arguments, whole_steps

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # isort: skip

__all__ = ["TrialCallback", "both_names", "fit", "fit_made", "training_arguments"]

PREFIX = "eval_"
"""What a Trainer puts before the name of each metric of its evaluations."""

NO_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
"""What a Trainer reports beside the metrics: how fast it evaluates."""


class TrialCallback(TrainerCallback):  # type: ignore[misc]
    """Has a Trainer train a trial: its optimizer steps are the trial's, and it is evaluated where the trial says.

    ``metric`` names the one metric to report, as ``accuracy`` or as ``eval_accuracy``; None reports all. Raises
    `UsageError` as the training begins where the Trainer's arguments contradict the trial, or its batch grows.

    On the clock is all from the end of an evaluation to the step after which the next is due: the batches, that the
    Trainer fetches before ``on_step_begin``, its logging and its checkpoints too. Each epoch ends with its last whole
    batch, so that no step has fewer samples than the others; of data without a length the samples are counted as the
    model sees them. Where a batch is accumulated the model's loss must count
    ``num_items_in_batch``, or not be given it; see `bssearch.integrations.accumulated_loss`.
    """

    def __init__(self, trial: LoopTrial, metric: str | None = None) -> None:
        self._trial = trial
        self._metric = metric
        self._is_training = False
        self._steps_in_pass: float = 0
        self._steps_of_pass = 0
        self._samples: int | None = None
        self._micro_batch_samples: int | None = None
        self._end_look_at_loss: Callable[[], object] = lambda: None
        self._end_look_at_samples: Callable[[], object] = lambda: None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begin the trial's time; have the model evaluated where that is due before the first step."""
        refuse_state(self._trial.has_state)
        self._trial.refuse_growing("a Hugging Face Trainer", "its loader is made once")
        check(args, self._trial)
        if state.global_step != self._trial.steps:
            raise UsageError(
                f"the Trainer begins at step {state.global_step}, the trial at step {self._trial.steps}",
                hint="a Trainer trains a trial from its start: no resume_from_checkpoint",
            )
        self._steps_in_pass = whole_steps(others["train_dataloader"], args)
        if args.gradient_accumulation_steps > 1:
            self._end_look_at_loss = check_counts_items(others["model"])
        if math.isinf(self._steps_in_pass):
            self._samples = 0
            self._end_look_at_samples = others["model"].register_forward_pre_hook(self._look, with_kwargs=True).remove
        self._trial.count_steps_of({"optimizer": others.get("optimizer")})
        self._is_training = True
        args.eval_on_start = self._trial.evaluation_due

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Count the steps of a pass over the data anew."""
        self._steps_of_pass = 0

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Count the samples of a micro-batch before a step's last one."""
        self._add_samples()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Count an optimizer step; have the model evaluated where that is due, end where the trial does."""
        trial = self._trial
        if self._has_ended(control):
            return
        trial.step(self._samples_of_step())
        self._end_look_at_loss()
        self._steps_of_pass += 1
        if self._steps_of_pass >= self._steps_in_pass:
            control.should_epoch_stop = True
        if trial.evaluation_due:
            control.should_evaluate = True
        else:
            self._has_ended(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **others: Any,
    ) -> None:
        """Report an evaluation that was due; the user's own ones are let be."""
        if not self._is_training:
            return
        if self._trial.evaluation_due:
            named = self._reported(metrics)
            self._trial.report_all(named, named.get("loss"))
        self._has_ended(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End a trial that the Trainer has ended, and say by what."""
        self._is_training = False
        self._end_look_at_samples()
        self._trial.close(_what_ended(args))

    def _look(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note the samples that the model is given; it may be called more than once for a micro-batch."""
        if model.training:
            self._micro_batch_samples = self._trial.samples_in(named or given)

    def _add_samples(self) -> None:
        found, self._micro_batch_samples = self._micro_batch_samples, None
        self._samples = None if found is None or self._samples is None else self._samples + found

    def _samples_of_step(self) -> int | None:
        """Return the samples of a step: a whole batch of data with a length, else as they were counted."""
        if math.isfinite(self._steps_in_pass):
            return self._trial.batch_size
        self._add_samples()
        samples, self._samples = self._samples, 0
        return samples

    def _has_ended(self, control: TrainerControl) -> bool:
        """Return whether the trial has ended; the Trainer then ends too."""
        if not self._trial.should_stop:
            return False
        control.should_training_stop = True
        return True

    def _reported(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is reported of an evaluation; alone each metric once, as it is printed."""
        _refuse_several(metrics)
        named = both_names(metrics)
        if self._metric is not None:
            name = self._metric.removeprefix(PREFIX)
            if name not in named:
                raise UsageError(f"evaluate() reports {', '.join(sorted(named))}; the callback's metric is {name!r}")
            named = {one: named[one] for one in (name, PREFIX + name, "loss") if one in named}
        if not self._trial.is_searched:
            return {name: value for name, value in named.items() if not name.startswith(PREFIX)}
        return named


def fit(trainer: Trainer, trial: LoopTrial, metric: str | None = None) -> None:
    """Train a trial with a Trainer: set what its arguments lack, add the callback where it has none, and train.

    What an argument lacks is what is at its default; see `training_arguments`. ``metric`` is the callback's. Raises
    `UsageError` for a Trainer without an ``eval_dataset``, and for an argument that contradicts the trial.
    """
    if trainer.eval_dataset is None:
        raise UsageError("the Trainer has no eval_dataset: a trial is evaluated", hint="Trainer(..., eval_dataset=...)")
    try:
        samples = len(trainer.train_dataset)
    except TypeError:
        samples = None
    fill(trainer.args, trial, samples)
    trainer._train_batch_size = trainer.args.train_batch_size
    if not any(isinstance(one, TrialCallback) for one in trainer.callback_handler.callbacks):
        trainer.add_callback(TrialCallback(trial, metric))
    trainer.train()


def fit_made(trial: LoopTrial, made: Trainer) -> None:
    """Train a trial with the Trainer that a ``make_trainer`` has returned; see `fit`."""
    fit(made, trial)


def both_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of ``trainer.evaluate()``, each as ``accuracy`` and as ``eval_accuracy``.

    For the test part: ``trial.test(lambda: both_names(trainer.evaluate(test_data)))``.
    """
    bare = {name.removeprefix(PREFIX): value for name, value in metrics.items()}
    kept = {name: value for name, value in bare.items() if name not in (*NO_METRICS, "epoch")}
    return {**kept, **{PREFIX + name: value for name, value in kept.items()}}


def _refuse_several(metrics: Mapping[str, Any]) -> None:
    """Raise `UsageError` for the metrics of one of several evaluation sets: it is not known which is the last."""
    speeds = [name for name in metrics if name.endswith("_runtime") and name != f"{PREFIX}runtime"]
    if speeds:
        raise UsageError(
            f"eval_dataset is a dict of several, of which {speeds[0].removesuffix('_runtime')} is one; a trial has one",
            hint="Trainer(..., eval_dataset=...) with the one of the target",
        )


def _what_ended(args: TrainingArguments) -> str:
    """Return what has ended a Trainer whose trial had not ended."""
    if args.max_steps == MOST_STEPS:
        return "a callback of the Trainer, or the end of its data"
    bound = f"max_steps={args.max_steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"
    return f"{bound} of the Trainer, or a callback of its own"
