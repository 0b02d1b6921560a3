from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bssearch.records import Configuration, Phase, StudyRecord, Target, TrialOutcome, TrialState
from bssearch.storage import leases
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment
from tests.postgres import Postgres

LEASE: dict[str, Any] = {"lease_owner": "driver", "lease_seconds": 60.0}
TRIAL: dict[str, Any] = {
    "configuration": Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1),
    "sampled": None,
    "phase": Phase.SEARCH,
    "uncapped": False,
    "seed": 0,
    "train_seconds_limit": 10.0,
    "eval_every_steps": 5,
    "threads": 1,
    "retry_of": None,
}


OUTCOME = TrialOutcome(
    state=TrialState.REACHED,
    reason="reached accuracy 0.9",
    steps=123,
    samples=2**40,
    train_seconds=1.25,
    evaluation_seconds=0.5,
    warmup_seconds=0.25,
    other_seconds=0.125,
    wall_seconds=2.125,
    time_to_target_s=1.2345678901234567,
    steps_to_target=118,
    last_miss_step=115,
    last_miss_seconds=1.2,
    first_hit_step=120,
    first_hit_seconds=1.25,
    final_metric=0.91,
    best_metric=0.92,
    test_metric=0.9,
    peak_memory_bytes=2**38,
    dropped_samples_per_epoch=5,
    contended=True,
    traceback="Traceback …",
)
CANCELLED = TrialOutcome(state=TrialState.CANCELLED, reason="stopped")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A SQLite file that is not there yet; its name needs quoting in a URI."""
    return tmp_path / "runs 100%#.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """A database of each kind that keeps the store's contract: it can be opened for writing, and holds nothing."""
    if request.param == "sqlite":
        return f"sqlite:///{path}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.cleared_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, path: Path) -> str:
    """A database of each kind without any tables."""
    if request.param == "sqlite":
        return f"sqlite:///{path}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.create_database(schema=False)


@pytest.fixture
def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture(autouse=True)
def _no_grace_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' server has just been started: without this no lease of a test would ever end."""
    monkeypatch.setattr(leases, "RESTART_GRACE_S", 0.0)


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
    number = store.start_trial(study, **{**TRIAL, "environment": make_environment(), **LEASE, **changes})
    assert number is not None
    return number


def start_after(store: Store, after: int, owner: str, study: str = "toy") -> int | None:
    changes = {**LEASE, "lease_owner": owner, "after": after}
    return store.start_trial(study, **{**TRIAL, "environment": make_environment(), **changes})


def enqueue(store: Store) -> int:
    return store.enqueue_trial(
        "toy",
        configuration=TRIAL["configuration"],
        sampled={"lr": 0.1},
        seed=7,
        train_seconds_limit=5.0,
        eval_every_steps=3,
        threads=2,
    )


def start_queued(store: Store, number: int, owner: str, **changes: Any) -> bool:
    limits = {
        "configuration": TRIAL["configuration"],
        "train_seconds_limit": 5.0,
        "eval_every_steps": 3,
        "threads": 2,
        **changes,
    }
    lease = {**LEASE, "lease_owner": owner}
    return store.start_queued("toy", number, environment=make_environment(), **limits, **lease)
