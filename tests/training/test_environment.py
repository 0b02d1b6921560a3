import hashlib
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bssearch.training.environment import cudnn_version, describe_environment, library_versions, workload_revision
from tests.training import toys
from tests.training.toys import Toy, on_cpu


def test_the_cpu_is_named_with_its_versions() -> None:
    environment = describe_environment(on_cpu())
    assert environment.device_type == "cpu"
    assert environment.device_name and environment.device_name != "cpu"
    assert (environment.device_memory_bytes or 0) > 2**28
    assert environment.torch_version == torch.__version__
    assert environment.driver_version is None
    assert environment.cudnn_version is None
    assert environment.workload_revision is None and environment.git_revision is None
    assert environment.fingerprint.endswith("fp32 · compile none")


def test_precision_and_compile_mode_are_what_the_settings_come_to() -> None:
    computation = on_cpu(precision="bf16", compile="reduce-overhead")
    assert describe_environment(computation).fingerprint.endswith("bf16 · compile reduce-overhead")
    computation.fallback(RuntimeError("no C++ compiler"))
    assert describe_environment(computation).compile_mode == "none"


def test_the_memory_is_the_limit_where_one_is_set() -> None:
    whole = describe_environment(on_cpu()).device_memory_bytes or 0
    assert describe_environment(on_cpu(), memory_limit_bytes=2**20).device_memory_bytes == 2**20
    assert describe_environment(on_cpu(), memory_limit_bytes=2 * whole).device_memory_bytes == whole


@pytest.mark.parametrize(("number", "version"), [(91002, "9.10.2"), (90100, "9.1.0"), (8902, "8.9.2"), (None, None)])
def test_cudnn_has_the_version_that_its_number_says(
    monkeypatch: pytest.MonkeyPatch, number: int | None, version: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert cudnn_version() == version


def test_the_workloads_revision_is_the_digest_of_its_file() -> None:
    digest = hashlib.sha256(Path(toys.__file__).read_bytes()).hexdigest()[:12]
    assert describe_environment(on_cpu(), Toy()).workload_revision == digest
    assert workload_revision(toys) == digest


def test_a_workload_without_a_file_has_no_revision() -> None:
    namespace: dict[str, type] = {}
    exec("class Typed: pass", namespace)
    assert workload_revision(namespace["Typed"]()) is None
    assert workload_revision(object()) is None


class Repository:
    """A git repository with one committed workload file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet")
        self.file = folder / "mine.py"
        self.file.write_text("x = 1\n")
        self.git("add", ".")
        self.git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "One")
        self.commit = self.git("rev-parse", "HEAD")[:12]

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def module_from(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git_revision(workload: object) -> str | None:
    return describe_environment(on_cpu(), workload).git_revision


def test_a_repository_is_dirty_where_the_workload_or_any_file_that_it_tracks_differs(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    workload = module_from(repository.file)
    helper = tmp_path / "helper.py"
    helper.write_text("y = 2\n")

    def state() -> tuple[str | None, bool | None]:
        found = describe_environment(on_cpu(), workload)
        return found.git_revision, found.git_dirty

    assert state() == (repository.commit, False), "what it does not track is not looked at"
    repository.git("add", ".")
    assert state() == (repository.commit, True)
    repository.git("rm", "--quiet", "--cached", "helper.py", "mine.py")
    repository.git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "None")
    assert state() == (f"{repository.git('rev-parse', 'HEAD')[:12]}+", True), "the workload is not in it"
    assert describe_environment(on_cpu()).git_dirty is None


def test_the_libraries_are_those_that_bssearch_stands_on_and_those_that_the_workload_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("timm", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: f"{name}-1")
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    found = library_versions()
    assert {"bssearch bssearch-1", "numpy numpy-1", "sqlalchemy sqlalchemy-1", "timm timm-1"} <= set(found)
    assert not any(one.startswith("transformers") for one in found)
    assert list(found) == sorted(found)
    assert describe_environment(on_cpu()).library_versions["timm"] == "timm-1"


def test_a_file_that_was_never_committed_differs_and_one_that_is_ignored_has_no_revision(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    new = tmp_path / "new.py"
    new.write_text("x = 3\n")
    assert git_revision(module_from(new)) == f"{repository.commit}+"
    (tmp_path / ".gitignore").write_text("installed/\n")
    (tmp_path / "installed").mkdir()
    installed = tmp_path / "installed" / "package.py"
    installed.write_text("x = 3\n")
    assert git_revision(module_from(installed)) is None


def test_without_a_repository_a_commit_or_git_there_is_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    workload = module_from(file)
    assert git_revision(workload) is None
    subprocess.run(["git", "-C", str(tmp_path), "init", "--quiet"], check=True)
    assert git_revision(workload) is None
    repository = Repository(tmp_path)
    assert git_revision(workload) == repository.commit
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(workload) is None


def test_a_class_of_a_notebook_has_a_revision_of_its_own_source(tmp_path: Path) -> None:
    def revision(number: int, body: str) -> str | None:
        cell = tmp_path / f"cell{number}.py"
        cell.write_text(f"class Task:\n    def loss(self):\n        return {body}\nx = {number}\n")
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(cell.read_text(), str(cell), "exec"), names)
        return workload_revision(names["Task"]())

    assert revision(1, "1") == revision(2, "1") != revision(3, "2")
    assert revision(1, "1") is not None
    assert workload_revision(type("Task", (), {"__module__": "__main__"})()) is None
