"""The protocol of a workload, and how a spec's ``workload`` string finds one.

A workload is any object with the members of `Workload`. A study names it by

* a shipped name: ``digits``
* an import path: ``my_package.my_module:MyWorkload``
* a file: ``folder/my_file.py:MyWorkload``, relative to the spec's folder

If what the string names can be called (a class, a function), it is called with the spec's ``workload_settings``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration, MetricInfo
from bssearch.workloads.data import Data as Data
from bssearch.workloads.data import Part as Part

if TYPE_CHECKING:
    import torch

# What a workload with a training step of its own is given for each step.


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One optimizer step, for ``training_step(step)``: forward, backward and update are the workload's.

    ``micro_batches`` gives the step's ``accumulation_steps`` pairs (inputs, targets) on the device, augmented, once;
    all of them must be taken. ``optimizers`` is what ``build_optimizer`` returned, else bssearch's own optimizer; their
    learning rates are those of the step, and all gradients are None. ``number`` counts steps from 0. The whole step
    runs under autocast where the precision asks for it.
    """

    model: torch.nn.Module
    optimizers: Any
    configuration: Configuration
    number: int
    micro_batches: Iterator[tuple[Any, Any]]
    _backward: Callable[[torch.Tensor], None]
    _update: Callable[[torch.optim.Optimizer], None]

    @property
    def accumulation_steps(self) -> int:
        """Return the number of micro-batches."""
        return self.configuration.accumulation_steps

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar loss, scaled where fp16 needs it. Divide by the micro-batches beforehand."""
        self._backward(loss)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step: after undoing fp16's scaling, and clipping its gradients to ``clip_norm``, if any.

        An ``optimizer.step()`` of one's own does neither.
        """
        self._update(optimizer)


SHIPPED = {
    "char_lm": "bssearch.workloads.char_lm:CharLM",
    "digits": "bssearch.workloads.digits:Digits",
    "fashion_mnist": "bssearch.workloads.fashion_mnist:FashionMnist",
    "finetune": "bssearch.workloads.finetune:FineTune",
    "vit_tiny": "bssearch.workloads.vit_tiny:VitTiny",
}

MAIN = "__main__"
"""The module of code that lies in no file which another process could load: a notebook, or the script that runs."""


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A training loss whose samples do not all weigh the same, such as sequences of unequal length.

    ``total`` is the sum of the losses over a (micro-)batch, a scalar tensor to be differentiated; ``weight`` is the
    number of tokens (or another weight) behind it, a number or a scalar tensor. A batch's loss is then the sum of its
    micro-batches' totals over the sum of their weights, however the batch is divided. A batch that weighs nothing has
    no loss: it comes out as NaN and ends the trial.
    """

    total: torch.Tensor
    weight: torch.Tensor | float


BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Workload(Protocol):
    """One training problem: data, model, loss and metrics. bssearch does the rest.

    A sample is one row of ``inputs`` and ``targets``: a tensor, or a nesting of dicts, lists and tuples of tensors.
    ``load`` may also return samples to be collated; ``loss``, ``augment`` and ``evaluate`` get what collating made.
    A workload may also have

    * ``collate(samples: list) -> tuple[inputs, targets]``, which makes a batch of samples, such as by padding them; it
      runs in the processes that load data. Without it PyTorch's ``default_collate`` does. What is no pair but a
      mapping or a tensor is the inputs; targets are then None.
    * ``train_batches(batch_size: int, seed: int) -> Iterable[tuple[inputs, targets]]``, which makes the training
      batches itself, for an ``IterableDataset`` or a ``DataLoader`` of its own. It is called once per epoch, with the
      micro-batch size and another seed each time. Each batch must have ``batch_size`` samples, the rows of its first
      tensor; a shorter last one is left out. A paused trial that goes on makes the batches before anew, off the clock.
    * ``train_samples: int``, the samples of an epoch of ``train_batches``, where ``load().train`` is None.
    * ``build_optimizer(model: Module, configuration: Configuration) -> Optimizer``, instead of bssearch's own: one
      optimizer, or a tuple, list or dict of them. The learning rate is ``configuration.learning_rate``; the schedule
      multiplies the rate that each parameter group begins with.
    * ``build_schedule(configuration, steps_per_epoch: int) -> Callable[[int], float]``, instead of bssearch's warm-up
      and schedule: the factor on the learning rate at a step, counted from 0. A pure function. ``horizon_samples`` in
      ``configuration.parameters``, where the space has it, still ends the trial.
    * ``training_step(step: TrainingStep) -> Tensor``, instead of ``loss``: a whole optimizer step of its own, which
      returns the loss to log. The gradient noise scale is not measured then.
    * ``tokens_per_sample: int``, for what is counted in tokens rather than samples: the tokens that one training
      sample predicts. Trials then tell the tokens that they have seen.
    * ``augment(inputs) -> inputs``, called on the inputs of each training micro-batch, on the device and in the time of
      training. Its random numbers come from PyTorch's global generators, which the trial's seed sets; it draws for all
      samples at once, on the device of its inputs. Evaluation sees the inputs as they are.
    * ``checkpointed_modules(model: Module) -> Sequence[Module]``: the parts of the model whose activations may be
      computed again in the backward pass, under the setting ``activation_checkpointing``.
    """

    metrics: Mapping[str, MetricInfo]
    """The metrics that `evaluate` returns, with their bounds and the value that guessing gives.

    Read again after `load`, which may refine bounds that depend on the data, such as chance.
    """

    def load(self, device: torch.device) -> Data:
        """Return the three parts on the device. Called once per worker process; must not depend on a seed.

        The device is the CPU: bssearch itself moves the parts and the model to another one.
        """
        ...

    def build_model(self, *, dropout: float) -> torch.nn.Module:
        """Return a freshly initialised model. Called after the trial's seed is set; bssearch moves it.

        What a spec has under ``space.model`` comes as further keywords: ``build_model(dropout=0.1, hidden=64)``.
        """
        ...

    def loss(
        self,
        model: torch.nn.Module,
        inputs: Any,
        targets: Any,
        *,
        label_smoothing: float,
    ) -> torch.Tensor | WeightedLoss:
        """Return the mean training loss over one (micro-)batch, a scalar tensor to be differentiated.

        Where samples weigh unequally the mean of the micro-batches' means is not the batch's: return a `WeightedLoss`.
        What a spec has under ``space.loss`` comes as further keywords.
        """
        ...

    def evaluate(self, model: torch.nn.Module, part: Part) -> Mapping[str, float]:
        """Return each metric over a whole part. The model is in evaluation mode and gradients are off."""
        ...


TAKES = {"model": "build_model", "loss": "loss"}
"""The method that takes the user's own parameters of each group."""


def check_takes(workload: Workload, names: Iterable[str]) -> None:
    """Raise `WorkloadError` naming the first of own parameters, as ``model.hidden``, that its method does not take.

    A method with ``**parameters`` takes all. Of one that says nothing of what it takes nothing is known before it runs.
    """
    for full in names:
        group, _, name = full.partition(".")
        try:
            signature = inspect.signature(getattr(workload, TAKES[group]))
        except (TypeError, ValueError, AttributeError):  # a training step of the workload's own reads its configuration
            continue
        kinds = {one.name: one.kind for one in signature.parameters.values()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        if not takes_all and kinds.get(name) not in BY_NAME:
            raise WorkloadError(
                f"space.{full}: {TAKES[group]}{signature} of the workload takes no {name!r}",
                hint=f"let {TAKES[group]}() take the keyword {name}, or **parameters for all, or leave it out of the "
                "space",
            )


METHODS = ("load", "build_model", "loss", "evaluate")


def lies_in_no_file(name: str) -> bool:
    """Return whether a workload of this name was a notebook's, or one of the script that ran."""
    return name.rpartition(":")[0] == MAIN


def resolve(name: str, settings: Mapping[str, Any], folder: Path) -> Workload:
    """Return the workload that a spec's string names, built with the spec's settings.

    Relative files are looked up in ``folder``. Raises `WorkloadError` with the user's own error line where the code
    does not import or cannot be built, and with the missing members where it is no workload.
    """
    target = SHIPPED.get(name, name)
    location, separator, attribute = target.rpartition(":")
    if not separator or not location or not attribute:
        raise WorkloadError(
            f"workload {name!r} is neither a shipped workload ({', '.join(sorted(SHIPPED))}) "
            "nor of the form package.module:attribute or path/file.py:attribute"
        )
    if lies_in_no_file(name):
        raise WorkloadError(
            f"workload {name!r} lies in no file: it was defined in a notebook, or in the script that ran",
            hint="give it from there, as in bssearch.run_study(spec, bssearch.Launch(workload=MyTask)), or put it into "
            "a file",
        )
    found = found_attribute(target, folder)
    return built(name, found, settings) if callable(found) else whole(name, found)


def found_attribute(name: str, folder: Path) -> Any:
    """Return what ``package.module:attribute`` or ``path/file.py:attribute`` names.

    Relative files are looked up in ``folder``. Raises `WorkloadError` where it does not import or has no such member.
    """
    location, _, attribute = name.rpartition(":")
    is_file = location.endswith(".py")
    module = import_file(name, folder / location) if is_file else _import_module(name, location, folder)
    try:
        return getattr(module, attribute)
    except AttributeError:
        offered = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))) or "nothing"
        raise WorkloadError(f"workload {name!r}: no {attribute!r} in it; it has {offered}") from None


def built(name: str, found: Any, settings: Mapping[str, Any]) -> Workload:
    """Return the workload that a class or a function makes of settings; raise as `resolve` does."""
    try:
        made = found(**settings)
    except Exception as error:
        raise WorkloadError(
            f"workload {name!r} cannot be built with workload_settings {dict(settings)}: {_own_line(error)}"
        ) from error
    return whole(name, made)


def whole(name: str, found: object) -> Workload:
    """Return an object as a workload; raise `WorkloadError` naming the members that it lacks."""
    has_step = callable(getattr(found, "training_step", None))
    methods = [method for method in METHODS if not (method == "loss" and has_step)]
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if not isinstance(getattr(found, "metrics", None), Mapping):
        missing.insert(0, "metrics (a mapping of names to MetricInfo)")
    if missing:
        raise WorkloadError(
            f"workload {name!r} lacks {', '.join(missing)}",
            hint="bssearch.Workload documents what a workload offers",
        )
    return cast(Workload, found)


_importing: list[str] = []
"""The names of the workloads whose modules this process is importing now."""


@contextmanager
def _noted(name: str) -> Iterator[None]:
    _importing.append(name)
    try:
        yield
    finally:
        _importing.pop()


def refuse_while_importing() -> None:
    """Raise `UsageError` where a workload's own file runs a study as it is imported: its workers would, and theirs."""
    if _importing:
        raise UsageError(
            f"the file of workload {_importing[-1]!r} runs a study when it is imported, as every worker process does",
            hint='put what runs it under `if __name__ == "__main__":`',
        )


def _import_module(name: str, module: str, folder: Path) -> ModuleType:
    place = str(folder.resolve())  # Python reads a relative one against the folder of its first use, whatever follows
    if place not in sys.path:
        sys.path.append(place)  # last: nothing in it stands for an installed package
    try:
        with _noted(name):
            return importlib.import_module(module)
    except Exception as error:
        raise WorkloadError(f"workload {name!r} does not import: {_own_line(error)}") from error


def import_file(name: str, path: Path) -> ModuleType:
    """Return the module of a file; raise `WorkloadError` naming the workload where it is not there or fails."""
    if not path.is_file():
        raise WorkloadError(f"workload {name!r}: no file {path}")
    module_name = f"bssearch_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with _noted(name):
            spec.loader.exec_module(module)
    except Exception as error:
        raise WorkloadError(f"workload {name!r} does not import: {_own_line(error)}") from error
    return module


def _own_line(error: BaseException) -> str:
    """Return the error with the last line of the user's code that led to it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    frames: list[Any] = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else text


# What a workload's ``evaluate`` says of a part, checked.


def measure(workload: Workload, model: torch.nn.Module, part: Part) -> Mapping[str, Any]:
    """Return what a workload's ``evaluate`` says of a whole part, and leave the model in training mode.

    Raises `WorkloadError` where that is no mapping; what is in it `metric_value` checks.
    """
    import torch

    model.eval()
    with torch.no_grad():
        metrics = workload.evaluate(model, part)
    model.train()
    if not isinstance(metrics, Mapping):
        raise WorkloadError(f"evaluate() returned a {type(metrics).__name__}; it must be a mapping of metrics")
    return metrics


def metric_value(workload: Workload, metrics: Mapping[str, Any], metric: str) -> float:
    """Return one of the metrics as a float, which may be NaN.

    Raises `WorkloadError` where it is missing, no number, or outside the bounds that the workload declares.
    """
    if metric not in metrics:
        offered = ", ".join(sorted(metrics)) or "nothing"
        raise WorkloadError(f"evaluate() returned no metric {metric!r}; it offers {offered}")
    try:
        value = float(metrics[metric])
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"evaluate() returned {metrics[metric]!r} as {metric!r}: not a number") from error
    info = workload.metrics.get(metric, MetricInfo())
    if (info.low is not None and value < info.low) or (info.high is not None and value > info.high):
        raise WorkloadError(f"evaluate() returned {metric} = {value:g}, outside the [{info.low}, {info.high}] declared")
    return value
