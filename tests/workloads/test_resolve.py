from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bssearch.errors import WorkloadError
from bssearch.workloads.base import SHIPPED, Part, resolve
from bssearch.workloads.digits import Digits

WHOLE = """
class Mine:
    metrics = {"accuracy": None}
    def __init__(self, width=3):
        self.width = width
    def load(self, device): ...
    def build_model(self, *, dropout): ...
    def loss(self, model, inputs, targets, *, label_smoothing): ...
    def evaluate(self, model, part): ...

ready = Mine(width=9)
"""


def refused(name: str, folder: Path, **settings: int) -> str:
    with pytest.raises(WorkloadError) as error:
        resolve(name, settings, folder)
    assert name in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(WHOLE)
    return tmp_path


def test_a_shipped_name_is_found(tmp_path: Path) -> None:
    workload = resolve("digits", {"test_samples": 100}, tmp_path)
    assert isinstance(workload, Digits) and workload.test_samples == 100


def test_an_import_path_is_found(tmp_path: Path) -> None:
    assert isinstance(resolve("bssearch.workloads.digits:Digits", {}, tmp_path), Digits)


def test_a_file_is_found_relative_to_the_folder_and_gets_the_settings(folder: Path) -> None:
    assert resolve("mine.py:Mine", {"width": 5}, folder).width == 5  # type: ignore[attr-defined]


def test_an_object_that_is_no_class_is_taken_as_it_is(folder: Path) -> None:
    assert resolve("mine.py:ready", {}, folder).width == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["cifar", "mine.py", "mine.py:", ":Mine"])
def test_a_name_of_no_known_form_is_refused_with_the_forms(name: str, folder: Path) -> None:
    shipped = ", ".join(sorted(SHIPPED))
    assert f"neither a shipped workload ({shipped}) nor of the form" in refused(name, folder)


def test_modules_are_found_beside_the_spec_and_nowhere_else_once_the_folder_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert resolve("mine:ready", {}, Path()).width == 9  # type: ignore[attr-defined]
    assert str(folder) in sys.path and "." not in sys.path


def test_a_missing_file_is_named(folder: Path) -> None:
    assert f"no file {folder / 'other.py'}" in refused("other.py:Mine", folder)


def test_a_missing_module_is_named(folder: Path) -> None:
    assert "No module named 'nowhere_at_all'" in refused("nowhere_at_all:Mine", folder)


def test_a_syntax_error_is_told_with_file_and_line(folder: Path) -> None:
    (folder / "broken.py").write_text("x = 1\ndef f(:\n    pass\n")
    message = refused("broken.py:Mine", folder)
    assert "SyntaxError" in message and f"{folder / 'broken.py'}:2" in message


def test_an_import_that_fails_is_told_with_the_users_line(folder: Path) -> None:
    (folder / "failing.py").write_text("import math\n\nx = math.nothing_there\n")
    message = refused("failing.py:Mine", folder)
    assert "AttributeError" in message and "failing.py:3: x = math.nothing_there" in message


def test_a_missing_attribute_is_told_with_those_there_are(folder: Path) -> None:
    assert "no 'Other' in it; it has Mine, ready" in refused("mine.py:Other", folder)


def test_a_constructor_that_fails_is_told_with_the_users_line(folder: Path) -> None:
    (folder / "raising.py").write_text(
        "class Mine:\n    def __init__(self, depth):\n        raise ValueError(f'depth {depth} is odd')\n"
    )
    message = refused("raising.py:Mine", folder, depth=3)
    assert "workload_settings {'depth': 3}" in message
    assert "ValueError: depth 3 is odd" in message
    assert "raising.py:3: raise ValueError" in message


def test_settings_the_constructor_does_not_take_are_named(folder: Path) -> None:
    assert "unexpected keyword argument 'hight'" in refused("mine.py:Mine", folder, hight=3)


def test_missing_members_are_named(folder: Path) -> None:
    (folder / "half.py").write_text("class Half:\n    load = build_model = lambda self: None\n    loss = 3\n")
    assert "lacks metrics (a mapping of names to MetricInfo), loss, evaluate" in refused("half.py:Half", folder)


def test_a_part_comes_in_chunks_in_order() -> None:
    part = Part(torch.arange(7), torch.arange(7) * 2)
    assert [(len(inputs), targets[0].item()) for inputs, targets in part.chunks(3)] == [(3, 0), (3, 6), (1, 12)]
