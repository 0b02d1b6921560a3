import ast
import getpass
import graphlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

import bssearch
from bssearch import UsageError, errors, registry
from bssearch.settings import (
    cache_folder,
    checkpoint_folder,
    checkpoint_url,
    packaged_folder,
    presets,
    shipped_studies,
    user_name,
)
from tests.cli.task import write_task
from tests.documents import ROOT
from tests.factories import SPEC, not_none
from tests.packages import installed
from tests.search.law import LawExecutor


def test_all_is_sorted_and_every_name_resolves() -> None:
    assert bssearch.__all__ == sorted(bssearch.__all__)
    assert dir(bssearch) == bssearch.__all__
    assert [name for name in bssearch.__all__ if getattr(bssearch, name) is None] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = bssearch.no_such_name


def test_every_error_is_public_and_in_the_map() -> None:
    found = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert found <= set(bssearch.__all__)
    assert all(name in not_none(errors.__doc__) for name in found)


def functions_of(name: str) -> Iterator[tuple[str, Any]]:
    """A public function, or a public class's methods."""
    one = getattr(bssearch, name)
    if not isinstance(one, type):
        yield name, one
        return
    for kind in one.__mro__:
        if kind.__module__.startswith("bssearch."):
            for member, value in list(vars(kind).items()):
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if not member.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{member}", function


def examples_in(doc: str) -> list[str]:
    """Code blocks and one-line examples of a docstring."""
    blocks = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", f"{doc}\n")
    lines = re.findall(r"^Example: ``(.*)``$", doc, re.MULTILINE)
    return [textwrap.dedent(one) for one in blocks] + [re.sub("^except", "try: pass\nexcept", one) for one in lines]


@pytest.mark.parametrize("name", bssearch.__all__)
def test_every_public_name_is_typed_and_documented_with_an_example_that_compiles(name: str) -> None:
    for member, function in functions_of(name):
        assert inspect.getdoc(function), member
        signature = inspect.signature(function)
        given = [one.annotation for one in signature.parameters.values() if one.name not in {"self", "cls"}]
        assert inspect.Signature.empty not in [*given, signature.return_annotation], member
    examples = examples_in(inspect.getdoc(getattr(bssearch, name)) or "")
    nodes = [node for tree in [ast.parse(example) for example in examples] for node in ast.walk(tree)]
    used = [one for one in nodes if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "bssearch"]
    imported = [one.name for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]
    assert name in {*imported, *(one.attr for one in used)}
    assert {one.attr for one in used} <= {*bssearch.__all__}
    for call in (one for one in nodes if isinstance(one, ast.Call) and one.func in used):
        keywords = {one.arg: one.value for one in call.keywords if one.arg is not None}
        inspect.signature(getattr(bssearch, call.func.attr)).bind(*call.args, **keywords)  # type: ignore[attr-defined]


def test_a_trial_of_an_own_loop_lists_its_members() -> None:
    trial = bssearch.current_trial(batch_size=8, learning_rate=0.1)
    assert type(trial) is bssearch.Trial
    assert {"batch_size", "batches", "report", "should_stop", "state", "step"} <= set(dir(trial))
    assert not [name for name in dir(trial) if name.startswith(("_", "check_"))]
    assert all(hasattr(trial, name) for name in dir(trial))


FOUND = bssearch.Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))


def test_an_answer_lists_its_fields_and_shows_its_headline() -> None:
    for part in (FOUND, FOUND.optimal):
        assert set(type(part).model_fields) <= set(dir(part))
        assert not [name for name in dir(part) if name.startswith(("_", "model_", "copy", "dict", "json", "parse"))]
    assert {"plot", "frame", "is_predicted", "to_dict"} <= set(dir(FOUND))
    assert FOUND.to_dict() == FOUND.model_dump(mode="json")
    assert repr(FOUND) == str(FOUND) and f"atch {FOUND.optimal.batch_size}" in repr(FOUND)
    assert len(repr(FOUND)) < 500


def test_an_answer_has_a_chart_for_viewers_without_scripts_or_html() -> None:
    bundle = FOUND._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    ElementTree.fromstring(bundle["image/svg+xml"])
    assert "<svg" in bundle["text/html"]
    assert not any(word in text for text in bundle.values() for word in ("<script", "javascript:", " onload="))


def test_a_frame_starts_with_batch_size_time_and_varied_columns() -> None:
    columns = list(FOUND.frame.columns)
    assert columns[:2] == ["batch_size", "time_to_target_s.median"]
    varied = [one for one in columns if one.startswith("best.parameters.") and FOUND.frame[one].nunique() > 1]
    assert varied and set(columns[2 : 2 + len(varied)]) == set(varied)


HEAVY = ("torch", "optuna", "pandas", "sqlalchemy", "scipy", "jinja2", "pydantic")
RUN = "app({}, standalone_mode=False)"
STAGES = [
    ("import bssearch; bssearch.BSSearchError", ()),
    ("from bssearch.cli.app import app; " + RUN.format(["--help"]), ()),
    *((RUN.format([*words, "--help"]), ("pydantic",)) for words in (["report"], ["study", "audit"])),
    ("bssearch.Workload; bssearch.StudySpec", ("pydantic",)),
    *(
        (RUN.format(["import", *words, "--help"]), ("pydantic",))
        for words in ([], ["runs"], ["curves"], ["rcp"], ["optuna"])
    ),
    (
        "[getattr(bssearch, n) for n in bssearch.__all__ if n not in {'BatchAdvisor', "
        "'Data', 'Part', 'Study', 'TimeToTargetSampler', 'Trial', 'current_trial', 'load_optuna_study'}]",
        ("pydantic", "sqlalchemy"),  # the other names hold tensors, train or use Optuna
    ),
]


@pytest.mark.slow
def test_heavy_libraries_are_imported_only_when_needed() -> None:
    watch = f"print('\\nLOADED', *(m for m in {HEAVY!r} if m in sys.modules))"
    code = "\n".join(["import sys", *(f"{code}\n{watch}" for code, _ in STAGES)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert [what for (what, allowed), found in zip(STAGES, loaded, strict=True) if not found <= set(allowed)] == []


def imported_by(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that statements import at run time, outside functions."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (name for one in node.names for name in (f"{node.module}.{one.name}", str(node.module)))
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imported_by(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from imported_by(list(ast.iter_child_nodes(node)))


def test_every_module_can_be_imported_first() -> None:
    package = Path(bssearch.__file__).parent
    imports = {}
    for file in (one for one in package.rglob("*.py") if "templates" not in one.parts):
        name = ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        imports[name] = {*imported_by(ast.parse(file.read_text(encoding="utf-8")).body)} - {name}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the modules that import each other
    assert len(imports) > 200


def test_python_m_is_the_command() -> None:
    words = [sys.executable, "-m", "bssearch"]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"bssearch {version('bssearch')}\n"
    refused = subprocess.run([*words, "run", "no-such-study"], capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    assert refused.stderr.startswith("error: ")


def test_a_study_runs_from_a_dict_and_from_a_file_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = bssearch.Launch(db=f"sqlite:///{tmp_path / 'one.db'}", make_executor=lambda *_: LawExecutor())
    fields = {**SPEC, "budget": {"trials": 5, "trial_train_seconds": 100.0}, "confirm": {"runs": 0}}
    answer = bssearch.run_study(fields, launch)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    write_task(folder)
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []

    def make(spec: bssearch.StudySpec, place: Path) -> LawExecutor:
        seen.append(place)
        return LawExecutor()

    for given in ("elsewhere/task.yaml", folder / "task.yaml"):
        assert bssearch.check(given, replace(launch, make_executor=make)).study == "task"
    assert bssearch.run_study(folder / "task.yaml", replace(launch, make_executor=make)).study == "task"
    assert seen == [folder] * 3
    bssearch.check("digits", replace(launch, make_executor=make, folder=tmp_path))
    assert seen[3] == tmp_path
    assert bssearch.best("toy", db=launch.db) == answer


# Kinds ----------------------------------------------------------------------------------------------------------------


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
