"""The built wheel, unpacked into a folder of its own, works from an empty folder elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.task import write_task

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = folder.glob("bssearch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bssearch.cli.app", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_shipped_studies_and_migrations_travel_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    planned = run(installed, tmp_path, "run", "digits", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    upgraded = run(installed, tmp_path, "db", "upgrade")
    assert upgraded.returncode == 0, upgraded.stderr
    assert (tmp_path / "bssearch.db").exists()


@pytest.mark.slow
def test_a_users_own_workload_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    done = run(installed, tmp_path, "run", "task.yaml")
    assert done.returncode == 0, done.stderr
    answer = run(installed, tmp_path, "best", "task", "--format", "json")
    assert json.loads(answer.stdout)["study"] == "task"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "tabular"])
def test_templates_travel_in_the_wheel(installed: Path, tmp_path: Path, kind: str) -> None:
    done = run(installed, tmp_path, "init", "mine", "--kind", kind)
    assert done.returncode == 0, done.stderr
    planned = run(installed, tmp_path, "run", "mine.yaml", "--dry-run")
    assert planned.returncode == 0, planned.stderr


@pytest.mark.slow
def test_the_guide_travels_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "guide", "measuring")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "bssearch" / "guide" / "measuring.md").read_text(encoding="utf-8")
    assert (installed / "bssearch" / "guide" / "pictures" / "digits.svg").exists()
