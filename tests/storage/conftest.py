from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bssearch.records import Configuration, Phase, StudyRecord, Target
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A SQLite file that is not there yet; its name needs quoting in a URI."""
    return tmp_path / "runs 100%#.db"


@pytest.fixture(params=["sqlite"])
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """An empty database of each kind that keeps the store's contract."""
    assert request.param == "sqlite"
    return f"sqlite:///{path}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


def add_study(store: Store, name: str = "toy", **changes: Any) -> StudyRecord:
    values: dict[str, Any] = {
        "spec": {"workload": "digits", "space": {"dropout": [0.0, None]}},
        "spec_hash": "abc",
        "objective": "time_to_target",
        "target": Target(metric="accuracy", value=0.9),
        "created_by": "someone",
    }
    return store.create_study(name, **{**values, **changes})


def start(store: Store, study: str = "toy", **changes: Any) -> int:
    values: dict[str, Any] = {
        "configuration": Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1),
        "sampled": None,
        "phase": Phase.SEARCH,
        "evidence": False,
        "seed": 0,
        "train_seconds_limit": 10.0,
        "eval_every_steps": 5,
        "threads": 1,
        "retry_of": None,
        "environment": make_environment(),
        "lease_owner": "driver",
        "lease_seconds": 60.0,
    }
    return store.start_trial(study, **{**values, **changes})
