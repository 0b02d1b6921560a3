"""Every command reads a paused trial as it does a pruned one, and says that it is paused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bssearch.records import TrialRecord, TrialState
from bssearch.storage.repository import open_store
from tests.cli.task import bssearch
from tests.cli.test_report_command import add_study
from tests.factories import make_spec, make_trial
from tests.pages.test_plots import law_trials

SIZE = 64


def stopped(state: TrialState) -> list[TrialRecord]:
    return [
        make_trial(900 + seed, batch_size=SIZE, seconds=0.4, seed=seed, state=state, best_metric=0.5)
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[TrialState, Path]:
    """Two folders, each with the same study, but for the state of three of its trials."""
    places = {state: tmp_path_factory.mktemp(state) for state in (TrialState.PRUNED, TrialState.PAUSED)}
    for state, place in places.items():
        with open_store(f"sqlite:///{place}/bssearch.db") as store:
            add_study(store, make_spec(), [*law_trials(), *stopped(state)])
    return places


def said(folder: Path, *arguments: str) -> str:
    done = bssearch(*arguments, cwd=folder)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return re.sub(r"20\d\d-\d\d-\d\d[T ][\d:.]+\S*", "then", done.stdout + done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("best", "toy", "--format", "json"),
        ("best", "toy"),
        ("trials", "toy"),
        ("trials", "toy", "--format", "json"),
        ("status", "toy"),
        ("status", "toy", "--format", "json"),
        ("report", "toy"),
        ("trial", "toy", "1"),
    ],
    ids=" ".join,
)
def test_it_counts_as_a_pruned_one(folders: dict[TrialState, Path], arguments: tuple[str, ...]) -> None:
    pruned, paused = (said(folder, *arguments) for folder in folders.values())
    assert paused.replace("paused", "pruned") == pruned


def test_its_state_is_shown_and_counted(folders: dict[TrialState, Path]) -> None:
    folder = folders[TrialState.PAUSED]
    trials = json.loads(said(folder, "trials", "toy", "--format", "json"))
    assert [trial["state"] for trial in trials].count("paused") == 3
    (batch,) = [
        one
        for one in json.loads(said(folder, "best", "toy", "--format", "json"))["batches"]
        if one["batch_size"] == SIZE
    ]
    assert batch["ended"]["paused"] == 3
    status = json.loads(said(folder, "status", "toy", "--format", "json"))
    assert status["spent_trials"] >= 3 and status["running"] == []
