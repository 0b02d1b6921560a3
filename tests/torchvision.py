"""A stand-in for a missing torchvision, which timm imports but its optimizers do not use."""

import importlib.util
import os
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest


class _Named(type):
    """A class with every member, as of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(ModuleType):
    """A package with a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def import_timm() -> None:
    """Import timm's optimizers, with a temporary stand-in if torchvision does not import.

    Without timm, skip the test unless this is CI.
    """
    if importlib.util.find_spec("timm") is None and "CI" not in os.environ:
        pytest.skip("timm is not installed")
    if "timm.optim" in sys.modules:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm's own
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError, OSError):
            _forget_torchvision()
            with patch.object(sys, "meta_path", [_Finder(), *sys.meta_path]):
                importlib.import_module("timm.optim")
            _forget_torchvision()
        importlib.import_module("timm.optim")


def _forget_torchvision() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
