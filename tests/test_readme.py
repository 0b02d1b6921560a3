"""What the README shows works, and what can be asked of the command line is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bssearch.cli.app import app
from tests.cli.task import bssearch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_workload_and_spec_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(next(block for block in blocks("python") if "class MyTask" in block))
    (tmp_path / "my_study.yaml").write_text(next(block for block in blocks("yaml") if "my_task.py" in block))
    done = bssearch("run", "my_study.yaml", "--set", "budget.trials=8", "--set", "confirm.runs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(bssearch("best", "my-task", "--format", "json", cwd=tmp_path).stdout)
    assert answer["optimal"]["batch_size"] in (8, 16, 32, 64, 128, 256, 512)


def test_the_set_up_is_two_commands() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("pip install")]
    assert commands == ["pip install . && bssearch run studies/digits.yaml", "pip install '.[dev]' && pytest"]
    assert "pip install --quiet '.[dev]'" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", [one.name for one in app.registered_commands] + ["db upgrade"])
def test_every_command_is_in_the_readme_and_has_help(command: str) -> None:
    assert f"bssearch {command}" in README
    done = bssearch(*command.split(), "--help", cwd=ROOT)
    assert done.returncode == 0
    assert len(done.stdout.strip().splitlines()) > 3
