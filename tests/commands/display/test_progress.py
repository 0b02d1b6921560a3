"""A run is shown in a notebook by itself, elsewhere where that is asked for, and never beside a listener."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bssearch.commands.display import MOST_NOTES, NotebookDisplay, in_notebook
from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.search.driver import Listener
from tests.factories import make_spec
from tests.search.law import LawExecutor

SPEC = make_spec(budget={"trials": 8, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 3})


def run(folder: Path, **options: Any) -> None:
    run_study(SPEC, Launch(db=f"sqlite:///{folder / 'study.db'}", make_executor=lambda *_: LawExecutor(), **options))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make this process a notebook's kernel; return what its cell shows, each text in the place of the last."""
    pages: list[str] = []

    class ZMQInteractiveShell:
        pass

    def display(data: dict[str, str], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(update=lambda data, **options: pages.append(data["text/html"]))

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: type("Shell", (ZMQInteractiveShell,), {})()  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return pages


@pytest.mark.slow
def test_a_notebook_shows_a_run_in_a_bounded_display(tmp_path: Path, shown: list[str]) -> None:
    run(tmp_path)
    assert in_notebook()
    assert "8 of 8 search trials" in " ".join(shown) and "batch size" in shown[-1]
    assert max(len(page.splitlines()) for page in shown) <= MOST_NOTES + len(SPEC.batch_sizes) + 4


@pytest.mark.parametrize("options", [{"progress": False}, {"listener": Listener()}])
def test_a_notebook_shows_nothing_where_it_is_told_so(
    tmp_path: Path, shown: list[str], options: dict[str, Any]
) -> None:
    run(tmp_path, **options)
    assert shown == []


@pytest.mark.parametrize("progress", [None, True])
def test_plain_python_shows_a_run_where_that_is_asked_for(
    tmp_path: Path, progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, progress=progress)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("search 8/8, trial 8" in printed.err) is bool(progress)


def test_what_a_notebook_shows_is_escaped() -> None:
    pages: list[str] = []
    NotebookDisplay(pages.append).note("<script>")
    assert pages == ["<pre>&lt;script&gt;</pre>"]
