from __future__ import annotations

import pytest

from tests.search.law import LawExecutor


def run_by_law(patch: pytest.MonkeyPatch) -> LawExecutor:
    """Have commands run their trials by the law, at once, in place of worker processes."""
    executor = LawExecutor()
    patch.setattr("bssearch.executors.slots.LocalExecutor", lambda *_, **__: executor)
    return executor


@pytest.fixture
def by_law(monkeypatch: pytest.MonkeyPatch) -> LawExecutor:
    """An executor for one test, which may change it."""
    return run_by_law(monkeypatch)
