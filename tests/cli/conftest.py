from __future__ import annotations

import pytest

from tests.search.law import LawExecutor


@pytest.fixture
def by_law(monkeypatch: pytest.MonkeyPatch) -> LawExecutor:
    """Have commands run their trials by the law, at once, in place of worker processes."""
    executor = LawExecutor()
    monkeypatch.setattr("bssearch.executors.local.LocalExecutor", lambda *_, **__: executor)
    return executor
