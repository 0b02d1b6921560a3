"""Runs a Hugging Face Trainer as a trial; see `bssearch guide own-training`."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch

from bssearch.errors import require, required
from bssearch.executors.loops.following import rates_of
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.passes import FEWER_SAMPLES
from bssearch.executors.loops.trial_run import unmoved
from bssearch.training.advisor import BatchAdvisor
from bssearch.training.environment import installed_version, numbers_of
from bssearch.training.schedule import warmup_steps

# the oldest tested versions, because older Trainers have other events
LEAST_VERSIONS = {"transformers": (5, 22), "accelerate": (1, 15)}


def check_libraries() -> None:
    """Raise `UsageError` if a library is missing or too old."""
    for name, least in LEAST_VERSIONS.items():
        found = installed_version(name)
        require(
            found is not None and numbers_of(found) >= least,
            f"a trial with a Trainer needs {name}>={'.'.join(map(str, least))}; {found or 'no version'} is installed",
            hint="pip install 'bssearch[transformers]'",
        )


check_libraries()

from transformers import (  # noqa: E402 - check_libraries reports missing packages first
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import has_length  # noqa: E402

PREFIX = "eval_"

# values that a Trainer reports beside the metrics
NO_METRICS = {"runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch"}


class TrialCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that runs a Trainer's training as a trial.

    The train seconds include data loading, logging and checkpoints, but no evaluations. In a search, an epoch ends with
    its last whole batch, unless the user sets ``max_steps`` or ``num_train_epochs``. See `check_counts_items` for the
    loss with accumulation.

    Args:
        metric: The metric to report, such as ``accuracy`` or ``eval_accuracy``, or None for all metrics.

    Raises:
        UsageError: When training begins, if the Trainer contradicts the trial or the batch grows.
    """

    def __init__(self, trial: Trial, metric: str | None = None) -> None:
        self._trial = trial
        self._metric = metric
        self._is_training = False
        self._steps_in_pass: float = 0
        self._steps_of_pass = 0
        self._micro_batch_samples: int | None = None
        self._end_look_at_loss: Callable[[], object] = lambda: None
        self._end_look_at_samples: Callable[[], object] = lambda: None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Start the trial, and evaluate at step 0 if an evaluation is due."""
        self._trial.check_trainer("a Hugging Face Trainer")
        check(args, self._trial)
        require(
            state.global_step == self._trial.steps,
            f"the Trainer begins at step {state.global_step}, but the trial begins at step {self._trial.steps}",
            hint="call train() without resume_from_checkpoint",
        )
        whole = whole_steps(others["train_dataloader"], args)
        # The Trainer's own horizon counts incomplete batches. Without these batches, training would end too early.
        self._steps_in_pass = whole if args.max_steps >= MOST_STEPS else math.inf
        if args.gradient_accumulation_steps > 1:
            self._end_look_at_loss = check_counts_items(others["model"])
        if math.isinf(self._steps_in_pass):
            self._end_look_at_samples = others["model"].register_forward_pre_hook(self._look, with_kwargs=True).remove
        self._trial.count_steps_of({"optimizer": others.get("optimizer")})
        self._trial.look_at({"model": others.get("model")})
        if others.get("optimizer") is not None:
            self._trial.check_rates(others["optimizer"])
        if args.warmup_steps >= 1 and not any(map(self._trial.parameters.get, ("warmup_steps", "warmup_epochs"))):
            self._trial.warn(
                f"warmup_steps = {args.warmup_steps:g} is the same at every batch size; set warmup_epochs in the study"
            )
        self._is_training = True
        args.eval_on_start = self._trial.evaluation_due

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._steps_of_pass = 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        optimizer, schedule = others.get("optimizer"), others.get("lr_scheduler")
        if optimizer is not None and schedule is not None and hasattr(schedule, "get_last_lr"):
            self._trial.check_scheduled(rates_of([optimizer], "lr"), schedule.get_last_lr(), "a callback")

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._add_samples()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Count a step, plan a due evaluation, and stop if the trial is over."""
        trial = self._trial
        if self._has_ended(control):
            return
        self._add_samples()
        trial.stepped()
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
        """Report a due evaluation, and ignore the user's own evaluations."""
        if not self._is_training:
            return
        if self._trial.evaluation_due:
            named = self._reported(metrics)
            self._trial.report_all(named, named.get("loss"))
        self._has_ended(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._is_training = False
        self._end_look_at_samples()
        self._trial.close(_what_ended(args))

    def _look(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # A micro-batch may call the model several times.
        if model.training:
            self._micro_batch_samples = self._trial.samples_in(named or given)

    def _add_samples(self) -> None:
        found, self._micro_batch_samples = self._micro_batch_samples, None
        trial = self._trial
        whole = trial.micro_batch_size * trial.world_size
        trial.add_samples(whole if math.isfinite(self._steps_in_pass) else found)

    def _has_ended(self, control: TrainerControl) -> bool:
        if not self._trial.should_stop:
            return False
        control.should_training_stop = True
        return True

    def _reported(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        speeds = [name for name in metrics if name.endswith("_runtime") and name != f"{PREFIX}runtime"]
        require(
            not speeds,
            f"eval_dataset has several datasets, such as {', '.join(speeds).replace('_runtime', '')}; a trial "
            "evaluates one dataset",
            hint="pass only the dataset of the target: Trainer(..., eval_dataset=...)",
        )
        named = both_names(metrics)
        if self._metric is not None:
            name = self._metric.removeprefix(PREFIX)
            require(
                name in named,
                f"evaluate() reports {', '.join(sorted(named))}; the callback's metric is {name!r}",
                hint=f"return {name!r} from compute_metrics, or name another metric",
            )
            named = {one: named[one] for one in (name, PREFIX + name, "loss") if one in named}
        searched = self._trial.is_searched
        return {name: value for name, value in named.items() if searched or not name.startswith(PREFIX)}


class AdvisorCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that measures the gradient noise scale of any training and prints a report at the end."""

    advisor: BatchAdvisor

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.advisor = BatchAdvisor(
            others["model"],
            args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            optimizer=others.get("optimizer"),
        )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.advisor.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.advisor.close()
        if state.is_world_process_zero:
            print(self.advisor.report())


def fit(trainer: Trainer, trial: Trial, metric: str | None = None) -> None:
    """Train a trial with a Trainer, after replacing default arguments and adding a missing `TrialCallback`.

    Args:
        metric: See `TrialCallback`.

    Raises:
        UsageError: If ``eval_dataset`` is missing or an argument contradicts the trial.
    """
    require(
        trainer.eval_dataset is not None,
        "the Trainer has no eval_dataset, but a trial needs evaluations",
        hint="pass Trainer(..., eval_dataset=...)",
    )
    samples = len(trainer.train_dataset) if has_length(trainer.train_dataset) else None
    fill(trainer.args, trial, samples)
    trainer._train_batch_size = trainer.args.train_batch_size
    if not any(isinstance(one, TrialCallback) for one in trainer.callback_handler.callbacks):
        trainer.add_callback(TrialCallback(trial, metric))
    trainer.train()


def fit_made(trial: Trial, made: Trainer) -> None:
    fit(made, trial)


def both_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of ``trainer.evaluate()`` under two names, such as ``accuracy`` and ``eval_accuracy``.

    For the test split, call ``trial.test(lambda: both_names(trainer.evaluate(test_data)))``.
    """
    kept = {bare: value for name, value in metrics.items() if (bare := name.removeprefix(PREFIX)) not in NO_METRICS}
    return {**kept, **{PREFIX + name: value for name, value in kept.items()}}


def _what_ended(args: TrainingArguments) -> str:
    if args.max_steps == MOST_STEPS:
        return "a callback of the Trainer, or the end of its data"
    bound = f"max_steps={args.max_steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"
    return f"{bound} of the Trainer, or one of its callbacks"


MOST_STEPS = 10**9  # ``max_steps`` when the search ends the trial

# ``max_steps`` of a look if the user sets ``max_steps``; without a length of the data, the Trainer runs through all
# remaining steps after each pass (1 µs per step), and timing takes far fewer steps
LOOK_STEPS = 10**5

# schedules whose learning rate does not depend on ``max_steps``
ENDLESS_SCHEDULES = {"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"}

# training argument by study parameter
RENAMED = {
    "weight_decay": "weight_decay",
    "label_smoothing": "label_smoothing_factor",
    "warmup_steps": "warmup_steps",
    "clip_norm": "max_grad_norm",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "epsilon": "adam_epsilon",
}

FILLED = "_filled_for_trial"  # marks the arguments that `training_arguments` made


def training_arguments(
    trial: Trial,
    *,
    train_samples: int | None = None,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    **own: Any,
) -> TrainingArguments:
    """Make a Trainer's arguments for a trial.

    The trial sets the batch sizes, the learning rate, the seed and the study's hyperparameters. If neither
    ``max_steps`` nor ``num_train_epochs`` is given, the default schedule is constant after warmup, and the search ends
    the trial.

    Args:
        train_samples: Required if the study sets ``warmup_epochs``.
        arguments_class: The class to create, such as ``Seq2SeqTrainingArguments``.

    Raises:
        UsageError: If an argument contradicts the trial or needs ``max_steps``, or no argument can express the study's
            optimizer or schedule.
    """
    given = {**_lacking(trial, train_samples, own, is_new=True), **own}
    if trial.device == "cpu" and not own.get("use_cpu"):
        given["use_cpu"] = True
    if trial.is_look:
        given["max_steps"] = _steps_of_look(own)
    made = arguments_class(**given)
    if made.n_gpu > 1:
        made._n_gpu = 1  # a trial has one device
    setattr(made, FILLED, True)
    return made


def fill(arguments: TrainingArguments, trial: Trial, train_samples: int | None) -> None:
    """Replace default arguments, unless `training_arguments` made ``arguments``."""
    if hasattr(arguments, FILLED):
        return
    values = ((field.name, getattr(arguments, field.name), field.default) for field in dataclasses.fields(arguments))
    own = {name: value for name, value, default in values if value != default}
    for name, value in _lacking(trial, train_samples, own, is_new=False).items():
        if name not in own:
            now = getattr(arguments, name)
            setattr(arguments, name, type(now)(value) if isinstance(now, Enum) else value)
    if trial.is_look:
        arguments.max_steps = _steps_of_look(own)


def _steps_of_look(own: Mapping[str, Any]) -> int:
    return LOOK_STEPS if own.get("max_steps", -1) > 0 else MOST_STEPS


def _lacking(trial: Trial, train_samples: int | None, own: Mapping[str, Any], *, is_new: bool) -> dict[str, Any]:
    decided = decided_by(trial, train_samples)
    _check_obeys(trial, own)
    for name, value in decided.items():
        if name in own:
            _check_agrees(name, own[name], value)
    has_horizon = own.get("max_steps", -1) > 0 or "num_train_epochs" in own
    found: dict[str, Any] = {"logging_nan_inf_filter": False, "save_strategy": "no"}
    if is_new:
        found |= {"report_to": "none", **({"disable_tqdm": True} if trial.is_searched else {})}
    if not has_horizon:
        found |= {
            "lr_scheduler_type": "constant_with_warmup",
            **({"max_steps": MOST_STEPS} if trial.is_searched else {}),
        }
        given = {**found, **decided, **own}
        schedule, warmup = given["lr_scheduler_type"], given.get("warmup_steps") or 0
        schedule = getattr(schedule, "value", schedule)
        require(
            schedule in ENDLESS_SCHEDULES,
            f"lr_scheduler_type={schedule!r} decays over max_steps, but max_steps is missing",
            hint=f"give max_steps=..., or choose from {', '.join(sorted(ENDLESS_SCHEDULES))}",
        )
        require(
            not 0 < warmup < 1,
            f"warmup_steps={warmup} is a share of max_steps, but max_steps is missing",
            hint="give warmup_steps as a number of steps, or give max_steps=...",
        )
    return {**found, **decided}


def check(arguments: TrainingArguments, trial: Trial) -> None:
    for name, value in _of_steps(trial).items():
        _check_agrees(name, getattr(arguments, name), value)
    require(
        arguments.n_gpu <= 1,
        f"the Trainer shares each batch among {arguments.n_gpu} GPUs; each process of a trial has one GPU",
        hint="use args = training_arguments(trial, output_dir=...), or set CUDA_VISIBLE_DEVICES=0",
    )
    trial.check_device(
        arguments.device,
        arguments.world_size,
        "with use_cpu=True, set executor: {device: cpu} in the spec; otherwise set CUDA_VISIBLE_DEVICES",
    )


def decided_by(trial: Trial, train_samples: int | None) -> dict[str, Any]:
    """Return the arguments that a trial sets.

    Raises `UsageError` if the trial needs ``train_samples``, but the value is None.
    """
    parameters = trial.parameters
    found = {**_of_steps(trial), **{its: parameters[name] for name, its in RENAMED.items() if name in parameters}}
    if parameters.get("warmup_epochs"):
        samples = required(
            train_samples,
            f"warmup_epochs = {parameters['warmup_epochs']} needs the number of training samples",
            hint="call training_arguments(trial, train_samples=len(train_data), ...)",
        )
        found["warmup_steps"] = warmup_steps(float(str(parameters["warmup_epochs"])), samples, trial.batch_size)
    return {**found, **_of_optimizer(parameters)}


def _of_steps(trial: Trial) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": trial.micro_batch_size,
        "gradient_accumulation_steps": trial.accumulation_steps,
        "learning_rate": trial.rate_to_set,
        "seed": trial.seed,
        "auto_find_batch_size": False,
        "eval_strategy": "no",
    }


def _of_optimizer(parameters: Mapping[str, Any]) -> dict[str, Any]:
    if parameters.get("optimizer") == "adamw":
        return {"optim": TrainingArguments.default_optim}
    if parameters.get("optimizer") != "sgd":
        return {}
    options = [f"{name}={parameters[name]}".lower() for name in ("momentum", "nesterov") if name in parameters]
    return {"optim": "sgd", **({"optim_args": ",".join(options)} if options else {})}


def _check_obeys(trial: Trial, own: Collection[str]) -> None:
    for name, known, argument in (
        ("optimizer", ("adamw", "sgd"), "optim"),
        ("schedule", ("constant",), "lr_scheduler_type"),
    ):
        value = trial.parameters.get(name)
        require(
            value is None or value in known or argument in own,
            f"space.{name}: bssearch cannot set {value} on a Trainer; choose from {', '.join(known)}",
            hint=f"leave {name} out of the space, or also give {argument}=...",
        )


def _check_agrees(name: str, given: Any, value: Any) -> None:
    text = str(getattr(given, "value", given))
    is_adamw = name == "optim" and text.startswith("adamw") and value == TrainingArguments.default_optim
    require(
        given == value or is_adamw,
        f"{name}={text} contradicts the trial, which sets {value}",
        hint=f"leave {name} out of training_arguments(trial, output_dir=...), which sets {name}",
    )


def whole_steps(loader: Any, arguments: TrainingArguments) -> float:
    """Count the whole steps in a pass over a loader.

    Returns infinity if the loader has no length. Raises `UsageError` if a pass has no whole step, or if bssearch must
    repeat a loader without a length.
    """
    accumulation = arguments.gradient_accumulation_steps
    size = arguments.per_device_train_batch_size * accumulation * max(1, arguments.world_size)
    if not has_length(loader):
        require(
            arguments.max_steps < MOST_STEPS,
            "the training data has no length, but a trial repeats its data",
            hint="use data with a length, or endless data with max_steps=...",
        )
        return math.inf
    micro_batches = len(loader)
    rows = len(getattr(loader.batch_sampler, "sampler", loader.dataset))
    steps: int = min(micro_batches // accumulation, rows // size)
    require(
        steps >= 1,
        f"a pass has {rows} samples (micro-batches: {micro_batches}), too few for a step of {size} samples "
        f"(micro-batches: {accumulation})",
        hint=FEWER_SAMPLES,
    )
    return steps


LEAST_CHANGE = 1e-3  # least relative change of a loss whose item count doubles, because a correct loss halves


def check_counts_items(model: torch.nn.Module) -> Callable[[], None]:
    """Check the model's next loss. Returns a function that cancels the check.

    The forward pass raises `UsageError` if the loss ignores ``num_items_in_batch``, a step's number of items.
    """

    def look(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        items = given.get("num_items_in_batch")
        if items is None or not isinstance(output, Mapping) or output.get("loss") is None:
            return
        handle.remove()
        counts = ({**given, "num_items_in_batch": times * items} for times in (1, 2))
        with torch.no_grad():
            once, twice = (float(unmoved(partial(module, *args, **one))["loss"]) for one in counts)
        require(
            abs(once - twice) > LEAST_CHANGE * abs(once),
            f"the loss of {type(module).__name__} ignores num_items_in_batch: with n micro-batches per step, "
            "the gradients would be n times too large",
            hint="set model.accepts_loss_kwargs = False before making the Trainer, which then divides the loss",
        )

    handle = model.register_forward_hook(look, with_kwargs=True)
    return handle.remove
