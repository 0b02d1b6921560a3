from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgres import Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.create_database()
