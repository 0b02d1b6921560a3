import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bssearch.records import (
    Environment,
    Lease,
    MemoryBasis,
    NewStudy,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
)
from bssearch.settings import packaged_folder
from bssearch.storage import migrate, trials
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment, make_plan, not_none
from tests.postgres import Postgres
from tests.schema import run_migrations

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
    peak_memory_basis=MemoryBasis.DEVICE,
    dropped_samples_per_epoch=5,
    contended=True,
    traceback="Traceback …",
)
CANCELLED = TrialOutcome(state=TrialState.CANCELLED, reason="stopped")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of a new SQLite file; its name needs quoting in a URI."""
    return tmp_path / "runs 100%#.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """An empty database of each kind, ready for writing."""
    if request.param == "sqlite":
        return f"sqlite:///{path}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.cleared_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, path: Path) -> str:
    """A database of each kind without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{path}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.create_database(schema=False)


@pytest.fixture
def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture(autouse=True)
def _no_grace_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases end although the tests' server has just started."""
    monkeypatch.setattr(trials, "RESTART_GRACE_S", 0.0)


@pytest.fixture
def migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every migration, in new SQLite files too."""
    monkeypatch.setattr(migrate, "_run_migrations", run_migrations)


def add_revision(monkeypatch: pytest.MonkeyPatch, folder: Path, revision: str, source: str) -> None:
    """Simulate a later version with one more revision, from migrations copied to ``folder``."""
    shutil.copytree(packaged_folder("migrations"), folder)
    (folder / "versions" / f"{revision}.py").write_text(source)
    monkeypatch.setattr(migrate, "packaged_folder", lambda name: folder)
    monkeypatch.setattr(migrate, "REVISIONS", (*migrate.REVISIONS, revision))
    monkeypatch.setattr(migrate, "SCHEMA_HEAD", revision)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def toy(store: Store) -> None:
    """Create the study toy."""
    add_study(store)


@pytest.fixture
def begun_toy(store: Store) -> None:
    """Create the study toy with a running trial."""
    begun(store)


def add_study(store: Store, name: str = "toy", **changes: Any) -> StudyRecord:
    values: dict[str, Any] = {
        "spec": {"workload": "digits", "space": {"dropout": [0.0, None]}},
        "spec_hash": "abc",
        "objective": "time_to_target",
        "target": Target(metric="accuracy", value=0.9),
        "created_by": "someone",
    }
    return store.studies.create(NewStudy(name=name, **{**values, **changes}))


def start_planned(
    store: Store,
    plan: TrialPlan,
    study: str = "toy",
    owner: str = "driver",
    seconds: float = 60.0,
) -> TrialRecord | None:
    return store.trials.start(study, plan, environment=make_environment(), lease=Lease(owner=owner, seconds=seconds))


def start(
    store: Store,
    study: str = "toy",
    *,
    lease_owner: str = "driver",
    lease_seconds: float = 60.0,
    environment: Environment | None = None,
    **changes: Any,
) -> int:
    lease = Lease(owner=lease_owner, seconds=lease_seconds)
    return not_none(
        store.trials.start(study, make_plan(**changes), environment=environment or make_environment(), lease=lease)
    ).number


def begun(store: Store, **changes: Any) -> int:
    """Store the study toy and start a trial of it."""
    add_study(store)
    return start(store, **changes)


def store_in(url: str | None = None, make: Callable[[Store], object] = add_study) -> None:
    """Store the study toy in a database, by default without a trial."""
    with open_store(url) as store:
        make(store)


def start_after(store: Store, after: int, owner: str, study: str = "toy") -> int | None:
    trial = start_planned(store, make_plan(after=after), study, owner)
    return None if trial is None else trial.number


def enqueue(store: Store) -> int:
    changes = {"train_seconds_limit": 5.0, "eval_every_steps": 3, "threads": 2, "uncapped": True}
    return store.trials.enqueue("toy", make_plan(sampled={"lr": 0.1}, seed=7, **changes))


def start_queued(store: Store, number: int, owner: str, **changes: Any) -> bool:
    limits = {"train_seconds_limit": 5.0, "eval_every_steps": 3, "threads": 2, **changes}
    return start_planned(store, make_plan(queued=number, **limits), owner=owner) is not None


def resume(store: Store, number: int, owner: str = "second", *, limit: float = 4.0, seconds: float = 60.0) -> bool:
    plan = make_plan(resumed=number, train_seconds_limit=limit)
    return start_planned(store, plan, owner=owner, seconds=seconds) is not None
