"""States of one study in order, and functions to read and compare them."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import event

from bssearch import Store, StudySpec, open_store
from bssearch.records import (
    BranchMeasurement,
    GradientNoise,
    MemoryUse,
    NoiseMeasurement,
    TrialOutcome,
    TrialState,
)
from bssearch.search.finding import save_quick
from bssearch.storage.integrity import Kind
from bssearch.storage.transfer.study_copy import Copy
from tests.factories import make_curve, make_environment, make_probe, make_quick, make_spec
from tests.storage.conftest import OUTCOME, enqueue, resume, start, start_queued

REACHED = replace(OUTCOME, wall_seconds=5.0, further_test_metrics={"loss": 0.25}, warnings=("one", "two words"))
PAUSED = TrialOutcome(state=TrialState.PAUSED, reason="others first", steps=10, train_seconds=1.5)
OTHER = make_environment(host="other", torch_version="2.13.1")


def make_study(store: Store, spec: StudySpec | None = None) -> None:
    """Make a study bound to a device."""
    store.studies.create((spec or make_spec()).new_study("someone"))
    store.studies.bind("toy", make_environment())


def append(store: Store, number: int, *points: tuple[float, float], first: int = 0) -> None:
    curve = [replace(one, step=one.step + 10 * first) for one in make_curve(*points)]
    store.trials.append_observations("toy", [(number, one) for one in curve])


def finish(store: Store, number: int, outcome: TrialOutcome = REACHED) -> None:
    store.trials.finish("toy", number, outcome, steps_x_step_time_s=0.5)


def noise(step: int) -> NoiseMeasurement:
    scale = GradientNoise(scale=40.0 + step, low=30.0, high=50.0 + step, passes=4)
    return NoiseMeasurement(batch_size=32, micro_batch_size=32, step=step, metric=0.8, noise=scale)


def memory(*, fits: bool) -> MemoryUse:
    return MemoryUse(micro_batch_size=8, fits=fits, peak_memory_bytes=None if fits else 7)


def branch(digest: str) -> BranchMeasurement:
    return BranchMeasurement(
        digest=digest,
        checkpoint="at 10",
        start_samples=320,
        samples=640,
        batch_size=64,
        micro_batch_size=32,
        learning_rate=0.1,
        seed=1,
        start_metric=0.4,
        metric=None,
    )


STEPS: tuple[Callable[[Store], object], ...] = (
    make_study,
    lambda store: store.probes.add_step_time("toy", make_environment(), make_probe(8), 1),
    lambda store: store.probes.add_step_time("toy", make_environment(), make_probe(16), 1),
    start,
    lambda store: append(store, 1, (0.0, 0.1), (1.0, 0.5)),
    lambda store: append(store, 1, (2.0, 0.9), first=2),
    lambda store: finish(store, 1),
    lambda store: store.trials.save_log("toy", 1, "a log"),
    lambda store: start(store, environment=OTHER, seed=1),
    lambda store: append(store, 2, (0.0, -0.0)),
    lambda store: finish(store, 2, PAUSED),
    enqueue,
    lambda store: store.probes.save_memory("toy", OTHER, memory(fits=True)),
    lambda store: resume(store, 2),
    lambda store: append(store, 2, (1.0, 0.3), first=1),
    lambda store: finish(store, 2, PAUSED),
    lambda store: store.probes.save_noise("toy", make_environment(), noise(10)),
    lambda store: start_queued(store, 3, "driver"),
    lambda store: store.leases.mark_lost("toy", is_alive=lambda owner: False),
    lambda store: start(store, retry_of=3, seed=7),
    lambda store: store.studies.keep_spec("toy", {"name": "toy", "slots": 1}),
    lambda store: store.studies.keep_spec("toy", {"name": "toy", "slots": 2}),
    lambda store: save_quick(store, "toy", make_quick(study="toy")),
    lambda store: store.probes.add_branch("toy", OTHER, branch("a")),
    lambda store: finish(store, 4),
    lambda store: store.probes.save_noise("toy", make_environment(), noise(20)),
    lambda store: store.probes.save_memory("toy", OTHER, memory(fits=False)),
    lambda store: store.trials.save_log("toy", 1, "a longer log"),
    lambda store: store.probes.add_step_time("toy", make_environment(), make_probe(8), 2),
    lambda store: store.trials.settle_paused("toy"),
)
"""Changes of a study, in order."""


def make_states(folder: Path) -> list[Path]:
    """Make a SQLite file of each state of a study, in order."""
    file, states = folder / "study.db", []
    with open_store(f"sqlite:///{file}") as store:
        for number, step in enumerate(STEPS):
            step(store)
            states.append(_copied(file, folder / f"state {number}.db"))
    return states


def _copied(file: Path, copy: Path) -> Path:
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def copies(store: Store) -> list[Copy]:
    """Copies of a store's studies, to join with another store."""
    return store.transfer.read(None, "the source")


def rows(store: Store, name: str = "toy") -> dict[Kind, dict[Any, Any]]:
    """All exported rows of a study."""
    (copy,) = store.transfer.read([name], "here")
    return copy.rows


def everything(store: Store) -> dict[str, list[Any]]:
    """All rows of all tables, ids and revisions included."""
    from bssearch.storage.models import METADATA

    with store.reading() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(table.select().order_by(*table.primary_key))]
            for table in METADATA.sorted_tables
        }


class Interrupted(Exception):  # noqa: N818 - it is no error, but what a test injects
    """An injected interruption."""


@contextmanager
def interrupted_at(store: Store, statement: int) -> Iterator[None]:
    """Raise `Interrupted` before a store's ``statement``, counted from 0; not at all if there are fewer."""
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen > statement:
            raise Interrupted

    event.listen(store._engine, "before_cursor_execute", count)
    try:
        with suppress(Interrupted):
            yield
    finally:
        event.remove(store._engine, "before_cursor_execute", count)
