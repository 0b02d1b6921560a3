"""What is said as a study begins."""

from __future__ import annotations

from pathlib import Path

from bssearch.commands.run import run_study
from bssearch.search.listener import Listener
from tests.factories import SPEC, make_spec
from tests.search.law import LawExecutor


class Ear(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_a_new_study_says_where_its_default_lies_outside_the_space(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    budget = {"trials": 6, "trial_train_seconds": 100.0}
    said = []
    for size in (24, 32):
        default = {**SPEC["default"], "batch_size": size}
        spec = make_spec(name=f"of-{size}", default=default, budget=budget, confirm={"runs": 0})
        ear = Ear()
        for _ in range(2):
            run_study(spec, db=url, listener=ear, make_executor=lambda *_: LawExecutor())
        said.append([note for note in ear.notes if "outside the search space" in note])
    assert [len(one) for one in said] == [1, 0], "once, as the study is made"
    assert "batch_size = 24 is not one of" in said[0][0]
