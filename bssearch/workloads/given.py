"""Workloads given from Python: their stored names, and the processes that can run them.

A class of a notebook or running script is named ``__main__:Class``; its trials run in that process.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bssearch.errors import UsageError
from bssearch.workloads.base import MAIN, SHIPPED, Workload, built, whole
from bssearch.workloads.check_data import kind_of

# code in these folders is named by module, alike on every machine
INSTALLED = frozenset({"site-packages", "dist-packages"})

LONGEST_SETTING = 10_000  # characters of a setting's JSON; of longer ones only the type is stored


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWorkload:
    """A workload's ``name`` in a spec, and an object's constructor ``settings`` (None: the spec's).

    ``in_process`` is the class or object if no other process can load it.
    """

    name: str
    settings: dict[str, Any] | None = None
    in_process: Any = None

    @property
    def label(self) -> str:
        """The class name."""
        return self.name.rpartition(":")[2]


def given_workload(workload: Any, folder: Path) -> GivenWorkload:
    """Name a workload by its file, relative to ``folder`` if inside, or its module.

    Constructor arguments are read from equally named attributes. If they do not rebuild an equal object, the object
    itself runs in this process. Raises `UsageError` for None or a module.
    """
    if isinstance(workload, str):
        return GivenWorkload(name=workload)
    if workload is None or isinstance(workload, ModuleType):
        raise UsageError(f"workload = {workload!r} must be a class, an object or a name of one")
    maker: Any = workload if is_maker(workload) else type(workload)
    settings = None if is_maker(workload) else _settings(workload)
    name = _name(maker, folder)
    if name is None or (settings is not None and not _is_made_by(workload, settings)):
        return GivenWorkload(name=f"{MAIN}:{maker.__name__}", settings=settings, in_process=workload)
    return GivenWorkload(name=name, settings=settings)


def is_of_main(workload: object) -> bool:
    """True if from a notebook or the running script."""
    return type(workload).__module__ == MAIN


def is_maker(given: object) -> bool:
    """True for a class or function."""
    return isinstance(given, type) or inspect.isroutine(given)


def made(name: str, given: Any, settings: Mapping[str, Any]) -> Workload:
    """The given workload, called with settings if callable; raises like `resolve`."""
    return built(name, given, settings) if is_maker(given) else whole(name, given)


def _name(maker: Any, folder: Path) -> str | None:
    attribute = str(maker.__qualname__)
    module = sys.modules.get(maker.__module__)
    if module is None or module.__name__ == MAIN or getattr(module, attribute, None) is not maker:
        return None
    named = f"{module.__name__}:{attribute}"
    shipped = next((short for short, long in SHIPPED.items() if long == named), None)
    if shipped is not None:
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


def _is_made_by(workload: Any, settings: Mapping[str, Any]) -> bool:
    try:
        return bool(vars(type(workload)(**settings)) == vars(workload))
    except Exception:  # the user's own constructor, or values that do not compare, such as tensors
        return False
