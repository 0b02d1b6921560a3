"""The join of two rows is a least upper bound: in any order, however grouped, however often, the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bssearch.storage.transfer.layout import LAYOUTS, Kind, Row
from bssearch.storage.transfer.rules import ASKED, QUESTION, Contradiction, joined

MOMENTS = st.sampled_from([f"2026-01-0{day}T00:00:00.000000+00:00" for day in (1, 2, 3)])
FEW = st.integers(0, 2)


@st.composite
def trials(draw: st.DrawFn) -> Row:
    row: dict[str, Any] = {name: None for name in LAYOUTS[Kind.TRIAL].fields} | dict.fromkeys(ASKED, 1)
    row |= {"state": draw(st.sampled_from(["queued", "paused", "reached", "lost"])), "steps": draw(FEW)}
    row |= {"created_at": draw(MOMENTS), "ended_at": None if row["state"] == "queued" else draw(MOMENTS)}
    return row | ({"seed": 2} if draw(FEW) == 2 and draw(FEW) == 2 else {})


@st.composite
def studies(draw: st.DrawFn) -> Row:
    spec = {"name": "toy", "budget": {"trials": draw(FEW)}, "seed": draw(FEW)}
    environment = draw(st.sampled_from([None, "a", "b"]))
    return {"name": "toy", "spec": spec, "environment": environment, **dict.fromkeys(QUESTION, 1)}


@st.composite
def findings(draw: st.DrawFn) -> Row:
    quick = draw(st.none() | st.fixed_dictionaries({"runs": st.lists(FEW, max_size=2)}))
    end = draw(st.none() | st.fixed_dictionaries({"spent": FEW, "reason": st.sampled_from("ab")}))
    return {"answer": {"quick": quick, "search_end": end}, "found_at": draw(MOMENTS)}


def measured(kind: str | None) -> st.SearchStrategy[Row]:
    return st.fixed_dictionaries({"kind": st.just(kind), "measured_at": MOMENTS, "step_seconds": FEW})


ROWS: dict[str, tuple[Kind, st.SearchStrategy[Row]]] = {
    "trial": (Kind.TRIAL, trials()),
    "study": (Kind.STUDY, studies()),
    "finding": (Kind.FINDING, findings()),
    "observation": (Kind.OBSERVATION, st.fixed_dictionaries({"metric": FEW})),
    "visit": (Kind.VISIT, st.fixed_dictionaries({"step_seconds": FEW})),
    "log": (Kind.LOG, st.fixed_dictionaries({"text": st.text("ab", max_size=2)})),
    "step time": (Kind.PROBE, measured("step_time")),
    "memory": (Kind.PROBE, measured("memory")),
    "branch": (Kind.BRANCH, measured(None)),
    "environment": (Kind.ENVIRONMENT, st.fixed_dictionaries({"host": FEW})),
}

TOP = {"contradiction": True}


def join(kind: Kind, here: Row, there: Row) -> Row:
    """Return the join, or the top of the lattice where two rows contradict each other."""
    if TOP in (here, there):
        return TOP
    try:
        return joined(kind, here, there)
    except Contradiction:
        return TOP


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_join_is_a_least_upper_bound(name: str, data: st.DataObject) -> None:
    kind, rows = ROWS[name]
    a, b, c = data.draw(rows), data.draw(rows), data.draw(rows)
    assert join(kind, a, a) == a
    assert join(kind, a, b) == join(kind, b, a)
    assert join(kind, a, join(kind, b, c)) == join(kind, join(kind, a, b), c)
    assert join(kind, a, join(kind, a, b)) == join(kind, a, b)


EARLY, LATE = ({"measured_at": f"2026-01-0{day}", "step_seconds": 1.0 / day} for day in (1, 2))


@pytest.mark.parametrize(
    ("kind", "measured", "kept"),
    [(Kind.PROBE, "step_time", 1), (Kind.PROBE, "memory", 2), (Kind.PROBE, "noise_scale", 2), (Kind.BRANCH, "x", 1)],
)
def test_of_step_times_and_branches_the_first_counts_of_what_is_measured_anew_the_last(
    kind: Kind, measured: str, kept: int
) -> None:
    early, late = ({"kind": measured, **one} for one in (EARLY, LATE))
    assert joined(kind, early, late) == (early if kept == 1 else late)


def test_the_quick_answer_with_more_runs_and_the_end_with_more_trials_count() -> None:
    ends = [{"spent": 20, "reason": "a"}, {"spent": 3, "reason": "b"}]
    quick = [{"runs": [9]}, {"runs": [1, 1]}]
    rows = [{"found_at": str(i), "answer": {"quick": quick[i], "search_end": ends[i]}} for i in range(2)]
    assert joined(Kind.FINDING, rows[0], rows[1])["answer"] == {"quick": quick[1], "search_end": ends[0]}
