"""Fake boards, installed as by another package."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bssearch.exchange.boards.base import BoardProcess
from tests.cli.task import environment
from tests.exchange.boards import fakes
from tests.packages import installed

FAKES = [name for name, one in vars(fakes).items() if isinstance(one, type) and issubclass(one, fakes.Keeping)]


class Notebook:
    """Notes of fake boards, and the gates at which they wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for gate in ("gate", "never"):
            os.mkfifo(folder / gate)

    def calls(self, board: str) -> list[dict[str, Any]]:
        """Calls of a board until now, without a half-written line."""
        file = self.folder / board
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def names(self, board: str) -> list[str]:
        return [call["call"] for call in self.calls(board)]

    def open_gate(self) -> None:
        """Let the next board pass the gate."""
        (self.folder / "gate").write_bytes(b"")


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """The fake boards, installed for this process and its children."""
    folder, site = tmp_path / "noted", tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv(fakes.FOLDER, str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), environment()["PYTHONPATH"]]))
    lines = [f"{name} = tests.exchange.boards.fakes:{name}" for name in FAKES]
    with installed(site, "fake_boards", {}, "\n".join(["[bssearch.boards]", "Missing = no_such_module:Board", *lines])):
        yield Notebook(folder)


@pytest.fixture
def start(notebook: Notebook) -> Iterator[Callable[..., BoardProcess]]:
    """Start boards by name; end them with the test."""
    made: list[BoardProcess] = []

    def start(*names: str, **settings: Any) -> BoardProcess:
        made.append(BoardProcess(names, **settings))
        return made[-1]

    yield start
    for one in made:
        if one._process.returncode is None:
            one.asked = 0
            one.close()
