"""An answer in Python: a table for a notebook, a data frame, a figure; none of it is part of its JSON."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import bssearch
from bssearch.analysis.shape import Notice
from bssearch.exchange.trial_rows import flat_table
from tests.documents import ROOT

FOUND = bssearch.Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))


def test_the_ways_to_show_an_answer_are_no_part_of_it() -> None:
    assert not {"plot", "frame"} & (
        FOUND.model_dump().keys() | bssearch.Answer.model_json_schema()["properties"].keys()
    )


def test_a_notebook_shows_the_batch_sizes_with_their_intervals_and_every_text_is_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    warned = FOUND.model_copy(update={"warnings": [Notice(code="x", message=hostile)]})
    page = warned._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    rows = re.findall(r"<tr( class=\"marked\")?><td>(\d+)</td><td>(.*?)</td>", page)
    assert [int(size) for _, size, _ in rows] == [row.batch_size for row in FOUND.batches]
    ((marked, shown),) = [(size, value) for mark, size, value in rows if mark]
    best = FOUND.optimal.time_to_target_s
    assert best is not None and best.low is not None
    assert (int(marked), shown.startswith(f"{best.median:.3g} s [{best.low:.3g}, ")) == (FOUND.optimal.batch_size, True)


def test_the_frame_has_the_columns_of_the_csv(tmp_path: Path) -> None:
    columns, rows = flat_table([row.model_dump(mode="json") for row in FOUND.batches])
    assert list(FOUND.frame.columns) == columns and len(FOUND.frame) == len(rows)
    assert list(FOUND.frame["batch_size"]) == [row.batch_size for row in FOUND.batches]


def test_the_plot_is_an_svg_document_for_viewers_with_and_without_html() -> None:
    drawn = FOUND.plot()
    assert drawn._repr_svg_() == drawn._repr_html_() == drawn.svg
    assert drawn.svg in FOUND._repr_html_()
    tooltips = [one.text or "" for one in ElementTree.fromstring(drawn.svg).iter("{http://www.w3.org/2000/svg}title")]
    for row in FOUND.batches:
        if row.objective_value is not None:
            assert any(text.startswith(f"batch {row.batch_size}: ") for text in tooltips)
