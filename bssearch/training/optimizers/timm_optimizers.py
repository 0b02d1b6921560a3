"""LAMB and LARS, which are timm's: an optional library."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterable
from types import ModuleType

from bssearch.errors import LaunchError

OF_TIMM = ("lamb", "lars")
"""The optimizers that need timm."""

OLDEST = (1, 0, 13)
"""The oldest version of timm that bssearch is tried with."""


def check_timm(names: Iterable[str]) -> None:
    """Import timm where one of the optimizers needs it. Raises `LaunchError` where it is missing or too old."""
    needing = [name for name in names if name in OF_TIMM]
    if needing:
        timm_optimizers(needing[0])


def timm_optimizers(name: str) -> ModuleType:
    """Return ``timm.optim``, for the optimizer of that name. Raises `LaunchError` where it is missing or too old."""
    oldest = ".".join(map(str, OLDEST))
    hint = "pip install 'bssearch[optimizers]'"
    try:
        version = importlib.metadata.version("timm")
        optimizers = importlib.import_module("timm.optim")
    except (ImportError, RuntimeError, OSError) as error:  # its torchvision may be of another PyTorch
        message = f"optimizer = {name!r} needs timm >= {oldest}, which cannot be imported: {error}"
        raise LaunchError(message, hint=hint) from error
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise LaunchError(f"optimizer = {name!r} needs timm >= {oldest}, and {version} is installed", hint=hint)
    return optimizers
