"""What a person sees while a study runs: the phase it is in, what is left of that, and seconds by one clock."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bssearch.commands.display import Display, Lines, ended_line
from bssearch.commands.run import run_study
from bssearch.commands.trials import status
from bssearch.errors import TargetNotReachedError
from bssearch.executors.base import Ended, Event
from bssearch.history import History
from bssearch.pruners.controller import PruningController
from bssearch.records import Observation, TrialRecord, TrialState
from bssearch.storage.repository import open_store
from tests.factories import make_probe, make_spec, make_trial
from tests.search.law import LawExecutor

SPEC = make_spec(budget={"trials": 12, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 3})


class Footers(Display):
    """A display that keeps what it showed; each look at its clock is half a second after the one before."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.shown: list[str] = []
        super().__init__(Console(file=io.StringIO(), width=200), None, self.tick)  # type: ignore[arg-type]

    def tick(self) -> float:
        self.seconds += 0.5
        return self.seconds

    def _show(self, history: History) -> None:
        self.shown.append(self.footer(history))


class Slowing(LawExecutor):
    """The law, with confirmation runs each of which takes longer than the one before."""

    def events(self, timeout: float) -> list[Event]:
        found = super().events(timeout)
        if found and isinstance(found[-1], Ended) and self.requests[-1].evaluate_test:
            end = found[-1]
            slow = replace(end.outcome, wall_seconds=end.outcome.wall_seconds * len(self.requests))
            return [*found[:-1], Ended(end.number, slow)]
        return found


def run(folder: Path, listener: Any, spec: Any = SPEC) -> None:
    run_study(spec, db=f"sqlite:///{folder / 'study.db'}", listener=listener, make_executor=lambda *_: Slowing())


@pytest.mark.slow
def test_the_display_tells_the_phase_and_what_is_left_of_it_which_never_grows_once_the_search_is_over(
    tmp_path: Path,
) -> None:
    display = Footers()
    run(tmp_path, display)
    over = next(place for place, text in enumerate(display.shown) if "search ended" in text)
    assert any("of search left" in text for text in display.shown[:over])
    assert not any("of search left" in text for text in display.shown[over:])
    assert "search ended (the budget of 12 trials is spent): 12 trials" in display.shown[over]
    told = [re.search(r"at most (\d+) runs left(?:, about (\d+) s)?", text) for text in display.shown[over:]]
    runs = [int(one[1]) for one in told if one]
    assert runs == sorted(runs, reverse=True) and runs[-1] == 1
    seconds = [int(one[2]) for one in told if one and one[2]]
    assert seconds and seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_directly_after_a_resume_the_display_tells_what_is_left(tmp_path: Path) -> None:
    run(tmp_path, Footers())
    more = SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"trials": 14})})
    display = Footers()
    run(tmp_path, display, more)
    assert "13 of 14 search trials" in display.shown[0]
    assert "s of search left" in display.shown[0]


def history_of(*trials: TrialRecord) -> History:
    return History(SPEC, trials, {32: make_probe(32, step_seconds=0.04)})


def test_a_line_tells_the_train_seconds_by_which_trials_are_pruned_and_names_those_of_a_product() -> None:
    contended = make_trial(1, seconds=7.13, contended=True, product=4.022)
    history = history_of(contended)
    line = ended_line(contended, history)
    assert "after 7.13 train seconds" in line
    assert "steps × step time is 4.022 s" in line
    assert "steps × step time" not in ended_line(make_trial(2, seconds=7.13), history)
    assert "as steps × step time" in history.figure_text(history.trials[0])


def test_every_line_of_a_log_gives_the_same_seconds_of_the_fastest_trial() -> None:
    fastest = make_trial(1, seconds=7.13, contended=True, product=4.022)
    late = make_trial(2, state=TrialState.RUNNING)
    history = History(SPEC, (), {32: make_probe(32)})
    pruning = PruningController(SPEC, history)
    for trial in (fastest, late):
        history.take(trial)
        pruning.take(trial)
    history.observe(2, 40.0, 0.2)
    seen = Observation(step=10, samples=320, train_seconds=40.0, metric=0.2, loss=None, learning_rate=0.1)
    halt = pruning.judge(2, seen, uncapped=False)
    assert halt is not None and "7.13 train seconds" in halt.reason


def test_status_says_that_the_search_has_ended_and_why_until_it_goes_on(tmp_path: Path) -> None:
    run(tmp_path, Lines(Console(file=io.StringIO())))
    with open_store(f"sqlite:///{tmp_path / 'study.db'}") as store:
        found = status(store, "toy")
        assert found.search_ended == "the budget of 12 trials is spent"
        assert found.document()["search_ended"] == found.search_ended
        spec = dict(store.study("toy").spec)
        store.update_spec("toy", {**spec, "budget": {**spec["budget"], "trials": 20}})  # type: ignore[dict-item]
        assert status(store, "toy").search_ended is None, "a larger budget asks for more"


def test_status_says_why_the_search_of_a_study_that_reached_nothing_has_ended(tmp_path: Path) -> None:
    spec = make_spec(budget={"trials": 6, "trial_train_seconds": 100.0})
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with pytest.raises(TargetNotReachedError, match="none of 6 trials"):
        run_study(spec, db=url, make_executor=lambda *_: LawExecutor(reachable=False))
    with open_store(url) as store:
        assert status(store, "toy").search_ended == "the budget of 6 trials is spent"
