"""The unpacked wheel works from an empty folder, and the sdist builds the same wheel."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cli.task import UNCONFIRMED, space_of, write_task

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(backend: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build(backend, ROOT, folder, "wheel", "sdist")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


BUILD = """
import sys
from hatchling import build
for kind in sys.argv[2:]:
    getattr(build, f"build_{kind}")(sys.argv[1])
"""
"""Builds as pip does, without a new environment each time."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backend")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    words = ["-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder), *needed]
    subprocess.run([sys.executable, *words], check=True, timeout=300)
    return folder


def build(backend: Path, source: Path, folder: Path, *kinds: str) -> None:
    """Build the wheel or the sdist of a checkout in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(backend)}
    subprocess.run([sys.executable, "-c", BUILD, folder, *kinds], cwd=source, env=environment, check=True, timeout=300)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_wheel_of_the_sdist_holds_the_files_of_the_wheel_of_the_checkout(
    backend: Path, installed: Path, tmp_path: Path
) -> None:
    (sdist,) = installed.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        archive.extractall(tmp_path, **safely)
    (unpacked,) = tmp_path.glob("bssearch-*")
    build(backend, unpacked, tmp_path, "wheel")
    files, of_checkout = (contents(next(place.glob("*.whl"))) for place in (tmp_path, installed.parent))
    assert sorted(files) == sorted(of_checkout)
    assert [name for name in files if files[name] != of_checkout[name]] == []


GIT = "git -c user.name=tester -c user.email=tester@localhost -c commit.gpgsign=false"


@pytest.mark.slow
def test_the_version_is_the_tags_and_a_copy_without_git_builds_too(backend: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for folder in ("bssearch", "migrations", "studies"):
        (checkout / folder).mkdir(parents=True)
    (checkout / "bssearch" / "__init__.py").touch()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, checkout)
    states = {
        "": r"0\.1\.dev0",
        "git init -q && git add . && {git} commit -qm one": r"0\.1\.dev1\+g[0-9a-f]+",
        "git tag v1.2.3": r"1\.2\.3",
        "{git} commit -qm two --allow-empty": r"1\.2\.4\.dev1\+g[0-9a-f]+",
    }
    for number, (commands, version) in enumerate(states.items()):
        subprocess.run(commands.format(git=GIT), shell=True, cwd=checkout, check=True)
        build(backend, checkout, tmp_path / str(number), "wheel")
        (wheel,) = (tmp_path / str(number)).glob("*.whl")
        assert re.fullmatch(version, wheel.name.split("-")[1]), (commands, wheel.name)


RUN_ALL = """
import sys
from bssearch.cli import main
for arguments in {commands!r}:
    print("$", *arguments, flush=True)
    sys.argv = ["bssearch", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""
"""Runs several commands in one process, which imports the package once."""


def run(installed: Path, cwd: Path, *commands: str) -> list[str]:
    """Run commands of the installed package, which must succeed; return their outputs."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL.format(commands=[shlex.split(command) for command in commands])],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [part.partition("\n")[2] for part in done.stdout.split("$ ")[1:]]


@pytest.mark.slow
def test_the_wheel_has_studies_migrations_templates_and_the_guide(installed: Path, tmp_path: Path) -> None:
    kinds = ("image", "text", "tabular")
    templates = [line for kind in kinds for line in (f"init my-{kind} --kind {kind}", f"run my-{kind}.yaml --dry-run")]
    more = ("plan start --defaults --out mine.yaml", "guide measuring")
    *_, guide = run(installed, tmp_path, "run digits --dry-run", "db upgrade", *templates, *more)
    assert (tmp_path / "bssearch.db").exists() and (tmp_path / "mine.yaml").exists()
    assert guide == (ROOT / "bssearch" / "guide" / "measuring.md").read_text(encoding="utf-8")
    assert (installed / "bssearch" / "guide" / "pictures" / "digits.svg").exists()


@pytest.mark.slow
def test_a_users_own_workload_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    write_task(tmp_path, space=space_of(32, 64), budget={"trials": 3, "trial_train_seconds": 2.0}, confirm=UNCONFIRMED)
    report = "report task --html page.html"
    _, answer, _ = run(installed, tmp_path, "run task.yaml", "best task --format json", report)
    assert json.loads(answer)["study"] == "task"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<section id="objective">' in page and '<svg class="wide"' in page, "the wheel has its templates"
