"""Three processes on one database at the same moment, as several drivers of one study are."""

import json
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bssearch.storage.migrate import SCHEMA_HEAD
from bssearch.storage.repository import open_store
from tests.storage import racer

RACERS = 3


@dataclass
class Race:
    url: str
    counted: int
    reports: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def race(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Race:
    """Run all processes, each stage of all at once, and return what they report."""
    folder = tmp_path_factory.mktemp("race")
    url = f"sqlite:///{folder}/runs.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").create_database(schema=False)
    counter = folder / "counter"
    counter.write_text("0")
    processes = [_start(url, f"driver-{index}", counter) for index in range(RACERS)]
    try:
        for stage in racer.STAGES:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == stage
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
        reports = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return Race(url, int(counter.read_text()), reports)


def _start(url: str, name: str, counter: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "tests.storage.racer", url, name, str(counter)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_upgrades_and_the_others_find_it_done(race: Race) -> None:
    assert sorted(str(report["before"]) for report in race.reports) == [*[SCHEMA_HEAD] * (RACERS - 1), "None"]


def test_one_creates_the_study_and_the_others_are_told_so(race: Race) -> None:
    creators = [report["name"] for report in race.reports if report["created"]]
    assert len(creators) == 1
    with open_store(race.url, write=False) as store:
        assert store.studies.get("toy").created_by == creators[0]


def test_a_claim_lets_one_in_at_a_time(race: Race) -> None:
    assert race.counted == RACERS * racer.CLAIMS


def test_no_number_is_given_twice_and_none_is_lost(race: Race) -> None:
    given = {number: report["name"] for report in race.reports for number in report["numbers"]}
    assert sorted(given) == list(range(1, RACERS * racer.STARTS + 1))
    with open_store(race.url, write=False) as store:
        assert {trial.number: trial.lease_owner for trial in store.trials.of("toy")} == given


@pytest.mark.slow
def test_a_new_file_that_another_process_writes_is_waited_for(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE elsewhere (number INTEGER)")
        other.execute("BEGIN IMMEDIATE")
        ending = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        ending.start()
        with open_store(f"sqlite:///{path}") as store:
            assert store.studies.summaries() == []
        ending.join()
