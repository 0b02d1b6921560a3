"""The interface of boards, and the masking of secrets."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from bssearch import registry
from bssearch.errors import UsageError
from bssearch.records import ParameterValue
from bssearch.records.text import without_passwords
from bssearch.settings import LOG_VARIABLE
from bssearch.spec import StudySpec

Words = Mapping[str, str]
Parameters = Mapping[str, ParameterValue]
Figures = Mapping[str, float]
# An evaluation: its step, its epoch second (trial start plus train seconds), its figures.
Point = tuple[int, float, Figures]

_SECRET = re.compile(r"passw|passphrase|secret|credential|api[_-]?key|token$", re.IGNORECASE)


class Board(Protocol):
    """Shows one driver's trials, from one thread; a failed call is repeated up to twice."""

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        """Show a study; ``mark`` is unique."""

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        """Show a trial that starts or resumes at an epoch second."""

    def observed(self, number: int, points: Sequence[Point]) -> None:
        """Add evaluations; figures include the metric and ``train_seconds``."""

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        """Show that a trial ended or paused. ``is_elsewhere``: a dead driver had started it."""

    def answered(self, trials: int, words: Words, parameters: Parameters, figures: Figures) -> None:
        """Show the answer; ``words`` has headline, verdict and document (JSON)."""

    def close(self) -> None:
        """Flush; no call follows."""


def masked(value: Any) -> Any:
    """Replace passwords of URLs by ``***``."""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, Mapping):
        return {masked(key): masked(one) for key, one in value.items()}
    return value


def without_secrets(value: Any, name: str = "") -> Any:
    """Replace texts by ``***`` if their key, option or preceding argument names a secret."""
    if isinstance(value, Mapping):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        names = ["", *(one if isinstance(one, str) and one.startswith("-") else "" for one in value)]
        return [without_secrets(one, before or name) for one, before in zip(value, names, strict=False)]
    if not isinstance(value, str):
        return value
    key, equals, _ = value.partition("=")
    if equals and _SECRET.search(key):
        return f"{key}=***"
    return "***" if _SECRET.search(name) and not value.startswith("-") else value


# Distribution of each built-in board, with its minimum version.
LIBRARIES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "tensorboard": ("tensorboard", (2, 12)),
    "mlflow": ("mlflow-skinny", (3,)),
    "wandb": ("wandb", (0, 19, 10)),
}


def boards_of(spec: StudySpec) -> tuple[str, ...]:
    """Return the boards of the spec, then of ``BSSEARCH_LOG``; raise `UsageError`."""
    names = [name.strip() for name in os.environ.get(LOG_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if not registry.is_known("boards", name):
            raise UsageError(f"{LOG_VARIABLE} has {name!r}; choose from {', '.join(registry.names('boards'))}")
    return tuple(dict.fromkeys([*spec.log, *names]))


def check_boards(names: Iterable[str]) -> None:
    """Raise `UsageError` if a built-in board's library is missing or too old; imports none."""
    for name in LIBRARIES.keys() & set(names):
        distribution, oldest = LIBRARIES[name]
        version = next((one.version for one in importlib.metadata.distributions(name=distribution)), "")
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < oldest:
            needed = f"log = {name} needs {distribution} >= {'.'.join(map(str, oldest))}"
            raise UsageError(f"{needed}; {version or 'none'} is installed", hint=f"pip install 'bssearch[{name}]'")
