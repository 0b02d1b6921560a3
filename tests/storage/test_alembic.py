"""The four tests that pytest-alembic ships, of our migrations on every database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from alembic.config import Config
from pytest_alembic.config import Config as RunnerConfig
from pytest_alembic.runner import MigrationContext, runner
from pytest_alembic.tests import (
    test_model_definitions_match_ddl,
    test_single_head_revision,
    test_up_down_consistency,
    test_upgrade,
)

from bssearch.settings import packaged_folder
from bssearch.storage.connection.engine import create_engine_for, writing

__all__ = [
    "test_model_definitions_match_ddl",
    "test_single_head_revision",
    "test_up_down_consistency",
    "test_upgrade",
]


@pytest.fixture
def alembic_runner(empty_url: str) -> Iterator[MigrationContext]:
    config = Config()
    config.set_main_option("script_location", str(packaged_folder("migrations")))
    config.set_main_option("path_separator", "os")
    engine = create_engine_for(empty_url, foreign_keys=False)
    with writing(engine) as connection, runner(RunnerConfig(alembic_config=config), connection) as found:
        yield found
    engine.dispose()
