"""A file that the released revision 0001 wrote, upgraded: a real study of the digits, 96 trials on a CPU."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bssearch.errors import SchemaError
from bssearch.records import Phase, TrialState
from bssearch.search.finding import answer
from bssearch.storage import migrate
from bssearch.storage.repository import open_store

WRITTEN = Path(__file__).parent / "data" / "revision_0001.sqlite"


@pytest.fixture
def old(path: Path) -> Path:
    shutil.copy(WRITTEN, path)
    return path


def _sums(path: Path) -> list[tuple[float, ...]]:
    """Return golden figures of a file: what revision 0001 itself gave for it is in the test below."""
    queries = (
        "SELECT count(*), sum(metric), sum(step), sum(learning_rate) FROM bss_observation",
        "SELECT count(*), sum(time_to_target_s), sum(samples), sum(seed % 1000) FROM bss_trial",
        "SELECT count(*), sum(step_seconds), sum(eval_every_steps) FROM bss_probe",
    )
    with closing(sqlite3.connect(path)) as connection:
        return [connection.execute(query).fetchone() for query in queries]


def test_it_is_upgraded_when_opened_and_nothing_of_it_is_lost(old: Path, sqlite_url: str) -> None:
    before = _sums(old)
    told: list[str] = []
    with open_store(sqlite_url, notify=told.append) as store:
        study = store.study("digits")
        assert (study.created_by, study.spec_hash, study.archived_at) == ("someone", "a0630ba2286b9e6f", None)
        assert study.environment is not None
        assert (study.environment.host, study.environment.device_name) == ("node-1", "AMD EPYC")
        trials = store.trials("digits")
        assert [trial.number for trial in trials] == list(range(1, 97))
        assert len([trial for trial in trials if trial.state is TrialState.REACHED]) == 75
        assert len([trial for trial in trials if trial.phase is Phase.CONFIRM]) == len(
            store.trials("digits", phase=Phase.CONFIRM)
        )
        assert all(trial.outcome is not None and trial.outcome.tokens is None for trial in trials)
        curves = store.curves("digits", [trial.number for trial in trials])
        assert sum(len(curve) for curve in curves.values()) == store.observation_count("digits") == 1177
        assert sum(one.metric for curve in curves.values() for one in curve) == pytest.approx(865.841666666664)
        cadences = {size: probe.eval_every_steps for size, probe in store.probes("digits").items()}
        assert cadences == {4: 15, 8: 16, 16: 16, 32: 11, 64: 9, 128: 5, 256: 3, 512: 1}
        assert store.log("digits", 1) is None
        assert store.claim("digits", "probe", owner="me", lease_seconds=60, is_alive=lambda owner: None)
    copy = old.with_name(f"{old.name}.before-{migrate.SCHEMA_HEAD}.bak")
    assert told == [
        f"the schema of {old} went from 0001 to {migrate.SCHEMA_HEAD} (the file as it was is kept as {copy})"
    ]
    assert _sums(old) == _sums(copy) == before


def test_its_answer_is_the_one_that_revision_0001_gave(old: Path, sqlite_url: str) -> None:
    with open_store(sqlite_url) as store:
        found = answer(store, "digits")
    assert found.optimal.batch_size == 64
    assert found.optimal.time_to_target_s is not None
    assert found.optimal.time_to_target_s.median == pytest.approx(0.1769540550019881)
    assert found.optimal.time_to_target_s.low == pytest.approx(0.13026950578265303)
    assert found.optimal.trial_numbers == [44, 52, 57, 66, 75, 84, 95]
    assert found.optimal.parameters["learning_rate"] == pytest.approx(0.19752693045655542)
    assert (found.optimal.steps_to_target, found.tied, found.flat_range) == (56, [64], [64, 64])
    assert found.largest_that_fits.batch_size == 512
    assert found.speedup.over_largest is not None
    assert found.speedup.over_largest.value == pytest.approx(4.403738646103237)
    assert found.speedup.over_default is not None
    assert found.speedup.over_default.value == pytest.approx(2.361489957340191)


def test_for_reading_it_is_refused_and_left_alone(old: Path, sqlite_url: str) -> None:
    with pytest.raises(SchemaError, match="at revision 0001"):
        open_store(sqlite_url, write=False)
    assert old.read_bytes() == WRITTEN.read_bytes()
    assert [file.name for file in old.parent.iterdir()] == [old.name]
