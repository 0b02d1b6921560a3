"""What the registry names loads, says what it is and has what its kind is asked for; packages may add to it."""

import getpass
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from bssearch import registry
from bssearch.errors import UsageError
from bssearch.settings import (
    cache_folder,
    checkpoint_folder,
    checkpoint_url,
    packaged_folder,
    presets,
    shipped_studies,
    user_name,
)

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
"""What is asked of the classes of a kind, by name: more than one of them, or the code that takes any, uses each."""

FUNCTIONS = {"importers": "file", "exporters": "name", "probes": "spec"}
"""The kinds that are functions, each with a parameter that all of them take."""

REGISTERED = [(kind, name) for kind, entries in registry.BUILT_IN.items() for name in entries]


def lacks(kind: str, found: Any) -> set[str]:
    """Return what one of a kind lacks of its interface."""
    if kind in FUNCTIONS:
        return {FUNCTIONS[kind]} - set(inspect.signature(found).parameters)
    return {name for name in INTERFACES[kind] if not hasattr(found, name)}


def test_every_kind_has_an_interface() -> None:
    assert set(registry.BUILT_IN) == set(get_args(registry.Kind)) <= {*INTERFACES, *FUNCTIONS}


@pytest.mark.parametrize(("kind", "name"), REGISTERED)
def test_what_is_registered_loads_says_what_it_is_and_has_its_interface(kind: registry.Kind, name: str) -> None:
    if kind == "boards":
        pytest.importorskip(name, reason="the extra of this board is not installed")
    found = registry.load(kind, name)
    assert inspect.getdoc(found), f"{found} has no docstring"
    assert lacks(kind, found) == set()
    assert isinstance(found, type) is (kind in INTERFACES)
    assert not inspect.isabstract(found)
    assert registry.load(kind, name) is found


def test_a_kind_has_no_thing_twice() -> None:
    for kind, entries in registry.BUILT_IN.items():
        assert len(set(entries.values())) == len(entries), kind
        assert registry.names(kind)[: len(entries)] == tuple(entries)


@pytest.mark.parametrize("kind", registry.BUILT_IN)
def test_a_name_that_is_not_known_is_refused_with_those_that_are(kind: registry.Kind) -> None:
    assert not registry.is_known(kind, "no such thing")
    with pytest.raises(UsageError) as caught:
        registry.load(kind, "no such thing")
    assert str(caught.value).startswith(f"{kind.removesuffix('s')} = 'no such thing'")
    assert all(name in str(caught.value) for name in registry.BUILT_IN[kind])


# A package that is installed beside bssearch.

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
patient = beside:Patient

[bssearch.samplers]
dice = beside:Dice

[bssearch.objectives]
joules = beside:Joules

[bssearch.executors]
cluster = beside:Cluster
"""

ADDED: list[tuple[registry.Kind, str, str]] = [
    ("pruners", "patient", "Patient"),
    ("samplers", "dice", "Dice"),
    ("objectives", "joules", "Joules"),
    ("executors", "cluster", "Cluster"),
]

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield what installs a package named ``beside``: a module, and the metadata that pip would write."""

    def install(module: str, entry_points: str) -> None:
        (tmp_path / "beside.py").write_text(module)
        metadata = tmp_path / "beside-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: beside\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()
        registry._installed.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    yield install
    sys.modules.pop("beside", None)
    registry._installed.cache_clear()


@pytest.mark.parametrize(("kind", "name", "attribute"), ADDED)
def test_a_package_adds_to_a_kind_by_an_entry_point(
    install: Install, kind: registry.Kind, name: str, attribute: str
) -> None:
    assert not registry.is_known(kind, name)
    install(PACKAGE, ENTRY_POINTS)
    assert registry.is_known(kind, name)
    assert registry.names(kind) == (*registry.BUILT_IN[kind], name)
    assert "beside" not in sys.modules
    assert registry.load(kind, name).__name__ == attribute
    with pytest.raises(UsageError, match=name):
        registry.load(kind, "no such thing")


def test_a_package_does_not_take_the_name_of_what_is_built_in(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = {**registry.BUILT_IN, "pruners": {"patient": "collections:OrderedDict"}}
    monkeypatch.setattr(registry, "BUILT_IN", built_in)
    install(PACKAGE, ENTRY_POINTS)
    assert registry.names("pruners") == ("patient",)
    assert registry.load("pruners", "patient").__name__ == "OrderedDict"


def test_a_package_that_cannot_be_imported_harms_no_one_who_does_not_ask_for_it(install: Install) -> None:
    install("raise ImportError('no such library')", ENTRY_POINTS)
    assert "patient" in registry.names("pruners")
    assert registry.names("importers") == tuple(registry.BUILT_IN["importers"])
    with pytest.raises(UsageError, match="no such library"):
        registry.load("pruners", "patient")


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(), KeyError("uid not found"), ImportError("pwd")])
def test_a_user_is_called_by_name_and_by_number_where_the_machine_has_no_name(
    monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    assert user_name() == "ada"

    def nobody(error: Exception = error) -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert user_name() == str(os.getuid())


def test_paused_trials_are_kept_where_the_user_says_else_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_packaged_is_found_by_name_and_what_is_not_is_missed() -> None:
    assert packaged_folder("studies").is_dir()
    with pytest.raises(FileNotFoundError):
        packaged_folder("nowhere")
    for found in (presets(), shipped_studies()):
        assert found and all(path.stem == name and path.suffix == ".yaml" for name, path in found.items())
        assert list(found) == sorted(found)
    assert not presets().keys() & shipped_studies().keys()
