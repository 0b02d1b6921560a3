"""A text in a database never becomes a word of a shell, with the commands as people type them."""

import json
from pathlib import Path

import pytest

from tests.cli.task import bssearch, printed, read
from tests.schema import execute

TRAIN = 'for step in 1 2 3; do echo "{\\"step\\": $step, \\"accuracy\\": 0.$((2 * step + 3))}"; sleep 0.02; done; : '
SPEC = f"""
name: shell
command: [bash, -c, '{TRAIN} {{batch_size}} {{learning_rate}} {{activation}}']
target: {{metric: accuracy, value: 0.9, goal: maximize}}
space:
  batch_size: [32, 64]
  learning_rate: {{reference_batch: 32, low: 0.01, high: 1.0, rule: sqrt}}
  model: {{activation: [relu, gelu]}}
default: {{batch_size: 32, learning_rate: 0.1, model: {{activation: relu}}}}
budget: {{trials: 3, trial_train_seconds: 5}}
confirm: {{runs: 0}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["queued", "imported", "merged", "ray", "worker"])
def test_a_forged_text_runs_nothing_in_a_shell(tmp_path: Path, way: str) -> None:
    spec, mine = tmp_path / "spec.yaml", tmp_path / "bssearch.db"
    spec.write_text(SPEC)
    assert bssearch("run", spec, cwd=tmp_path).returncode == 0
    assert bssearch("trial", "add", "shell", "model.activation=gelu", cwd=tmp_path).returncode == 0
    execute(
        mine,
        "UPDATE bss_trial SET parameters = json_set(parameters, '$.\"model.activation\"', ?) WHERE state = 'queued'",
        ["r$(touch PWNED)"],
    )
    if way == "imported":
        assert bssearch("export", "shell", "--to", "study", cwd=tmp_path).returncode == 0
        mine.unlink()
        assert bssearch("import", "study", "shell.bssearch.jsonl.gz", cwd=tmp_path).returncode == 0
    if way in ("merged", "worker"):
        mine.rename(tmp_path / "theirs.db")
        assert bssearch("db", "init", cwd=tmp_path).returncode == 0
        if way == "worker":
            assert bssearch("queue", "submit", "shell", "--name", "shell", cwd=tmp_path).returncode == 0
        assert bssearch("import", "study", "sqlite:///theirs.db", cwd=tmp_path).returncode == 0
    if way == "worker":
        (tmp_path / "templates.yaml").write_text("templates: {shell: {spec: spec.yaml, values: {}}}")
        spec.write_text(SPEC.replace("trials: 3", "trials: 5"))
        done = bssearch("queue", "worker", "--templates", "templates.yaml", "--until-empty", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        executor = ["--set", "executor.name=ray"] if way == "ray" else []
        printed(tmp_path, "run", spec, "--set", "budget.trials=5", *executor)
    trials = read(tmp_path, "trial", "list", "shell")
    (refused,) = [one for one in trials if "PWNED" in json.dumps(one)]
    assert (refused["state"], refused["steps"]) == ("failed", 0)
    assert "model.activation" in refused["reason"]
    others = [one["state"] for one in trials if one is not refused]
    assert len(others) == 5 and {*others} <= {"reached", "capped", "pruned"}
    assert not [*tmp_path.rglob("PWNED")]
