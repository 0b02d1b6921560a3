"""Which boards a study is reported to, and whether the library of each is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from bssearch.errors import UsageError
from bssearch.settings import LOG_VARIABLE
from bssearch.spec import StudySpec
from bssearch.spec.parts import BOARDS


@dataclass(frozen=True, slots=True)
class Library:
    """What a board stands on: what people call it, its module, its distribution, and the oldest that is tried."""

    called: str
    module: str
    distribution: str
    oldest: tuple[int, ...]


LIBRARIES: Mapping[str, Library] = {
    "tensorboard": Library("TensorBoard", "tensorboard", "tensorboard", (2, 12)),
    "mlflow": Library("MLflow", "mlflow", "mlflow-skinny", (3,)),
    "wandb": Library("Weights & Biases", "wandb", "wandb", (0, 19, 10)),
}
"""The libraries by the board's name."""

TARGETS: Mapping[str, str] = {
    "tensorboard": "bssearch.boards.tensorboard:TensorBoard",
    "mlflow": "bssearch.boards.mlflow:MLflow",
    "wandb": "bssearch.boards.wandb:WeightsAndBiases",
}
"""The class of each board, ``module:attribute``, by name."""


def boards_of(spec: StudySpec) -> tuple[str, ...]:
    """Return the boards that a spec names, then those of ``BSSEARCH_LOG``, each once. Raises `UsageError`."""
    given = [name.strip() for name in os.environ.get(LOG_VARIABLE, "").split(",")]
    names = [name for name in given if name]
    for name in names:
        if name not in BOARDS:
            near = get_close_matches(name.lower(), BOARDS, n=1, cutoff=0.4)
            raise UsageError(
                f"{LOG_VARIABLE} has {name!r}; there are {', '.join(BOARDS)}",
                hint=f"did you mean {near[0]}?" if near else None,
            )
    return tuple(dict.fromkeys([*spec.log, *names]))


def check_boards(names: Iterable[str]) -> None:
    """Raise `UsageError` for a board whose library is not installed, or too old. Imports none of them."""
    for name in names:
        library = LIBRARIES[name]
        oldest = ".".join(map(str, library.oldest))
        hint = f"pip install 'bssearch[{name}]'"
        found = importlib.util.find_spec(library.module)
        # Without an origin it is a folder of that name: a board's own, in the folder of the study.
        if found is None or found.origin is None:
            raise UsageError(f"log = {name} needs {library.called} >= {oldest}, which is not installed", hint=hint)
        version = _version(library.distribution)
        if version is not None and tuple(map(int, re.findall(r"\d+", version)[:3])) < library.oldest:
            raise UsageError(f"log = {name} needs {library.called} >= {oldest}, and {version} is installed", hint=hint)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
