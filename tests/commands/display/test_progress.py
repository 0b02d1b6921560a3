"""A run and an answer as a notebook shows them."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import bssearch
from bssearch import Launch, run_study
from bssearch.analysis.shape import Notice
from bssearch.commands.display import MOST_NOTES, NotebookDisplay, in_notebook
from bssearch.exchange.trial_rows import flat_table
from bssearch.search.driver import Listener
from tests.documents import ROOT
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
    assert ("so far: best single run" in printed.err) is bool(progress)


def test_what_a_notebook_shows_is_escaped() -> None:
    pages: list[str] = []
    NotebookDisplay(pages.append).note("<script>")
    assert pages == ["<pre>&lt;script&gt;</pre>"]


FOUND = bssearch.Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))


def test_the_ways_to_show_an_answer_are_no_part_of_it() -> None:
    assert not {"plot", "frame"} & (
        FOUND.model_dump().keys() | bssearch.Answer.model_json_schema()["properties"].keys()
    )


def test_a_notebook_shows_the_batch_sizes_with_their_intervals_and_every_text_is_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    page = FOUND.model_copy(update={"warnings": [Notice(code="x", message=hostile)]})._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    rows = re.findall(r"<tr( class=\"marked\")?><td>(\d+)</td><td>(.*?)</td>", page)
    assert [int(size) for _, size, _ in rows] == [row.batch_size for row in FOUND.batches]
    ((marked, shown),) = [(size, value) for mark, size, value in rows if mark]
    best = FOUND.optimal.time_to_target_s
    assert best is not None and best.low is not None
    assert (int(marked), shown.startswith(f"{best.median:.3g} s [{best.low:.3g}, ")) == (FOUND.optimal.batch_size, True)


def test_the_frame_has_the_columns_of_the_csv(tmp_path: Path) -> None:
    columns, rows = flat_table([row.model_dump(mode="json") for row in FOUND.batches])
    assert sorted(FOUND.frame.columns) == sorted(columns) and len(FOUND.frame) == len(rows)
    assert list(FOUND.frame["batch_size"]) == [row.batch_size for row in FOUND.batches]


def test_the_plot_is_an_svg_document_for_viewers_with_and_without_html() -> None:
    drawn = FOUND.plot()
    assert drawn._repr_svg_() == drawn._repr_html_() == drawn.svg
    assert drawn.svg in FOUND._repr_html_()
    tooltips = [one.text or "" for one in ElementTree.fromstring(drawn.svg).iter("{http://www.w3.org/2000/svg}title")]
    for row in FOUND.batches:
        if row.objective_value is not None:
            assert any(text.startswith(f"batch {row.batch_size}: ") for text in tooltips)
