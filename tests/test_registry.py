"""Registered plug-ins load, are documented and have their kind's interface; packages may add plug-ins."""

import getpass
import inspect
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest

from bssearch import UsageError, registry
from bssearch.settings import (
    cache_folder,
    checkpoint_folder,
    checkpoint_url,
    packaged_folder,
    presets,
    shipped_studies,
    user_name,
)
from tests.packages import installed

INTERFACES: dict[str, set[str]] = {
    "objectives": {
        "name",
        "noun",
        "axis_title",
        "trials_race",
        "stops_at_target",
        "figure",
        "bound",
        "log",
        "from_log",
    },
    "pruners": {"judge", "next_waiting", "least_promising", "paces_itself", "caps"},
    "samplers": {"choose", "contenders", "ending", "models_time"},
    "executors": {
        "slots_apart",
        "describe",
        "measure_step_time",
        "measure_memory",
        "measure_noise",
        "submit",
        "stop",
        "events",
        "kill",
        "close",
    },
    "boards": {"opened", "started", "observed", "ended", "answered", "close"},
}
"""Members of each kind's interface that more than one class, or the common code, uses."""

FUNCTIONS = {"importers": "file", "logs": "folder", "exporters": "name", "probes": "spec"}
"""Kinds that are functions, each with a parameter that all functions take."""

REGISTERED = [(kind, name) for kind, entries in registry.BUILT_IN.items() for name in entries]


def lacks(kind: str, found: Any) -> set[str]:
    """Missing members of a plug-in's interface."""
    if kind in FUNCTIONS:
        return {FUNCTIONS[kind]} - set(inspect.signature(found).parameters)
    return {name for name in INTERFACES[kind] if not hasattr(found, name)}


def test_every_kind_has_an_interface() -> None:
    assert set(registry.BUILT_IN) == set(get_args(registry.Kind)) <= {*INTERFACES, *FUNCTIONS}


@pytest.mark.parametrize(("kind", "name"), REGISTERED)
def test_a_plug_in_loads_is_documented_and_has_its_interface(kind: registry.Kind, name: str) -> None:
    if kind == "boards":
        pytest.importorskip(name, reason="the extra of this board is not installed")
    found = registry.load(kind, name)
    assert inspect.getdoc(found), f"{found} has no docstring"
    assert lacks(kind, found) == set()
    assert isinstance(found, type) is (kind in INTERFACES)
    assert not inspect.isabstract(found)
    assert registry.load(kind, name) is found


def test_a_kind_has_no_plug_in_twice() -> None:
    for kind, entries in registry.BUILT_IN.items():
        assert len(set(entries.values())) == len(entries), kind
        assert registry.names(kind)[: len(entries)] == tuple(entries)


@pytest.mark.parametrize("kind", registry.BUILT_IN)
def test_an_unknown_name_is_refused_with_the_known_names(kind: registry.Kind) -> None:
    assert not registry.is_known(kind, "no such thing")
    with pytest.raises(UsageError) as caught:
        registry.load(kind, "no such thing")
    assert str(caught.value).startswith(f"{kind.removesuffix('s')} = 'no such thing'")
    assert all(name in str(caught.value) for name in registry.BUILT_IN[kind])


# A package that is installed beside bssearch

PACKAGE = '''
"""One of each kind that other packages add most."""


class Patient:
    """A pruner."""


class Dice:
    """A sampler."""


class Joules:
    """An objective."""


class Cluster:
    """An executor."""
'''

ENTRY_POINTS = """
[bssearch.pruners]
patient = beside.kinds:Patient

[bssearch.samplers]
dice = beside.kinds:Dice

[bssearch.objectives]
joules = beside.kinds:Joules

[bssearch.executors]
cluster = beside.kinds:Cluster
"""

ADDED: list[tuple[registry.Kind, str, str]] = [
    ("pruners", "patient", "Patient"),
    ("samplers", "dice", "Dice"),
    ("objectives", "joules", "Joules"),
    ("executors", "cluster", "Cluster"),
]


def beside(tmp_path: Path, module: str = PACKAGE) -> AbstractContextManager[None]:
    """Install a package named ``beside``."""
    return installed(tmp_path / "site", "beside", {"kinds": module}, ENTRY_POINTS)


@pytest.mark.parametrize(("kind", "name", "attribute"), ADDED)
def test_a_package_adds_to_a_kind_by_an_entry_point(
    tmp_path: Path, kind: registry.Kind, name: str, attribute: str
) -> None:
    assert not registry.is_known(kind, name)
    with beside(tmp_path):
        assert registry.is_known(kind, name)
        assert registry.names(kind) == (*registry.BUILT_IN[kind], name)
        assert "beside" not in sys.modules
        assert registry.load(kind, name).__name__ == attribute
        with pytest.raises(UsageError, match=name):
            registry.load(kind, "no such thing")


def test_a_package_does_not_replace_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = {**registry.BUILT_IN, "pruners": {"patient": "collections:OrderedDict"}}
    monkeypatch.setattr(registry, "BUILT_IN", built_in)
    with beside(tmp_path):
        assert registry.names("pruners") == ("patient",)
        assert registry.load("pruners", "patient").__name__ == "OrderedDict"


def test_a_package_that_cannot_be_imported_fails_only_if_it_is_loaded(tmp_path: Path) -> None:
    with beside(tmp_path, "raise ImportError('no such library')"):
        assert "patient" in registry.names("pruners")
        assert registry.names("importers") == tuple(registry.BUILT_IN["importers"])
        with pytest.raises(UsageError, match="no such library"):
            registry.load("pruners", "patient")


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(), KeyError("uid not found"), ImportError("pwd")])
def test_a_user_without_a_name_is_called_by_number(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=["ada", error]))
    assert (user_name(), user_name()) == ("ada", str(os.getuid()))


def test_paused_trials_are_kept_in_the_users_folder_else_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BSSEARCH_CHECKPOINT_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert checkpoint_folder() == Path("/home/ada/.cache/bssearch/checkpoints")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert checkpoint_folder() == Path("/scratch/bssearch/checkpoints")
    assert cache_folder() == Path("/scratch/bssearch")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert cache_folder() == Path("/home/ada/elsewhere/bssearch")
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", "/here")
    assert (checkpoint_folder(), checkpoint_url()) == (Path("/here"), None)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", "s3://bucket/here")
    assert (checkpoint_folder(), checkpoint_url()) == (
        cache_folder() / "checkpoints-on-their-way",
        "s3://bucket/here",
    )


def test_packaged_folders_are_found_by_name() -> None:
    assert packaged_folder("studies").is_dir()
    with pytest.raises(FileNotFoundError):
        packaged_folder("nowhere")
    for found in (presets(), shipped_studies()):
        assert found and all(path.stem == name and path.suffix == ".yaml" for name, path in found.items())
        assert list(found) == sorted(found)
    assert not presets().keys() & shipped_studies().keys()
