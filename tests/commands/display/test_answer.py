"""An answer in Python: a table for a notebook, a data frame, a figure; none of it is part of its JSON."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import bssearch
from bssearch.analysis import answer as stored
from bssearch.analysis.shape import Notice
from bssearch.commands.trials import flat_table
from bssearch.errors import UsageError
from tests.documents import ROOT

STORED = stored.Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))
FOUND = bssearch.Answer.of(STORED)


def test_the_ways_to_show_an_answer_are_no_part_of_it() -> None:
    assert FOUND.model_dump(mode="json") == STORED.model_dump(mode="json")
    assert bssearch.Answer.model_json_schema()["properties"] == stored.Answer.model_json_schema()["properties"]


def test_a_notebook_shows_the_batch_sizes_with_their_intervals_and_every_text_is_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    warned = FOUND.model_copy(update={"warnings": [Notice(code="x", message=hostile)]})
    page = warned._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    rows = re.findall(r"<tr><td>(\d+)[ ←]*</td><td>(.*?)</td>", page)
    assert [int(size) for size, _ in rows] == [row.batch_size for row in FOUND.batches]
    assert f"{FOUND.optimal.batch_size} ←" in page
    best = FOUND.optimal.time_to_target_s
    assert best is not None and best.low is not None
    shown = dict(rows)[str(FOUND.optimal.batch_size)]
    assert shown.startswith(f"{best.median:.3g} [{best.low:.3g}, ")


def test_the_frame_has_the_columns_of_the_csv(tmp_path: Path) -> None:
    columns, rows = flat_table([row.model_dump(mode="json") for row in STORED.batches])
    assert list(FOUND.frame.columns) == columns and len(FOUND.frame) == len(rows)
    assert list(FOUND.frame["batch_size"]) == [row.batch_size for row in STORED.batches]


def test_the_plot_is_plotlys_own_in_colours_that_need_no_style_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    figure = FOUND.plot()
    assert "var(" not in figure.to_json()
    drawn = {size for trace in figure.data if trace.name for size in trace.x}
    assert {row.batch_size for row in FOUND.batches if row.objective_value} <= drawn
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(UsageError) as caught:
        FOUND.plot()
    assert caught.value.hint == "pip install plotly"
