"""Studies with boards: what boards are told, and that no board changes a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bssearch as library
from bssearch.boards import process
from bssearch.records import TrialRecord
from bssearch.search.listener import Listener
from bssearch.storage.repository import open_store
from tests.boards.conftest import Notebook
from tests.factories import make_spec
from tests.search.law import LawExecutor


class Ear(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def run(folder: Path, *boards: str) -> tuple[library.Answer, list[TrialRecord], list[str]]:
    """Run a study; return its answer, its trials, and the notes about its boards."""
    url, ear = f"sqlite:///{folder / '-'.join(['study', *boards])}.db", Ear()
    spec = make_spec(log=list(boards), budget={"trials": 8, "trial_train_seconds": 10.0})
    answer = library.run_study(spec, db=url, make_executor=lambda *_: LawExecutor(), listener=ear)
    with open_store(url, write=False) as store:
        return answer, store.trials(spec.name), [note for note in ear.notes if note.partition(":")[0] in boards]


@pytest.mark.slow
@pytest.mark.parametrize("board", ["Sleeping", "Holding", "Unmade", "Absent", "Missing", "Away", "Crashing"])
def test_a_study_with_a_bad_board_is_the_study_without_it(
    board: str, tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.0)
    answer, trials, notes = run(tmp_path, board)
    alone, trials_alone, _ = run(tmp_path)
    assert answer.optimal.batch_size == alone.optimal.batch_size
    assert [(one.state, one.configuration) for one in trials] == [
        (one.state, one.configuration) for one in trials_alone
    ]
    assert len([note for note in notes if " of " in note]) == 1, "the count is said once"


def test_a_board_is_told_what_is_stored(tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENT_SECONDS", 1e9)
    monkeypatch.setattr(process, "LAST_SECONDS", 1e9)
    answer, trials, notes = run(tmp_path, "Keeping")
    assert notes == []
    with open_store(f"sqlite:///{tmp_path}/study-Keeping.db", write=False) as store:
        curves = store.curves(answer.study, [trial.number for trial in trials])
    calls = notebook.calls("Keeping")
    of: dict[str, list[dict[str, Any]]] = {call["call"]: [] for call in calls}
    for call in calls:
        of[call["call"]].append(call)
    assert [calls[0]["call"], calls[-2]["call"], calls[-1]["call"]] == ["opened", "answered", "close"]
    assert set(calls[0]["about"]) == {"target", "objective", "device", "spec"}
    assert [call["number"] for call in of["started"]] == [trial.number for trial in trials]
    for trial, start, end in zip(trials, of["started"], of["ended"], strict=True):
        assert start["at"] == trial.created_at.timestamp()
        expected = {"batch_size": trial.configuration.batch_size, "phase": trial.phase, "seed": trial.seed}
        assert expected.items() <= start["parameters"].items()
        assert (end["number"], end["state"], end["is_elsewhere"]) == (trial.number, trial.state, False)
        assert trial.outcome is not None
        assert end["figures"]["train_seconds"] == trial.outcome.train_seconds
        points = [point for call in of["observed"] if call["number"] == trial.number for point in call["points"]]
        for (step, at, figures), stored in zip(points, curves[trial.number], strict=True):
            assert (step, figures["accuracy"], figures["samples"]) == (stored.step, stored.metric, stored.samples)
            assert at == pytest.approx(start["at"] + stored.train_seconds)
    last = of["answered"][-1]
    assert last["trials"] == len(trials)
    assert library.Answer.model_validate_json(last["words"]["document"]).optimal == answer.optimal
    assert last["figures"]["optimal_batch_size"] == last["parameters"]["batch_size"] == answer.optimal.batch_size
    assert (last["figures"]["flat_range_low"], last["figures"]["flat_range_high"]) == tuple(answer.flat_range)


def test_a_process_that_cannot_start_fails_no_study(
    tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr("bssearch.commands.reporting.BoardProcess", refuse)
    _, trials, _ = run(tmp_path, "Keeping")
    assert trials
    assert notebook.calls("Keeping") == []
