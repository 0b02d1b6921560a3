"""Commands connect to no address that the user did not name."""

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import run_by_law
from tests.cli.task import ran, write_task


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Addresses that anything in this process tried to look up or to connect to; none is reached."""
    tried: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        tried.append(arguments)
        raise OSError("there is no network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    return tried


def test_a_study_and_its_answer_connect_to_nothing(
    connections: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("example.org", 80))
    assert len(connections) == 1
    connections.clear()
    run_by_law(monkeypatch)
    write_task(tmp_path)
    ran(tmp_path, "run", "task.yaml")
    ran(tmp_path, "best")
    ran(tmp_path, "report", "--html", "page.html")
    assert connections == []
