"""Processes in which draws of a simulation are made."""

from __future__ import annotations

import os

import pytest

from bssearch.settings import environment_with
from bssearch.simulation.processes import THREADS


def test_processes_that_start_meanwhile_compute_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    given, *unset = THREADS
    monkeypatch.setenv(given, "7")
    for name in unset:
        monkeypatch.delenv(name, raising=False)
    with environment_with(dict.fromkeys(THREADS, "1")):
        assert {name: os.environ[name] for name in THREADS} == dict.fromkeys(THREADS, "1")
    assert os.environ[given] == "7"
    assert not set(unset) & set(os.environ)
