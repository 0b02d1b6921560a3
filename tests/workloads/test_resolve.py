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


FILES = {
    "mine.py": WHOLE,
    "broken.py": "x = 1\ndef f(:\n    pass\n",
    "failing.py": "import math\n\nx = math.nothing_there\n",
    "raising.py": "class Mine:\n    def __init__(self, depth):\n        raise ValueError(f'depth {depth} is odd')\n",
    "half.py": "class Half:\n    load = build_model = lambda self: None\n    loss = 3\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("name", "settings", "width"), [("mine.py:Mine", {"width": 5}, 5), ("mine.py:ready", {}, 9)])
def test_a_class_of_a_file_gets_the_settings_and_an_object_is_taken_as_it_is(
    folder: Path, name: str, settings: dict[str, int], width: int
) -> None:
    assert resolve(name, settings, folder).width == width  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["digits", "bssearch.workloads.digits:Digits"])
def test_a_shipped_workload_is_found_by_its_name_and_its_import_path(tmp_path: Path, name: str) -> None:
    workload = resolve(name, {"test_samples": 100}, tmp_path)
    assert isinstance(workload, Digits) and workload.test_samples == 100


FORMS = f"neither a shipped workload ({', '.join(sorted(SHIPPED))}) nor of the form"


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        *((name, {}, [FORMS]) for name in ("cifar", "mine.py", "mine.py:", ":Mine")),
        ("other.py:Mine", {}, ["no file {folder}/other.py"]),
        ("nowhere_at_all:Mine", {}, ["No module named 'nowhere_at_all'"]),
        ("broken.py:Mine", {}, ["SyntaxError", "{folder}/broken.py:2"]),
        ("failing.py:Mine", {}, ["AttributeError", "failing.py:3: x = math.nothing_there"]),
        ("mine.py:Other", {}, ["no 'Other' in it; it has Mine, ready"]),
        ("mine.py:Mine", {"hight": 3}, ["unexpected keyword argument 'hight'"]),
        ("half.py:Half", {}, ["lacks metrics (a mapping of names to MetricInfo), loss, evaluate"]),
        (
            "raising.py:Mine",
            {"depth": 3},
            ["workload_settings {'depth': 3}", "ValueError: depth 3 is odd", "raising.py:3: raise ValueError"],
        ),
    ],
)
def test_what_is_no_workload_is_refused_with_its_name_and_the_users_own_line(
    folder: Path, name: str, settings: dict[str, int], said: list[str]
) -> None:
    with pytest.raises(WorkloadError) as error:
        resolve(name, settings, folder)
    told = str(error.value).replace(str(folder), "{folder}")
    assert [one for one in (name, *said) if one not in told] == []


def test_modules_are_found_beside_the_spec_and_nowhere_else_once_the_folder_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert resolve("mine:ready", {}, Path()).width == 9  # type: ignore[attr-defined]
    assert str(folder) in sys.path and "." not in sys.path


def test_a_part_comes_in_chunks_in_order() -> None:
    part = Part(torch.arange(7), torch.arange(7) * 2)
    assert [(len(inputs), targets[0].item()) for inputs, targets in part.chunks(3)] == [(3, 0), (3, 6), (1, 12)]
