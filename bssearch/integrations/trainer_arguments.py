"""The arguments of a Hugging Face Trainer that trains a trial: what the trial decides, and what they lack."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from enum import Enum
from importlib import metadata
from typing import Any

import torch

from bssearch.errors import UsageError
from bssearch.integrations.own_loop import LoopTrial
from bssearch.training.schedule import warmup_steps

EXTRA = "bssearch[transformers]"
LEAST_VERSIONS = {"transformers": (5, 22), "accelerate": (1, 15)}
"""The oldest versions that tests have run: the events of a Trainer and when they come differ in older ones."""


def check_libraries() -> None:
    """Raise `UsageError` where transformers or accelerate is missing or too old; nothing is imported."""
    for name, least in LEAST_VERSIONS.items():
        wanted = f"{name}>={'.'.join(map(str, least))}"
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise UsageError(
                f"{name} is missing: a Trainer as a trial takes {wanted}", hint=f"pip install '{EXTRA}'"
            ) from None
        if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < least:
            raise UsageError(f"{name} {found} is too old: must be {wanted}", hint=f"pip install '{EXTRA}'")


check_libraries()

from transformers import TrainingArguments  # noqa: E402 - what is missing is told first

MOST_STEPS = 10**9
"""``max_steps`` where a search ends the trial: a choice, more than any trial takes."""

ENDLESS_SCHEDULES = {"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"}
"""The schedules whose learning rate at a step does not depend on ``max_steps``."""

RENAMED = {
    "weight_decay": "weight_decay",
    "label_smoothing": "label_smoothing_factor",
    "warmup_steps": "warmup_steps",
    "clip_norm": "max_grad_norm",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "epsilon": "adam_epsilon",
}
"""The parameters of a study that an argument stands for, by the name of that."""

FILLED = "_filled_for_trial"
"""The attribute of arguments that `training_arguments` has made."""


def training_arguments(
    trial: LoopTrial,
    *,
    train_samples: int | None = None,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    **own: Any,
) -> TrainingArguments:
    """Return the arguments of a Trainer that trains a trial: those of the trial, ``own``, and what these leave open.

    The trial decides the sizes of batches, the learning rate, the seed and what its study sets of weight decay, warmup,
    label smoothing, clipping and the optimizer. ``train_samples`` is the number of training samples; it is asked for
    where the study sets ``warmup_epochs``. ``arguments_class`` is the class to make, such as
    ``Seq2SeqTrainingArguments``. Without ``max_steps`` and ``num_train_epochs`` the learning rate is constant after its
    warmup, and the search ends the trial. Raises `UsageError`, naming the argument, for one of ``own`` that contradicts
    the trial or needs ``max_steps``, and for an optimizer or a schedule of the study that no argument stands for.
    """
    decided = decided_by(trial, train_samples)
    _check_obeys(trial, own)
    for name, value in decided.items():
        if name in own:
            _check_agrees(name, own[name], value)
    has_horizon = own.get("max_steps", -1) > 0 or "num_train_epochs" in own
    given = {**_open(trial, has_horizon=has_horizon, is_new=True), **decided, **own}
    if trial.device == "cpu" and not own.get("use_cpu"):
        given["use_cpu"] = True
    if has_horizon and trial.is_look:
        given["max_steps"] = MOST_STEPS
    if not has_horizon:
        _check_needs_no_horizon(given)
    made = arguments_class(**given)
    if made.n_gpu > 1:
        made._n_gpu = 1  # a trial has one device
    setattr(made, FILLED, True)
    return made


def fill(arguments: TrainingArguments, trial: LoopTrial, train_samples: int | None) -> None:
    """Set what arguments that were made without `training_arguments` lack: all that is at its default.

    Raises `UsageError` as `training_arguments` does.
    """
    if hasattr(arguments, FILLED):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    decided = decided_by(trial, train_samples)
    _check_obeys(trial, {name for name, value in defaults.items() if getattr(arguments, name) != value})
    has_horizon = arguments.max_steps > 0 or arguments.num_train_epochs != defaults["num_train_epochs"]
    for name, value in decided.items():
        if getattr(arguments, name) != defaults[name]:
            _check_agrees(name, getattr(arguments, name), value)
    changes = {**_open(trial, has_horizon=has_horizon, is_new=False), **decided}
    if has_horizon and trial.is_look:
        arguments.max_steps = MOST_STEPS
    for name, value in changes.items():
        now = getattr(arguments, name)
        if now == defaults[name]:
            setattr(arguments, name, type(now)(value) if isinstance(now, Enum) else value)
    if not has_horizon:
        _check_needs_no_horizon(vars(arguments))


def check(arguments: TrainingArguments, trial: LoopTrial) -> None:
    """Raise `UsageError` where a Trainer would not train what its trial says, naming the argument."""
    for name, value in _of_steps(trial).items():
        _check_agrees(name, getattr(arguments, name), value)
    if arguments.world_size > 1:
        raise UsageError(f"the Trainer trains in {arguments.world_size} processes; a trial of a Trainer has one")
    if arguments.n_gpu > 1:
        raise UsageError(
            f"the Trainer shares each batch among {arguments.n_gpu} GPUs; a trial has one",
            hint="args = training_arguments(trial, output_dir=...), or CUDA_VISIBLE_DEVICES=0",
        )
    here, wanted = arguments.device, torch.device(trial.device)
    if (here.type, here.index or 0) != (wanted.type, wanted.index or 0):
        raise UsageError(
            f"the Trainer trains on {here}, the trial is one on {wanted}",
            hint="executor: {device: cpu} in the spec with use_cpu=True, CUDA_VISIBLE_DEVICES for another GPU than "
            "the first",
        )


def decided_by(trial: LoopTrial, train_samples: int | None) -> dict[str, Any]:
    """Return the arguments that a trial decides.

    Raises `UsageError` where the study sets ``warmup_epochs`` and the number of training samples is not known.
    """
    parameters = trial.parameters
    found = {**_of_steps(trial), **{its: parameters[name] for name, its in RENAMED.items() if name in parameters}}
    if parameters.get("warmup_epochs"):
        if train_samples is None:
            raise UsageError(
                f"warmup_epochs = {parameters['warmup_epochs']} takes the number of training samples",
                hint="training_arguments(trial, train_samples=len(train_data), ...)",
            )
        found["warmup_steps"] = warmup_steps(float(str(parameters["warmup_epochs"])), train_samples, trial.batch_size)
    return {**found, **_of_optimizer(parameters)}


def _of_steps(trial: LoopTrial) -> dict[str, Any]:
    """Return what makes the Trainer's steps those of the trial, and has it evaluated where the trial says alone."""
    return {
        "per_device_train_batch_size": trial.micro_batch_size,
        "gradient_accumulation_steps": trial.accumulation_steps,
        "learning_rate": trial.learning_rate,
        "seed": trial.seed,
        "auto_find_batch_size": False,
        "eval_strategy": "no",
    }


def _of_optimizer(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's optimizer of a study that sets one; nothing for one that the Trainer does not have."""
    if parameters.get("optimizer") == "adamw":
        return {"optim": TrainingArguments.default_optim}
    if parameters.get("optimizer") != "sgd":
        return {}
    options = [f"{name}={parameters[name]}".lower() for name in ("momentum", "nesterov") if name in parameters]
    return {"optim": "sgd", **({"optim_args": ",".join(options)} if options else {})}


def _open(trial: LoopTrial, *, has_horizon: bool, is_new: bool) -> dict[str, Any]:
    """Return what a Trainer of a trial has where the user says nothing; ``is_new`` before the Trainer is made."""
    found: dict[str, Any] = {"logging_nan_inf_filter": False, "save_strategy": "no"}
    if is_new:
        found |= {"report_to": "none", **({"disable_tqdm": True} if trial.is_searched else {})}
    if not has_horizon:
        found["lr_scheduler_type"] = "constant_with_warmup"
        if trial.is_searched:
            found["max_steps"] = MOST_STEPS
    return found


def _check_obeys(trial: LoopTrial, own: Collection[str]) -> None:
    """Raise `UsageError` for a parameter of the study that no argument stands for, and none of ``own`` is about."""
    optimizer, schedule = trial.parameters.get("optimizer"), trial.parameters.get("schedule")
    for name, value, known, argument in (
        ("optimizer", optimizer, ("adamw", "sgd"), "optim"),
        ("schedule", schedule, ("constant",), "lr_scheduler_type"),
    ):
        if value is not None and value not in known and argument not in own:
            raise UsageError(
                f"space.{name}: {value} has no argument of a Trainer that stands for it; {', '.join(known)} has",
                hint=f"leave {name} out of the space, or give {argument}=... beside it",
            )


def _check_agrees(name: str, given: Any, value: Any) -> None:
    text = str(getattr(given, "value", given))
    if given == value or (name == "optim" and text.startswith("adamw") and value == TrainingArguments.default_optim):
        return
    raise UsageError(
        f"{name}={text} contradicts the trial: must be {value}",
        hint=f"training_arguments(trial, output_dir=...) sets {name}: leave it out",
    )


def _check_needs_no_horizon(given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a schedule that goes by ``max_steps`` where there is none."""
    schedule, warmup = given["lr_scheduler_type"], given.get("warmup_steps") or 0
    schedule = getattr(schedule, "value", schedule)
    if schedule not in ENDLESS_SCHEDULES:
        raise UsageError(
            f"lr_scheduler_type={schedule!r} decays over max_steps, which is not given",
            hint=f"max_steps=..., or one of {', '.join(sorted(ENDLESS_SCHEDULES))}",
        )
    if 0 < warmup < 1:
        raise UsageError(
            f"warmup_steps={warmup} is a share of max_steps, which is not given",
            hint="warmup_steps as a number of steps, or max_steps=...",
        )


def whole_steps(loader: Any, arguments: TrainingArguments) -> float:
    """Return how many steps of whole batches a pass over a loader has; infinite for one without a length.

    Raises `UsageError` where it has not one, and where only the search would end a loader without a length.
    """
    accumulation = arguments.gradient_accumulation_steps
    size = arguments.per_device_train_batch_size * accumulation
    try:
        micro_batches = len(loader)
    except TypeError:
        if arguments.max_steps >= MOST_STEPS:
            raise UsageError(
                "the training data has no length, and a trial goes through its data again and again",
                hint="data with a length, or data without an end and max_steps=...",
            ) from None
        return math.inf
    rows = len(getattr(loader.batch_sampler, "sampler", loader.dataset))
    steps: int = min(micro_batches // accumulation, rows // size)
    if steps < 1:
        raise UsageError(f"batch_size = {size} must be <= {rows}, the number of training samples")
    return steps
