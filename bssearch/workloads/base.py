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
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from bssearch.errors import WorkloadError
from bssearch.records import MetricInfo
from bssearch.workloads.data import Data as Data
from bssearch.workloads.data import Part as Part

if TYPE_CHECKING:
    import torch

SHIPPED = {
    "char_lm": "bssearch.workloads.char_lm:CharLM",
    "digits": "bssearch.workloads.digits:Digits",
    "fashion_mnist": "bssearch.workloads.fashion_mnist:FashionMnist",
}


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
        """Return a freshly initialised model. Called after the trial's seed is set; bssearch moves it."""
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
        """
        ...

    def evaluate(self, model: torch.nn.Module, part: Part) -> Mapping[str, float]:
        """Return each metric over a whole part. The model is in evaluation mode and gradients are off."""
        ...


METHODS = ("load", "build_model", "loss", "evaluate")


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
    is_file = location.endswith(".py")
    module = _import_file(name, folder / location) if is_file else _import_module(name, location, folder)
    try:
        found = getattr(module, attribute)
    except AttributeError:
        offered = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))) or "nothing"
        raise WorkloadError(f"workload {name!r}: no {attribute!r} in it; it has {offered}") from None
    if callable(found):
        try:
            found = found(**settings)
        except Exception as error:
            raise WorkloadError(
                f"workload {name!r} cannot be built with workload_settings {dict(settings)}: {_own_line(error)}"
            ) from error
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


def _import_module(name: str, module: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: nothing in it stands for an installed package
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise WorkloadError(f"workload {name!r} does not import: {_own_line(error)}") from error


def _import_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise WorkloadError(f"workload {name!r}: no file {path}")
    module_name = f"bssearch_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
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
