"""Packages installed beside bssearch for a test."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from bssearch import registry


@contextmanager
def installed(site: Path, package: str, modules: Mapping[str, str], entry_points: str) -> Iterator[None]:
    """Put a package on the path of this process, with the metadata that pip writes."""
    folder, info = site / package, site / f"{package}-1.0.dist-info"
    folder.mkdir(parents=True)
    info.mkdir()
    for name, code in {"__init__": "", **modules}.items():
        (folder / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        importlib.invalidate_caches()
        registry._installed.cache_clear()
        yield
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        del sys.modules[name]
    registry._installed.cache_clear()
