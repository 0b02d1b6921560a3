"""The workload protocol, and the resolution of a spec's ``workload`` string.

The string is a shipped name (``digits``), an import path (``package.module:MyWorkload``), or a file
(``folder/file.py:MyWorkload``) relative to the spec's folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from bssearch.errors import UsageError, WorkloadError, remedy_of, require
from bssearch.records import Configuration, MetricInfo

if TYPE_CHECKING:
    import torch

    from bssearch.workloads.data import Data, Part


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One optimizer step for ``training_step(step)``, which runs forward, backward and update.

    ``micro_batches`` gives ``accumulation_steps`` augmented pairs (inputs, targets) on the device; use all pairs.
    ``optimizers`` is the result of ``build_optimizer``, or bssearch's optimizer; learning rates are set and gradients
    cleared. ``number`` counts steps from 0. Autocast is on if the precision requires autocast.

    ``backward(loss)`` adds the gradient of a scalar loss, scaled for fp16; divide the loss by ``accumulation_steps``
    first. ``update(optimizer)`` unscales fp16 gradients, clips to ``clip_norm`` and steps; ``optimizer.step()`` only
    steps.

    ::

        def training_step(self, step: bssearch.TrainingStep):
            for inputs, targets in step.micro_batches:
                loss = cross_entropy(step.model(inputs), targets) / step.accumulation_steps
                step.backward(loss)
            step.update(step.optimizers)
            return loss * step.accumulation_steps
    """

    model: torch.nn.Module
    optimizers: Any
    configuration: Configuration
    number: int
    micro_batches: Iterator[tuple[Any, Any]]
    backward: Callable[[torch.Tensor], None]
    update: Callable[[torch.optim.Optimizer], None]

    @property
    def accumulation_steps(self) -> int:
        """The number of micro-batches."""
        return self.configuration.accumulation_steps


SHIPPED = {
    "char_lm": "bssearch.workloads.char_lm:CharLM",
    "digits": "bssearch.workloads.digits:Digits",
    "fashion_mnist": "bssearch.workloads.fashion_mnist:FashionMnist",
    "finetune": "bssearch.workloads.finetune:FineTune",
    "vit_tiny": "bssearch.workloads.vit_tiny:VitTiny",
}

MAIN = "__main__"  # module of code that no other process can load: a notebook or the running script


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """The training loss over samples of unequal weight, such as sequences of different lengths.

    ``total`` is the scalar sum of losses over a (micro-)batch, and ``weight`` the batch's tokens or another weight. A
    batch's loss is the sum of totals over the sum of weights. Zero weight gives NaN, which ends the trial.

    Example: ``bssearch.WeightedLoss(total=losses.sum(), weight=mask.sum())``
    """

    total: torch.Tensor
    weight: torch.Tensor | float


BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Workload(Protocol):
    """One training problem: data, model, loss and metrics.

    A sample is one row of ``inputs`` and ``targets``: a tensor, or nested dicts, lists and tuples of tensors. ``load``
    may also return samples to collate; ``loss``, ``augment`` and ``part.chunks`` then use collated batches.

    Optional members:

    * ``collate(samples: list) -> tuple[inputs, targets]`` makes a batch in the loader processes. The default is
      PyTorch's ``default_collate``. A returned mapping or tensor holds only inputs.
    * ``train_batches(batch_size: int, seed: int) -> Iterable[tuple[inputs, targets]]`` makes an epoch's training
      batches, from an ``IterableDataset`` or your ``DataLoader``. ``batch_size`` is the micro-batch size; ``seed``
      changes with the epoch. The first tensor must have ``batch_size`` rows. bssearch drops a smaller last batch.
    * ``train_samples: int``: samples per epoch of ``train_batches`` if ``load().train`` has no length.
    * ``build_optimizer(model: Module, configuration: Configuration) -> Optimizer`` returns one optimizer, or a tuple,
      list or dict of optimizers, at ``configuration.learning_rate``. The schedule multiplies each group's initial rate.
    * ``build_schedule(configuration, steps_per_epoch: int) -> Callable[[int], float]`` replaces warmup and schedule by
      a pure function from the step (from 0) to the rate's factor. ``horizon_samples`` in ``configuration.parameters``
      still ends the trial.
    * ``training_step(step: TrainingStep) -> Tensor`` replaces ``loss`` by a whole optimizer step, and returns the
      loss to log. bssearch then measures no gradient noise scale.
    * ``tokens_per_sample: int``: predicted tokens per training sample.
    * ``sample_tokens: Sequence[int]``: tokens of each training sample, for ``training.batch_unit: tokens``. ``loss``
      then returns a `WeightedLoss`, which divides a batch's summed losses by the batch's tokens.
    * ``augment(inputs) -> inputs`` changes each training micro-batch on the device, within train seconds. For all
      samples at once, draw numbers from PyTorch's global generators on the inputs' device. The trial seeds these
      generators. Parameters under ``space.augmentation`` are keywords.
    * ``checkpointed_modules(model: Module) -> Sequence[Module]``: modules to recompute in the backward pass, under
      ``activation_checkpointing``.

    ::

        class Task(bssearch.Workload):
            metrics = {"accuracy": bssearch.MetricInfo(low=0.0, high=1.0)}

            def load(self, device):
                return bssearch.Data(train=make_part(0), validation=make_part(1), test=make_part(2))

            def build_model(self, *, dropout):
                return torch.nn.Linear(64, 10)

            def loss(self, model, inputs, targets, *, label_smoothing):
                return cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

            def evaluate(self, model, part):
                return {"accuracy": accuracy(model, part)}
    """

    metrics: Mapping[str, MetricInfo]
    """The metrics of `evaluate`, with bounds and the value of guessing; `load` may refine the metrics."""

    def load(self, device: torch.device) -> Data:
        """Return three parts on ``device`` (the CPU), independent of any seed; each worker calls `load` once."""

    def build_model(self, *, dropout: float) -> torch.nn.Module:
        """Return a freshly initialised model on the CPU; bssearch has set the seed.

        Parameters under ``space.model`` are further keywords: ``build_model(dropout=0.1, hidden=64)``.
        """

    def loss(
        self,
        model: torch.nn.Module,
        inputs: Any,
        targets: Any,
        *,
        label_smoothing: float,
    ) -> torch.Tensor | WeightedLoss:
        """Return the mean training loss over a (micro-)batch, a differentiable scalar tensor.

        Return a `WeightedLoss` if samples have unequal weights. Parameters under ``space.loss`` are further keywords.
        """

    def evaluate(self, model: torch.nn.Module, part: Part) -> Mapping[str, float]:
        """Return each metric over a whole part; the model is in evaluation mode, without gradients."""


# methods that take the parameters of a group
TAKES = {"model": "build_model", "loss": "loss", "augmentation": "augment"}


def check_takes(workload: Workload, names: Iterable[str]) -> None:
    """Raise `WorkloadError` if a workload's method lacks a parameter of the space, such as ``model.hidden``."""
    for full in names:
        group, _, name = full.partition(".")
        try:
            signature = inspect.signature(getattr(workload, TAKES[group]))
        except (TypeError, ValueError, AttributeError):  # with training_step(), loss() may be missing
            continue
        kinds = {one.name: one.kind for one in signature.parameters.values()}
        require(
            inspect.Parameter.VAR_KEYWORD in kinds.values() or kinds.get(name) in BY_NAME,
            f"space.{full}: {TAKES[group]}{signature} of the workload has no parameter {name!r}",
            hint=f"give {TAKES[group]}() a keyword {name} or **parameters, or remove {name} from the space",
            error=WorkloadError,
        )


def check_whole(workload: object, *names: str, low: int = 1, high: int | None = None) -> None:
    """Raise `ValueError` unless the named settings are whole numbers within the bounds."""
    for name in names:
        value = getattr(workload, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            bounds = f">= {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name} = {value!r} must be a whole number {bounds}")


METHODS = ("load", "build_model", "loss", "evaluate")


def lies_in_no_file(name: str) -> bool:
    return name.rpartition(":")[0] == MAIN


def resolve(name: str, settings: Mapping[str, Any], folder: Path) -> Workload:
    """Build the workload that a spec names; files are relative to ``folder``."""
    target = SHIPPED.get(name, name)
    location, separator, attribute = target.rpartition(":")
    require(
        separator and location and attribute,
        f"workload {name!r} is neither a shipped workload ({', '.join(sorted(SHIPPED))}) "
        "nor of the form package.module:attribute or path/file.py:attribute",
        hint="name a shipped workload, or a class in a module or a file",
        error=WorkloadError,
    )
    require(
        not lies_in_no_file(name),
        f"workload {name!r} is in a notebook or in the running script, which workers cannot import",
        hint="pass the class to Python, as in bssearch.run_study(spec, bssearch.Launch(workload=MyTask)), or move the "
        "class into a file",
        error=WorkloadError,
    )
    found = found_attribute(target, folder)
    return built(name, found, settings) if callable(found) else whole(name, found)


def found_attribute(name: str, folder: Path) -> Any:
    """Return the object at ``package.module:attribute`` or ``path/file.py:attribute``."""
    location, _, attribute = name.rpartition(":")
    if location.endswith(".py"):
        module = import_file(name, folder / location)
    else:
        place = str(folder.resolve())  # Python resolves a relative entry against the folder of its first use
        if place not in sys.path:
            sys.path.append(place)  # last, so that the folder does not shadow installed packages
        with _imports(name):
            module = importlib.import_module(location)
    try:
        return getattr(module, attribute)
    except AttributeError:
        offered = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))) or "(no public name)"
        raise WorkloadError(f"workload {name!r}: {location} has no {attribute!r}; choose from {offered}") from None


def built(name: str, found: Any, settings: Mapping[str, Any]) -> Workload:
    try:
        made = found(**settings)
    except Exception as error:
        raise WorkloadError(
            f"workload {name!r} cannot be built with workload_settings {dict(settings)}: {_own_line(error)}",
            hint="correct workload_settings or the constructor",
        ) from error
    return whole(name, made)


def whole(name: str, found: object) -> Workload:
    has_step = callable(getattr(found, "training_step", None))
    methods = [method for method in METHODS if not (method == "loss" and has_step)]
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if not isinstance(getattr(found, "metrics", None), Mapping):
        missing.insert(0, "metrics (a mapping of names to MetricInfo)")
    require(
        not missing,
        f"workload {name!r} lacks {', '.join(missing)}",
        hint="add the members; see the documentation of bssearch.Workload",
        error=WorkloadError,
    )
    return cast(Workload, found)


CORRECT = "correct the file, or install the packages that the file imports"

_importing: list[str] = []  # workloads whose modules are being imported


@contextmanager
def _imports(name: str) -> Iterator[None]:
    _importing.append(name)
    try:
        yield
    except Exception as error:
        raise WorkloadError(f"workload {name!r} does not import: {_own_line(error)}", hint=CORRECT) from error
    finally:
        _importing.pop()


def refuse_while_importing() -> None:
    """Raise `UsageError` during the import of a workload's file."""
    # Every worker would run the study.
    if _importing:
        raise UsageError(
            f"the file of workload {_importing[-1]!r} runs a study on import, and every worker imports the file",
            hint='put the code that runs the study under `if __name__ == "__main__":`',
        )


def import_file(name: str, path: Path) -> ModuleType:
    require(
        path.is_file(),
        f"workload {name!r}: no file {path}",
        hint="correct the path, which is relative to the spec's folder",
        error=WorkloadError,
    )
    module_name = f"bssearch_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    with _imports(name):
        spec.loader.exec_module(module)
    return module


def _own_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}{remedy_of(error)}"
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    frames: list[Any] = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else text


def measure(workload: Workload, model: torch.nn.Module, part: Part) -> Mapping[str, Any]:
    """Return metrics over a whole part, and leave the model in training mode."""
    import torch

    model.eval()
    with torch.no_grad():
        metrics = workload.evaluate(model, part)
    model.train()
    require(
        isinstance(metrics, Mapping),
        f"evaluate() returned {type(metrics).__name__}; return a mapping of metrics",
        error=WorkloadError,
    )
    return metrics


def metric_value(workload: Workload, metrics: Mapping[str, Any], metric: str) -> float:
    """Return a metric as a float, possibly NaN."""
    require(
        metric in metrics,
        f"evaluate() returned no metric {metric!r}, only {', '.join(sorted(metrics)) or 'an empty mapping'}",
        hint="return each metric of the workload's metrics, or choose another metric in the target",
        error=WorkloadError,
    )
    try:
        value = float(metrics[metric])
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"evaluate() returned {metrics[metric]!r} as {metric!r}; return a number for each metric"
        ) from error
    info = workload.metrics.get(metric, MetricInfo())
    low, high = -math.inf if info.low is None else info.low, math.inf if info.high is None else info.high
    require(
        not (value < low or value > high),
        f"evaluate() returned {metric} = {value}, outside the declared range [{low}, {high}]; "
        "correct the metric or its MetricInfo",
        error=WorkloadError,
    )
    return value


# name code in these folders by module, because modules are equal on every machine
INSTALLED = frozenset({"site-packages", "dist-packages"})

LONGEST_SETTING = 10_000  # characters of a setting's JSON; longer settings keep only the type


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWorkload:
    """A workload's ``name`` in a spec, and an object's constructor ``settings`` (None: the spec's settings).

    ``in_process`` is the class or object if no other process can load a workload of this name.
    """

    name: str
    settings: dict[str, Any] | None = None
    in_process: Any = None

    @property
    def label(self) -> str:
        return self.name.rpartition(":")[2]


def given_workload(workload: Any, folder: Path) -> GivenWorkload:
    """Name a workload by its file or module; files inside ``folder`` have relative paths.

    An object's attributes give the constructor arguments of equal names. If the arguments do not rebuild an equal
    object, the object itself runs in this process.
    """
    if isinstance(workload, str):
        return GivenWorkload(name=workload)
    require(
        workload is not None and not isinstance(workload, ModuleType),
        f"workload = {workload!r} must be a class, an object or the name of a class or object",
    )
    maker: Any = workload if is_maker(workload) else type(workload)
    settings = None if is_maker(workload) else _settings(workload)
    name = _name(maker, folder)
    try:
        is_rebuilt = settings is None or bool(vars(maker(**settings)) == vars(workload))
    except Exception:  # the user's constructor failed, or values such as tensors do not compare
        is_rebuilt = False
    if name is None or not is_rebuilt:
        return GivenWorkload(name=f"{MAIN}:{maker.__name__}", settings=settings, in_process=workload)
    return GivenWorkload(name=name, settings=settings)


def is_maker(given: object) -> bool:
    return isinstance(given, type) or inspect.isroutine(given)


def made(name: str, given: Any, settings: Mapping[str, Any]) -> Workload:
    return built(name, given, settings) if is_maker(given) else whole(name, given)


def _name(maker: Any, folder: Path) -> str | None:
    attribute = str(maker.__qualname__)
    module = sys.modules.get(maker.__module__)
    if module is None or module.__name__ == MAIN or getattr(module, attribute, None) is not maker:
        return None
    named = f"{module.__name__}:{attribute}"
    if (shipped := next((short for short, long in SHIPPED.items() if long == named), None)) is not None:
        return shipped
    file = Path(getattr(module, "__file__", None) or "")
    is_plain = file.suffix == ".py" and file.name != "__init__.py" and "." not in module.__name__
    if not is_plain or INSTALLED & {*file.parts}:
        return named
    path, folder = file.resolve(), folder.resolve()
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{attribute}"


def _settings(workload: object) -> dict[str, Any]:
    try:
        parameters = inspect.signature(type(workload)).parameters
    except (TypeError, ValueError):
        return {}
    found = {
        name: getattr(workload, name, getattr(workload, f"_{name}", one.empty)) for name, one in parameters.items()
    }
    return {
        name: _as_json(value)
        for name, value in found.items()
        if value is not inspect.Parameter.empty and _as_json(value) != _as_json(parameters[name].default)
    }


def _as_json(value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return kind_of(value)
    return json.loads(text) if len(text) <= LONGEST_SETTING else kind_of(value)


def kind_of(value: object) -> str:
    """Describe a value's type and, if any, shape."""
    if getattr(value, "is_nested", False):
        return f"a nested {type(value).__name__}"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
