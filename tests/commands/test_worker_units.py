"""A worker as a systemd unit and as an sbatch script: what is printed holds before their own linters, and runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_FILE_VARIABLE
from tests.cli.task import bssearch, environment
from tests.cli.worker_process import make_node

OPTIONS = ("--tag", "gpu:h200", "--slots", "auto", "--turn-seconds", "60", "--until-empty")


def needed(command: str) -> str:
    """Return a linter's path; skip where it is not installed, but for CI."""
    found = shutil.which(command)
    if found is None:
        assert "CI" not in os.environ, f"{command} is not installed"
        pytest.skip(f"{command} is not installed")
    return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose folders have names that need quoting."""
    monkeypatch.setenv(DATABASE_URL_FILE_VARIABLE, str(tmp_path / "the url"))
    monkeypatch.setenv(CHECKPOINT_DIR_VARIABLE, str(tmp_path / "kept 100%"))
    return make_node(tmp_path / "a node 100%")


def printed(node: Path, kind: str, *options: str) -> str:
    done = bssearch("worker", "--templates", "templates.yaml", *options, "--print", kind, cwd=node)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_systemd_takes_the_unit(node: Path, tmp_path: Path) -> None:
    unit = tmp_path / "bssearch-worker.service"
    unit.write_text(printed(node, "systemd", *OPTIONS))
    done = subprocess.run([needed("systemd-analyze"), "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_stops_the_worker_alone_and_gives_it_time(node: Path) -> None:
    lines = printed(node, "systemd", *OPTIONS).splitlines()
    assert {"KillMode=mixed", "KillSignal=SIGTERM", "TimeoutStopSec=30", "Restart=on-failure"} <= {*lines}
    [command] = [line for line in lines if line.startswith("ExecStart=")]
    assert command.endswith(f'templates.yaml" {" ".join(OPTIONS)}')
    assert "a node 100%%/templates.yaml" in command


def test_a_dollar_in_a_path_is_no_variable_of_systemd(tmp_path: Path) -> None:
    node = make_node(tmp_path / "a $node")
    [command] = [line for line in printed(node, "systemd").splitlines() if line.startswith("ExecStart=")]
    assert "a $$node/templates.yaml" in command


def test_shellcheck_takes_the_script(node: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.sbatch"
    script.write_text(printed(node, "sbatch", *OPTIONS))
    done = subprocess.run([needed("shellcheck"), script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_is_a_worker_that_serves(node: Path, tmp_path: Path) -> None:
    """As Slurm starts it, but for what Slurm alone reads."""
    (tmp_path / "the url").write_text(f"sqlite:///{tmp_path / 'queue.db'}\n")
    script = tmp_path / "worker.sbatch"
    script.write_text(printed(node, "sbatch", *OPTIONS))
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "templates task; tags gpu:h200" in done.stdout and "nothing is left to serve" in done.stdout


def test_slurm_is_asked_for_a_gpu_where_one_is_used_and_tells_the_shell_alone(node: Path) -> None:
    with_gpu, without = printed(node, "sbatch"), printed(node, "sbatch", "--device", "cpu")
    assert "#SBATCH --gpus=1" in with_gpu and "--gpus" not in without
    assert "#SBATCH --signal=B:TERM@60" in without
    assert shlex.split(without.splitlines()[-1])[-2:] == ["--device", "cpu"]


def test_no_password_stands_in_either(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_DB_URL", "postgresql://ann:secret@host/db")
    assert all("secret" not in printed(node, kind) for kind in ("systemd", "sbatch"))


@pytest.mark.parametrize(
    "url", ["sftp://ann:secret@host/folder", "sftp://ann:of/secret@host/folder", "dbfs://host/folder?password=secret"]
)
def test_a_login_at_a_store_of_checkpoints_is_refused(node: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(CHECKPOINT_DIR_VARIABLE, url)
    done = bssearch("worker", "--templates", "templates.yaml", "--print", "systemd", cwd=node)
    assert (done.returncode, done.stdout) == (2, "") and "secret" not in done.stderr


def test_paths_from_here_are_those_of_here(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs in the folder of its templates, which may be another one."""
    monkeypatch.setenv(DATABASE_URL_FILE_VARIABLE, "the-url")
    monkeypatch.setenv(CHECKPOINT_DIR_VARIABLE, "kept")
    done = bssearch("worker", "--templates", str(node / "templates.yaml"), "--print", "systemd", cwd=tmp_path)
    lines = {*done.stdout.splitlines()}
    expected = {DATABASE_URL_FILE_VARIABLE: tmp_path / "the-url", CHECKPOINT_DIR_VARIABLE: tmp_path / "kept"}
    assert {f"Environment={name}={path}" for name, path in expected.items()} <= lines, done.stdout + done.stderr
    monkeypatch.setenv(CHECKPOINT_DIR_VARIABLE, "memory://kept")
    assert f"export {CHECKPOINT_DIR_VARIABLE}=memory://kept" in printed(node, "sbatch")


def test_a_file_of_templates_that_is_wrong_is_refused_before_anything_is_printed(node: Path) -> None:
    (node / "templates.yaml").write_text("templates: {}")
    done = bssearch("worker", "--templates", "templates.yaml", "--print", "systemd", cwd=node)
    assert (done.returncode, done.stdout) == (2, "")
