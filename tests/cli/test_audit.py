"""``bssearch study audit``: what it prints, what it refuses, and that it runs what it says."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bssearch.analysis.rules.audit import LearningRateSlope, RuleFinding
from bssearch.analysis.rules.rule_book import Regret, Rule
from bssearch.cli.study import audit_row, slope_line
from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch, ran, read
from tests.factories import make_spec
from tests.search.law import LawExecutor

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


def test_it_runs_the_rules_and_says_which_held(audited: Path) -> None:
    told, progress = ((audited / name).read_text() for name in ("stdout.txt", "stderr.txt"))
    assert "auditing with 3 runs each, 2000 train seconds in all" in progress
    assert "audit, trial" in progress
    lines = [line.split() for line in told.splitlines()]
    linear = next(line for line in lines if line[:5] == ["learning", "rate", "∝", "batch", "256"])
    assert "BROKE" in linear
    assert next(line for line in lines if line[:5] == ["learning", "rate", "∝", "√batch", "256"]).count("HELD") == 1
    assert "Tuned learning rate ∝ batch^" in told or "is unknown" in told


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
    assert (
        bssearch("import", "runs", "table.csv", "--target", "0.9", "--default-batch", "16", cwd=tmp_path).returncode
        == 0
    )
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
    row = audit_row(finding(Regret(value=2.0, low=None, high=None, at_least=True)))
    assert row == {
        "rule": "learning rate ∝ batch", "batch": "64", "gives": "learning rate 0.3", "regret": "≥ 2",
        "verdict": "NOT RUN", "note": "because",
    }  # fmt: skip
    interval = audit_row(finding(Regret(value=1.0, low=0.9, high=1.12345, at_least=False)))
    assert interval["regret"] == "1 [0.9, 1.12]"
    assert audit_row(finding(None, rule=Rule.MEMORY, batch_size=None, configuration=None))["gives"] is None


def test_the_slope_is_said_in_words() -> None:
    slope = LearningRateSlope(estimate=0.5, low=0.4, high=0.6, excludes=[0.0, 1.0])
    assert slope_line(slope).endswith("batch^0.50 [0.40, 0.60]: that excludes 0 (none) and 1 (linear).")
    assert "0, ½ (√batch) and 1 (linear) are all possible" in slope_line(slope.model_copy(update={"excludes": []}))
    assert "three tuned batch sizes" in slope_line(None)
