"""A workload given from Python, as a class or an object: the name by which a study keeps it, and who can run it.

Where a worker process can load the code by its name, it does. A class of a notebook or of a script that runs lies in no
file that another process could import: it is named ``__main__:Class``, and trials run in the process that has it.
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

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages: what lies in them is named by its module, on every machine alike."""

LONGEST_SETTING = 10_000
"""Characters of a setting's JSON that are stored as they are, of a longer one its kind: a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWorkload:
    """The code to run: ``name`` as a spec has it, ``settings`` of an object's constructor, None for those of the spec.

    ``in_process`` is the class or the object itself where no other process can load it, else None.
    """

    name: str
    settings: dict[str, Any] | None = None
    in_process: Any = None

    @property
    def label(self) -> str:
        """Return the name of the class for people."""
        return self.name.rpartition(":")[2]


def given_workload(workload: Any, folder: Path) -> GivenWorkload:
    """Return how a study names a workload: a string as it is, code by its file in ``folder``, its file, or its module.

    The arguments of an object's constructor are read from its attributes of the same names. Where these do not make an
    equal object, which is tried once, the object itself is run in this process. Raises `UsageError` for None and for a
    module.
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
    """Return whether an object's class is a notebook's, or one of the script that runs."""
    return type(workload).__module__ == MAIN


def is_maker(given: object) -> bool:
    """Return whether a workload is yet to be made: of a class or by a function."""
    return isinstance(given, type) or inspect.isroutine(given)


def made(name: str, given: Any, settings: Mapping[str, Any]) -> Workload:
    """Return the workload that is given itself, or that its class makes of settings; raise as `resolve` does."""
    return built(name, given, settings) if is_maker(given) else whole(name, given)


def _name(maker: Any, folder: Path) -> str | None:
    """Return the name by which another process loads a class or a function; None where it cannot."""
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
    """Return the arguments of an object's constructor that are not its defaults, as JSON values or as their kinds."""
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
    """Return a value as JSON has it, of another one its kind."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return kind_of(value)
    return json.loads(text) if len(text) <= LONGEST_SETTING else kind_of(value)


def _is_made_by(workload: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether an object's class makes an equal one of the settings."""
    try:
        return bool(vars(type(workload)(**settings)) == vars(workload))
    except Exception:  # the user's own constructor, or values that do not compare, such as tensors
        return False
