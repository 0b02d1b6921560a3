"""``bssearch study confirm`` and ``study audit``: what they refuse, what they store, and what they print."""

import csv
import io
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, TargetNotReachedError, open_store, run_study
from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.rules.audit import RuleFinding
from bssearch.analysis.rules.rule_book import Regret, Rule
from bssearch.analysis.shape import Interval
from bssearch.cli.answer import print_generalisation
from bssearch.cli.study import audit_row
from bssearch.spec import spec_of
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch, printed, ran, read, refused
from tests.factories import make_spec
from tests.search.law import LawExecutor


def store_study(folder: Path, *, reachable: bool = True, **changes: Any) -> None:
    """Store a finished study of the law in a folder's database."""
    spec = make_spec(budget={"trials": 10, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 2}, **changes)
    executor = LawExecutor(reachable=reachable)
    with nullcontext() if reachable else pytest.raises(TargetNotReachedError):
        run_study(spec, Launch(db=f"sqlite:///{folder / 'bssearch.db'}", make_executor=lambda *_: executor))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stored")
    store_study(place)
    return place


@pytest.mark.slow
def test_it_runs_what_is_missing_and_prints_what_best_prints(folder: Path, by_law: LawExecutor) -> None:
    done = ran(folder, "study", "confirm", "toy", "--runs", "4", "--verbose")
    assert done.stdout == bssearch("best", "toy", cwd=folder).stdout
    assert "confirm, trial" in done.stderr
    assert read(folder, "study", "confirm", "toy")["optimal"]["time_to_target_s"]["runs"] == 4
    assert len({request.plan.seed for request in by_law.requests}) == 2  # of four, two had been made
    rows = list(csv.DictReader(io.StringIO(bssearch("study", "confirm", "toy", "-f", "csv", cwd=folder).stdout)))
    assert [row["batch_size"] for row in rows] == ["8", "16", "32", "64", "128"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [("study", "confirm", "toy", "--runs", "3"), ("study", "audit", "toy")])
def test_code_that_this_user_has_not_run_is_not_run_on_the_databases_word(
    command: tuple[str, ...], tmp_path: Path, by_law: LawExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BSSEARCH_STATE_DIR", str(tmp_path / "mine"))
    store_study(tmp_path, workload="task.py:Task")
    known = len(by_law.requests)
    assert bssearch(*command, cwd=tmp_path).returncode == 0
    assert len(by_law.requests) > known
    monkeypatch.setenv("BSSEARCH_STATE_DIR", str(tmp_path / "somebody-elses"))
    known = len(by_law.requests)
    told = refused(tmp_path, *command, code=2)
    assert "names the workload 'task.py:Task', but bssearch has no record that you ran this version" in told
    assert "add --workload task.py:Task" in told
    assert len(by_law.requests) == known
    assert bssearch("best", "toy", cwd=tmp_path).returncode == 0, "an answer runs nothing"
    assert bssearch("study", "audit", "toy", "--no-run", cwd=tmp_path).returncode == 0
    printed(tmp_path, *command, "--workload", "task.py:Task")


def test_what_is_asked_is_stored_with_the_study(folder: Path, by_law: LawExecutor) -> None:
    ran(folder, "study", "confirm", "toy", "--runs", "3", "--max-runs", "5", "--train-seconds", "60")
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        study = store.studies.get("toy")
    assert study.spec["confirm"] == {"top": 1, "runs": 3, "max_runs": 5, "train_seconds": 60.0}
    assert study.spec_hash == make_spec().question_hash


@pytest.mark.parametrize(("answer", "kept"), [("n", 5), ("", 5), ("y", None), (None, None)])
def test_on_a_terminal_a_spec_without_max_runs_asks_before_it_removes_the_stored_one(
    folder: Path, by_law: LawExecutor, monkeypatch: pytest.MonkeyPatch, answer: str | None, kept: int | None
) -> None:
    ran(folder, "study", "confirm", "toy", "--max-runs", "5")
    if answer is not None:
        monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    said = ran(folder, "run", "toy", "--set", "confirm.max_runs=null").stderr
    assert ("Remove confirm.max_runs from the study? [y/N]" in said) is (answer is not None)
    assert ("confirm.max_runs was 5, and is now not given" in said) is (kept is None)
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        assert spec_of(store.studies.get("toy")).confirm.max_runs == kept


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_to_budget_answers_with_the_final_metrics_and_leaves_the_confirmation_as_it_is(
    folder: Path, by_law: LawExecutor
) -> None:
    done = ran(folder, "study", "confirm", "toy", "--to-budget", "--runs", "1", "--format", "json")
    assert {request.plan.stop_at_target for request in by_law.requests} == {False}
    assert "1 run at each batch size (" in done.stderr and "up to 100 train seconds" in done.stderr
    to_budget = [trial for trial in read(folder, "trial", "list", "toy") if trial["phase"] == "to_budget"]
    assert len(to_budget) == len(by_law.requests)
    assert all(trial["test_metric"] == 0.89 for trial in to_budget)
    assert json.loads(done.stdout)["generalisation"]["train_seconds"] == 100.0
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        confirm = store.studies.get("toy").spec["confirm"]
    assert confirm == {"top": 1, "runs": 2, "max_runs": None, "train_seconds": None}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["toy", "--runs", "1"], 2, "--runs 1 must be >= confirm.runs = 2 of the stored study 'toy'"),
        (["toy", "--max-runs", "1"], 2, "max_runs = 1 must be >= runs = 2"),
        (
            ["toy", "--train-seconds", "9"],
            2,
            "train_seconds = 9 needs max_runs, because train_seconds limits the runs after the first 2",
        ),
        (["toy", "--max-runs", "3", "--train-seconds", "-1"], 2, "confirm.train_seconds = -1.0: must be > 0"),
        (["toy", "--to-budget", "--max-runs", "9"], 2, "give either --to-budget or --max-runs, not both"),
        (["toy", "--to-budget", "--train-seconds", "9"], 2, "give either --to-budget or --train-seconds, not both"),
        (["toy", "--runs", "0"], 2, "'0' must be >= 1"),
        (["toy", "--runs", "x"], 2, "'x' must be a valid integer"),
        (["tox"], 3, "no study 'tox' in this database"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_runs(
    folder: Path, by_law: LawExecutor, arguments: list[str], code: int, words: str
) -> None:
    assert words in refused(folder, "study", "confirm", *arguments, code=code)
    assert by_law.requests == []


def test_the_table_of_final_metrics_marks_the_best_and_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    def row(size: int, final: float | None, gap: Interval | None, early: int = 0) -> FinalMetrics:
        return FinalMetrics(
            batch_size=size,
            parameters={},
            runs=0 if final is None else 3,
            ended_early=early,
            contended=0,
            final_metric=final,
            test_metric=None,
            gap=gap,
            trial_numbers=[],
        )

    print_generalisation(
        Generalisation(
            train_seconds=20.0,
            best_batch_size=32,
            notable_gap=0.02,
            batches=[
                row(32, 0.95, None),
                row(64, None, None, early=2),
                row(128, 0.9, Interval(value=0.05, low=0.01, high=0.09)),
            ],
            more_regularised=row(128, 0.94, Interval(value=0.01, low=None, high=None)),
            closed=True,
        ),
        "accuracy",
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Final accuracy of each batch size after 20 train seconds, without a stop at the target:"
    assert "32 (best) 0.95 – – 3" in lines
    assert "64 – – – 0 (2 ended early)" in lines
    assert "128 0.9 – 0.05 [0.01, 0.09] 3" in lines
    assert "128, more regularised 0.94 – 0.01 3" in lines


# Audit ----------------------------------------------------------------------------------------------------------------


SPEC = make_spec(
    space={
        "batch_size": [32, 64, 256],
        "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 0.5, "rule": "sqrt"},
    },
    default={"batch_size": 32, "learning_rate": 0.1, "weight_decay": 0.0},
    budget={"trials": 12, "trial_train_seconds": 100.0},
    confirm={"top": 3, "runs": 3},
)
RUNS = "batch_size,seed,reached,steps,train_seconds\n" + "".join(
    f"{size},{seed},true,{3000 // size + seed},{seconds + seed / 10}\n"
    for size, seconds in ((16, 3.0), (64, 2.0), (128, 2.5))
    for seed in range(3)
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run_study(SPEC, Launch(db=f"sqlite:///{folder / 'bssearch.db'}", make_executor=lambda *_: LawExecutor()))
    return folder


@pytest.fixture(scope="module")
def audited(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study and what its first audit printed, for tests to read."""
    place = Path(shutil.copytree(finished, tmp_path_factory.mktemp("audited"), dirs_exist_ok=True))
    with pytest.MonkeyPatch.context() as patch:
        executor = run_by_law(patch)
        done = ran(place, "study", "audit", "toy", "--verbose")
    assert len({request.plan.seed for request in executor.requests}) == 3
    (place / "stdout.txt").write_text(done.stdout)
    (place / "stderr.txt").write_text(done.stderr)
    return place


def test_json_is_the_audit_and_rows_are_its_rules(audited: Path, by_law: LawExecutor) -> None:
    found = read(audited, "study", "audit", "toy", "--runs", "3")
    assert by_law.requests == []
    assert set(found) == {"study", "rules", "learning_rate_slope", "spent_train_seconds"}
    assert found["study"] == "toy"
    assert found["spent_train_seconds"] > 0
    keys = {"rule", "batch_size", "configuration", "regret", "verdict", "reason", "trial_numbers"}
    assert all(set(rule) == keys for rule in found["rules"])
    linear = next(rule for rule in found["rules"] if rule["rule"] == Rule.LINEAR_RATE and rule["batch_size"] == 256)
    assert linear["verdict"] == "broke"
    assert linear["regret"]["low"] > 1.1
    assert linear["configuration"]["learning_rate"] == pytest.approx(0.8)
    assert {rule["verdict"] for rule in found["rules"]} <= {"held", "broke", "undecided", "not_run"}
    rows = list(csv.DictReader(io.StringIO(bssearch("study", "audit", "toy", "-f", "csv", cwd=audited).stdout)))
    assert [row["rule"] for row in rows] == [rule["rule"] for rule in found["rules"]]
    lines = bssearch("study", "audit", "toy", "-f", "jsonl", cwd=audited).stdout.splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == [rule["verdict"] for rule in found["rules"]]


def test_an_imported_study_is_only_judged(tmp_path: Path, by_law: LawExecutor) -> None:
    (tmp_path / "table.csv").write_text(RUNS)
    printed(tmp_path, "import", "runs", "table.csv", "--target", "0.9", "--default-batch", "16")
    rules = read(tmp_path, "study", "audit", "table")["rules"]
    assert {rule["verdict"] for rule in rules if rule["rule"] != Rule.EPOCHS} == {"not_run"}
    assert {rule["verdict"] for rule in rules if rule["rule"] == Rule.EPOCHS} == {"broke"}, "the table tells"
    assert any("learning rate of the runs is unknown" in rule["reason"] for rule in rules)
    assert not by_law.requests


def finding(regret: Regret | None, **changes: Any) -> RuleFinding:
    values: dict[str, Any] = {
        "rule": Rule.LINEAR_RATE, "batch_size": 64, "configuration": {"learning_rate": 0.30000004},
        "regret": regret, "verdict": "not_run", "reason": "because", "trial_numbers": [1],
    }  # fmt: skip
    return RuleFinding(**{**values, **changes})


def test_rows_for_people_are_short() -> None:
    assert audit_row(finding(Regret(value=2.0, low=None, high=None, at_least=True))) == {
        "rule": "learning rate ∝ batch", "batch": "64", "gives": "learning rate 0.3", "regret": "≥ 2",
        "verdict": "NOT RUN", "note": "because",
    }  # fmt: skip
    assert audit_row(finding(Regret(value=1.0, low=0.9, high=1.12345, at_least=False)))["regret"] == "1 [0.9, 1.12]"
    assert audit_row(finding(None, rule=Rule.MEMORY, batch_size=None, configuration=None))["gives"] is None
