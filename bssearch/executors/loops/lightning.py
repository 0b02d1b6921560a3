"""Runs a Lightning `Trainer` as a trial; see `bssearch guide own-training`.

The import raises `UsageError` unless ``lightning`` or ``pytorch_lightning`` has a version >= 2.6.5, < 2.7.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bssearch.errors import UsageError, require
from bssearch.executors.loops.assignment import print_evaluation
from bssearch.executors.loops.following import in_words, rates_of
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.passes import FEWER_SAMPLES
from bssearch.executors.loops.pitfalls import about_order
from bssearch.training.advisor import BatchAdvisor
from bssearch.training.environment import installed_version, numbers_of

OLDEST, BELOW = (2, 6, 5), (2, 7)  # because this module uses private attributes of these versions
PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}  # distribution by module

NEVER = sys.maxsize  # the ``check_val_every_n_epoch`` that disables validation

ENDS_BY_ITSELF = frozenset({"EarlyStopping", "Timer"})
DECIDES_FOR_ITSELF = frozenset(
    {"BatchSizeFinder", "LearningRateFinder", "GradientAccumulationScheduler", "StochasticWeightAveraging"}
)


def library() -> Any:
    """Import Lightning. Raises `UsageError` if the package is missing or the version is unsupported."""
    versions = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BELOW))}"
    extra = "pip install 'bssearch[lightning]'"
    for module in sorted(PACKAGES, key=lambda one: one not in sys.modules):
        name = PACKAGES[module]
        version = installed_version(name)
        if version is not None:
            require(
                OLDEST <= numbers_of(version) < BELOW,
                f"{name} {version} is installed; a trial needs {name}{versions}",
                hint=extra if name == "lightning" else f"pip install '{name}{versions}'",
            )
            return importlib.import_module(module)
    raise UsageError(
        f"the package lightning is missing; a trial with a Lightning Trainer needs lightning{versions}",
        hint=extra,
    )


Callback: Any = library().Callback


class TrialCallback(Callback):  # type: ignore[misc]
    """A callback that runs the fit of a `Trainer` as a trial.

    In a search, the callback:

    - sets ``accumulate_grad_batches`` and runs only due validations, outside the measured time,
    - scales learning rates and weight decays; see `adopt_learning_rate` and `adopt_weight_decay`,
    - drops the incomplete accumulation window of an epoch,
    - stops the fit when the trial ends, even before ``min_steps``.

    Outside a search, the callback prints validation metrics.

    Args:
        metric: The validation metric to report, or None for all metrics.

    Raises:
        UsageError: The script calls ``trial.state``, or the batch grows. The fit has manual optimization, no
            validation, earlier steps, a wrong number of processes, or a wrong device. A callback chooses the batch
            size or the learning rate.
    """

    def __init__(self, trial: Trial, metric: str | None = None) -> None:
        self._trial = trial
        self._metric = metric
        self._steers = trial.is_searched or trial.given.get("evaluate_every") is not None
        self._is_awaited = False
        self._micro_batches = 0
        self._steps = 0
        self._horizon = math.inf
        # the trial's learning rates, or None if the script or a schedule sets the rates
        self._rates: set[float] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._trial.check_trainer("a Lightning Trainer")
        require(
            pl_module.automatic_optimization,
            f"{type(pl_module).__name__}.automatic_optimization = False: a trial needs automatic optimization, because "
            "the Trainer does not count the steps of manual optimization",
            hint='write your own loop; see "A loop of your own" in `bssearch guide own-training`',
        )
        _refuse_what_decides_for_itself(trainer)
        others = [one for one in trainer.callbacks if one is not self]
        if self._trial.is_searched:
            wanted = torch.device(self._trial.device)
            ranks = self._trial.world_size
            devices = ranks if ranks > 1 or wanted.index is None else [wanted.index]
            self._trial.check_device(
                trainer.strategy.root_device,
                trainer.world_size,
                f"pass Trainer(accelerator={wanted.type!r}, devices={devices}), or change executor.device in the spec",
            )
            trainer.accumulate_grad_batches = self._trial.accumulation_steps
            trainer.num_sanity_val_steps = 0
        if self._trial.is_look:
            others = [one for one in others if not ENDS_BY_ITSELF & _kinds(one)]
        trainer.callbacks = [*others, self]  # last, so that other validation hooks take no train time

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the learning rates, and evaluate at step 0 if an evaluation is due."""
        self._steps = trainer.global_step
        require(
            not self._steps or not self._trial.is_searched,
            f"the Trainer begins at step {self._steps}, with the learning rate, schedule and data position of "
            "another run",
            hint="call fit() once, without ckpt_path; load weights before fit(), and an optimizer's state by "
            "trial.load_optimizer() in configure_optimizers()",
        )
        self._trial.count_steps_of({type(one).__name__: one for one in trainer.optimizers})
        self._trial.look_at({type(pl_module).__name__: pl_module})
        if (unshuffled := about_order(trainer.train_dataloader)) is not None:
            self._trial.warn(unshuffled)
        if self._trial.is_searched:
            sets_rates = not self._trial.has_asked("learning_rate")
            adopt_learning_rate(self._trial, trainer.optimizers, trainer.lr_scheduler_configs)
            adopt_weight_decay(self._trial, trainer.optimizers)
            if sets_rates and not trainer.lr_scheduler_configs:
                self._rates = rates_of(trainer.optimizers, "lr")
        if self._trial.is_look:
            self._lift_limits(trainer)
        if self._steers:
            limit = trainer.limit_val_batches
            require(
                limit > 0,
                f"the Trainer cannot validate: limit_val_batches = {limit} must be > 0",
                hint="leave limit_val_batches out",
            )
            require(
                trainer.enable_validation,
                "the Trainer cannot validate: the module has no validation_step, or the fit has no validation loader",
                hint="define validation_step, and call trainer.fit(module, train_loader, validation_loader)",
            )
            self._plan(trainer)
            if self._is_awaited:
                # The Trainer has no hook for step 0.
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True
        self._end_if_over(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop the epoch's incomplete accumulation window. Raises `UsageError` if no window is complete."""
        batches, window = trainer.fit_loop.max_batches, self._trial.accumulation_steps
        if not self._trial.is_searched or not math.isfinite(batches):
            return
        require(
            batches >= window,
            f"an epoch has {batches} micro-batches of {self._trial.micro_batch_size} samples, fewer than the {window} "
            f"micro-batches of a step at batch size {self._trial.batch_size}",
            hint=FEWER_SAMPLES,
        )
        trainer.fit_loop.max_batches = int(batches) - int(batches) % window

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check for a missed evaluation and a wrong first micro-batch size."""
        require(
            not self._is_awaited,
            f"validation ran no batch after step {self._trial.steps}, although an evaluation was due",
            hint="use a validation loader with at least one batch",
        )
        if self._trial.is_searched and self._trial.steps == 0 and self._micro_batches == 0:
            self._trial.check_size(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count an optimizer step, and plan a due validation.

        Raises `UsageError` if the module changes the trial's learning rates.
        """
        self._micro_batches += 1
        self._trial.add_samples(self._trial.samples_in(batch) if outputs else 0)  # a step may skip a batch
        step = trainer.global_step
        if step == self._steps:
            return
        self._steps = step
        window, self._micro_batches = self._micro_batches, 0
        if self._trial.is_searched and window < self._trial.accumulation_steps:
            self._trial.warn(
                f"the loader has no length, so the last step took {window} micro-batches instead of "
                f"{self._trial.accumulation_steps}; use a loader with a length"
            )
        rates = rates_of(trainer.optimizers, "lr")
        if self._rates is not None and rates != self._rates:
            raise UsageError(
                f"{type(pl_module).__name__} sets the learning rate {in_words(rates)} after step {step}; "
                f"the trial sets {in_words(self._rates)}",
                hint="set multiples of trial.learning_rate, or return a schedule from configure_optimizers",
            )
        self._trial.stepped()
        if self._steers:
            self._plan(trainer)
        if step >= self._horizon:
            trainer.lr_scheduler_configs.clear()
        self._end_if_over(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report a due validation's metrics, or print metrics outside a search."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = self._logged(trainer)
        if not self._steers:
            print_evaluation(self._trial.steps, metrics)
        elif self._is_awaited:
            self._is_awaited = False
            trainer.check_val_every_n_epoch = NEVER  # the next micro-batch may complete no step
            self._trial.report_all(metrics)
        self._end_if_over(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._trial.is_over:
            self._trial.close(_why_it_ended(trainer))

    on_fit_end = on_train_end  # Lightning calls only on_fit_end if training did not begin

    def _plan(self, trainer: Any) -> None:
        self._is_awaited = self._trial.evaluation_due
        trainer.val_check_interval, trainer.val_check_batch, trainer._val_check_time_interval = 1.0, 1, None
        trainer.check_val_every_n_epoch = None if self._is_awaited else NEVER

    def _end_if_over(self, trainer: Any) -> None:
        if self._trial.is_over:
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    def _lift_limits(self, trainer: Any) -> None:
        self._horizon = trainer.estimated_stepping_batches  # step at which learning-rate schedules stop
        given = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        if limits := ", ".join(f"{name}={value}" for name, value in given.items() if value not in {-1, None}):
            self._trial.warn(
                f"Trainer({limits}) ends trials at this limit, even before the target; raise the limit if necessary"
            )
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1

    def _logged(self, trainer: Any) -> dict[str, float]:
        # `Trainer.callback_metrics` also holds training metrics.
        logged = trainer._logger_connector.metrics["callback"].items()
        # each rank validates a share
        found = {name: float(trainer.strategy.reduce(value, reduce_op="mean")) for name, value in logged}
        require(
            self._metric is None or self._metric in found,
            f"TrialCallback has metric = {self._metric!r}, but validation logs "
            f"{', '.join(sorted(found)) or 'no metric'}",
            hint=f"call self.log({self._metric!r}, ...) in validation_step, or name another metric",
        )
        return found if self._metric is None else {self._metric: found[self._metric]}


class AdvisorCallback(Callback):  # type: ignore[misc]
    """A callback that measures the gradient noise scale of any fit and prints `BatchAdvisor`'s report at the end.

    Args:
        batch_size: Samples per optimizer step, of all processes and micro-batches together.
    """

    advisor: BatchAdvisor

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.advisor = BatchAdvisor(pl_module, self._batch_size, optimizer=trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if optimizer is trainer.optimizers[0]:
            self.advisor.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.advisor.close()
        if trainer.is_global_zero:
            print(self.advisor.report())


def fit_made(trial: Trial, made: Any) -> None:
    """Fit ``make_trainer``'s ``(trainer, module[, data])``, with a `TrialCallback`.

    ``data`` is a datamodule, a training loader, or a tuple of loaders.
    """
    require(
        isinstance(made, tuple) and len(made) in (2, 3),
        f"make_trainer(trial) returned {type(made).__name__}; expected (trainer, module, data)",
        hint="return a datamodule, or a tuple of the training and validation loaders, as data",
    )
    trainer, module, *data = made
    _refuse_what_decides_for_itself(trainer)  # before a finder's setup, which runs before `TrialCallback.setup`
    if not any(isinstance(one, TrialCallback) for one in trainer.callbacks):
        trainer.callbacks.append(TrialCallback(trial))
    trainer.fit(module, *(data[0] if data and isinstance(data[0], tuple) else data))


def _kinds(callback: Any) -> set[str]:
    # Both Lightning packages have classes of these names.
    return {one.__name__ for one in type(callback).__mro__}


def _refuse_what_decides_for_itself(trainer: Any) -> None:
    for one in trainer.callbacks:
        require(
            not DECIDES_FOR_ITSELF & _kinds(one),
            f"the Trainer has the callback {type(one).__name__}, but the trial chooses batch sizes and learning rates",
            hint="remove the callback, and calls of Tuner(trainer).scale_batch_size and lr_find",
        )


def _why_it_ended(trainer: Any) -> str:
    if 0 <= trainer.max_steps <= trainer.global_step:
        return f"Trainer(max_steps={trainer.max_steps})"
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.fit_loop.epoch_progress.current.processed:
        return f"Trainer(max_epochs={trainer.max_epochs})"
    if any((one.time_remaining() or 0) <= 0 for one in trainer.callbacks if "Timer" in _kinds(one)):
        return "Trainer(max_time=...)"
    others = ", ".join(type(one).__name__ for one in trainer.callbacks if ENDS_BY_ITSELF & _kinds(one))
    return f"trainer.should_stop = True{others and f', set by {others}'}" if trainer.should_stop else ""


# learning rates in parameter groups of PyTorch's optimizers and schedules
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")

# attributes of PyTorch's schedules, which derive other rates from these attributes
SCHEDULE_RATES = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")

Scale = Callable[[Any], Any]


def adopt_learning_rate(trial: Trial, optimizers: Iterable[Any], schedules: Iterable[Any]) -> None:
    """Multiply every learning rate by the trial's rate divided by the rate given to `current_trial`.

    The rates stay if the script reads ``trial.learning_rate`` or gives no rate.
    """
    given = trial.given.get("learning_rate")
    if given is None or trial.has_asked("learning_rate"):
        return
    require(
        given > 0,
        f"current_trial(): learning_rate = {given} must be > 0, because bssearch scales other rates by this rate",
    )
    scale = scaling(float(given), trial.learning_rate)
    for optimizer in optimizers:
        _scale_groups(optimizer, GROUP_RATES, scale)
    for one in schedules:
        _scale_schedule(one.scheduler, scale)


def adopt_weight_decay(trial: Trial, optimizers: Iterable[Any]) -> None:
    """Scale all weight decays if the study sets a ``weight_decay`` that the script has not read.

    The scaling maps the value given to `current_trial`, or else the largest weight decay, to the trial's value.
    """
    name = "weight_decay"
    found = list(optimizers)
    largest = max((float(group.get(name) or 0.0) for one in found for group in one.param_groups), default=0.0)
    if name not in trial.parameters or trial.has_asked(name) or not largest:
        return
    scale = scaling(float(trial.given.get(name) or largest), float(str(trial.parameters[name])))
    for optimizer in found:
        _scale_groups(optimizer, (name,), scale)


def scaling(given: float, wanted: float) -> Scale:
    """Return a function that multiplies by ``wanted / given`` and maps ``given`` to exactly ``wanted``."""
    return lambda value: wanted if value == given else value * (wanted / given)


def _scale_groups(optimizer: Any, names: Iterable[str], scale: Scale) -> None:
    for group in optimizer.param_groups:
        for name in names:
            if group.get(name):
                group[name] = scale(group[name])


def _scale_schedule(schedule: Any, scale: Scale) -> None:
    for name in SCHEDULE_RATES:
        value = getattr(schedule, name, None)
        if isinstance(value, list):
            setattr(schedule, name, [scale(one) for one in value])
        elif value:
            setattr(schedule, name, scale(value))
    for part in getattr(schedule, "_schedulers", ()):
        _scale_schedule(part, scale)
