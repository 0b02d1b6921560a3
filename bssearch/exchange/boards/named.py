"""Which boards a study reports to, and whether their libraries are installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Mapping

from bssearch import registry
from bssearch.errors import UsageError
from bssearch.settings import LOG_VARIABLE
from bssearch.spec import StudySpec

# The distribution that a built-in board needs, and its oldest version.
LIBRARIES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "tensorboard": ("tensorboard", (2, 12)),
    "mlflow": ("mlflow-skinny", (3,)),
    "wandb": ("wandb", (0, 19, 10)),
}


def boards_of(spec: StudySpec) -> tuple[str, ...]:
    """Return the boards that a spec names, then those of ``BSSEARCH_LOG``, each once. Raises `UsageError`."""
    names = [name.strip() for name in os.environ.get(LOG_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if not registry.is_known("boards", name):
            raise UsageError(f"{LOG_VARIABLE} has {name!r}; choose from {', '.join(registry.names('boards'))}")
    return tuple(dict.fromkeys([*spec.log, *names]))


def check_boards(names: Iterable[str]) -> None:
    """Raise `UsageError` if the library of a built-in board is missing or too old. Imports none of them."""
    for name in LIBRARIES.keys() & set(names):
        distribution, oldest = LIBRARIES[name]
        version = next((one.version for one in importlib.metadata.distributions(name=distribution)), "")
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < oldest:
            needed = f"log = {name} needs {distribution} >= {'.'.join(map(str, oldest))}"
            raise UsageError(f"{needed}; {version or 'none'} is installed", hint=f"pip install 'bssearch[{name}]'")
