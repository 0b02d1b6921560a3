"""Plug-ins by kind and name, imported on first use.

A plug-in is built in or comes from an entry point of another package::

    [project.entry-points."bssearch.pruners"]
    patient = "my_package.patient:Patient"
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bssearch.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, slots=True)
class Option:
    """The help, bounds and names of a parameter that users can set."""

    help: str
    min: float | None = None
    metavar: str | None = None
    shown_default: str | None = None
    flag: str | None = None  # the command-line name, if different
    label: str | None = None  # the name in a form, if different
    unit: str = ""  # the unit of a number
    choices: Sequence[str] = ()
    variable: str | None = None  # the environment variable that holds the default


T = TypeVar("T")
Kind = Literal["objectives", "pruners", "samplers", "executors", "importers", "logs", "exporters", "probes", "boards"]

# ``module:attribute`` by kind and name.
BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "objectives": {
        "time_to_target": "bssearch.analysis.objectives:TimeToTarget",
        "samples_to_target": "bssearch.analysis.objectives:SamplesToTarget",
        "cost_to_target": "bssearch.analysis.objectives:CostToTarget",
        "energy_to_target": "bssearch.analysis.objectives:EnergyToTarget",
        "metric_in_budget": "bssearch.analysis.objectives:MetricInBudget",
    },
    "pruners": {
        "safe": "bssearch.search.pruners.pace:Safe",
        "balanced": "bssearch.search.pruners.pace:Balanced",
        "fast": "bssearch.search.pruners.pace:Fast",
        "race": "bssearch.search.pruners.pace:Race",
        "cap": "bssearch.search.pruners.base:Cap",
        "median": "bssearch.search.pruners.optuna:Median",
        "asha": "bssearch.search.pruners.optuna:Asha",
        "hyperband": "bssearch.search.pruners.optuna:Hyperband",
        "none": "bssearch.search.pruners.base:Pruner",
    },
    "samplers": {
        "auto": "bssearch.search.samplers.time_model.sampler:TimeModelSampler",
        "tpe": "bssearch.search.samplers.optuna:TPE",
        "gp": "bssearch.search.samplers.optuna:GP",
        "random": "bssearch.search.samplers.optuna:Random",
        "grid": "bssearch.search.samplers.base:Grid",
    },
    "executors": {
        "local": "bssearch.executors.slots:LocalExecutor",
        "inline": "bssearch.executors.inline:InlineExecutor",
        "ray": "bssearch.executors.ray.executor:RayExecutor",
    },
    "importers": {
        "curves": "bssearch.exchange.importers.curves:import_curves",
        "runs": "bssearch.exchange.importers.runs:import_runs",
        "rcp": "bssearch.exchange.importers.rcp:import_rcp",
        "study": "bssearch.exchange.importers.imported_run:import_study",
        "optuna": "bssearch.exchange.importers.optuna_runs:import_optuna",
    },
    "logs": {  # `import curves` reads a folder as the first of these kinds that has a file in the folder
        "lightning": "bssearch.exchange.importers.logs:LIGHTNING",
        "trainer": "bssearch.exchange.importers.logs:TRAINER",
        "ray": "bssearch.exchange.importers.logs:RAY",
        "mlflow": "bssearch.exchange.importers.logs:MLFLOW",
        "mlflow_run": "bssearch.exchange.importers.logs:MLFLOW_RUN",
        "tensorboard": "bssearch.exchange.importers.logs:TENSORBOARD",
        "wandb": "bssearch.exchange.importers.logs:WANDB",
        "zeus": "bssearch.exchange.importers.zeus:ZEUS",
        "slurm": "bssearch.exchange.importers.slurm:SLURM",
    },
    "exporters": {
        "curves": "bssearch.exchange.exporters.exports:export_curves",
        "optuna": "bssearch.exchange.optuna_study:export_to_optuna",
        "csv": "bssearch.exchange.exporters.exports:export_csv",
        "parquet": "bssearch.exchange.exporters.exports:export_parquet",
        "study": "bssearch.exchange.exporters.exports:export_study",
        "spec": "bssearch.exchange.exporters.spec_around:export_spec",
    },
    "probes": {
        "memory": "bssearch.commands.probes:memory",
        "step-time": "bssearch.commands.probes:step_time",
        "noise": "bssearch.commands.probes:noise",
        "branch": "bssearch.commands.branch_probe:branch",
    },
    "boards": {
        "tensorboard": "bssearch.exchange.boards.tensorboard:TensorBoard",
        "mlflow": "bssearch.exchange.boards.mlflow:MLflow",
        "wandb": "bssearch.exchange.boards.wandb:WeightsAndBiases",
    },
}

# Loaders by kind and family; ``optuna:CmaEsSampler`` belongs to the family ``optuna``.
FAMILIES: Mapping[Kind, Mapping[str, str]] = {
    "samplers": {
        "optuna": "bssearch.search.samplers.optuna:optuna_sampler",
        "optunahub": "bssearch.search.samplers.optuna:hub_sampler",
    },
}


@cache
def _installed(kind: Kind) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a slow import, which `bssearch --help` does not need

    return {point.name: point for point in entry_points(group=f"bssearch.{kind}")}


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of a kind's plug-ins, built-in plug-ins first."""
    return tuple(dict.fromkeys([*BUILT_IN[kind], *sorted(_installed(kind))]))


def is_known(kind: Kind, name: str) -> bool:
    """True if a plug-in has this name, or if the name begins with a family, such as ``optuna:``."""
    return name in BUILT_IN[kind] or _family(kind, name) is not None or name in _installed(kind)


def load(kind: Kind, name: str) -> Any:
    """Return the plug-in of this name. Raises `UsageError` if the name is unknown or the plug-in does not load."""
    if name in BUILT_IN[kind]:
        return _attribute(BUILT_IN[kind][name])
    if family := _family(kind, name):
        return _attribute(family)(name.partition(":")[2])
    if name in _installed(kind):
        return _loaded(kind, _installed(kind)[name])
    raise UsageError(f"{kind.removesuffix('s')} = {name!r} is not known; choose from {choices(kind)}")


def load_class(kind: Kind, name: str, base: type[T]) -> type[T]:
    """Return the plug-in of this name. Raises `UsageError` unless the plug-in is a subclass of ``base``."""
    found = load(kind, name)
    if isinstance(found, type) and issubclass(found, base):
        return found
    raise UsageError(
        f"{kind.removesuffix('s')} = {name!r} must be a subclass of {base.__module__}.{base.__qualname__}, "
        f"not {found!r}"
    )


def choices(kind: Kind) -> str:
    return ", ".join([*names(kind), *(f"{family}:NAME" for family in FAMILIES.get(kind, ()))])


def _family(kind: Kind, name: str) -> str | None:
    family, separator, _ = name.partition(":")
    return FAMILIES.get(kind, {}).get(family) if separator else None


def _attribute(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _loaded(kind: Kind, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        name = f"{kind.removesuffix('s')} {point.name}"
        message = f"{name} cannot be loaded from {point.value}: {error}; correct or reinstall the package"
        raise UsageError(message) from error
