"""Three drivers on one study, while drivers and workers are killed, stopped and interrupted at random."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from bssearch.errors import LaunchError
from tests.cli.task import UNCONFIRMED, bssearch, command, environment, space_of, write_task
from tests.cli.test_interruptions import alive, check_complete, trials

DRIVERS = 3
BUDGET = 40
SECONDS = 60.0
"""For so long at most something is done to them."""

ENDED = {0, 5, 130, -signal.SIGKILL}
"""Complete, complete without a hit, interrupted, killed."""


class Drivers:
    """The drivers of a study in a folder, and every process that they ever started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[subprocess.Popen[str]] = []
        self.family: dict[int, psutil.Process] = {}
        self.exits: list[tuple[int, str]] = []

    def keep_up(self) -> None:
        """Start drivers until there are `DRIVERS`; note how those that ended did, and what they had started."""
        for process in list(self.running):
            if process.poll() is not None:
                self.running.remove(process)
                self.exits.append((process.returncode, self._log_of(process).read_text()[-2000:]))
        while len(self.running) < DRIVERS:
            with (self._folder / "starting.log").open("w") as log:
                process = subprocess.Popen(
                    command("run", "task.yaml"), cwd=self._folder, env=environment(), stderr=log, text=True
                )
            (self._folder / "starting.log").rename(self._log_of(process))
            self.running.append(process)
        for process in self.running:
            with suppress(psutil.Error):
                own = psutil.Process(process.pid)
                self.family |= {one.pid: one for one in (own, *own.children(recursive=True))}

    def _log_of(self, process: subprocess.Popen[str]) -> Path:
        return self._folder / f"{process.pid}.log"

    def strike(self, rng: random.Random) -> None:
        """Do something to one of the drivers, or to a worker of it."""
        process = rng.choice(self.running)
        with suppress(psutil.Error):
            driver = psutil.Process(process.pid)
            workers = driver.children(recursive=True)
            kind = rng.choice(("kill driver", "kill worker", "kill worker", "interrupt", "stop"))
            if kind == "kill driver":
                driver.kill()
            elif kind == "kill worker" and workers:
                rng.choice(workers).kill()
            elif kind == "interrupt" and self._log_of(process).stat().st_size:  # it has begun
                driver.send_signal(signal.SIGINT)
            elif kind == "stop":
                driver.suspend()
                time.sleep(0.5)
                driver.resume()

    def end(self) -> None:
        """Kill what is left."""
        for one in alive(list(self.family.values())):
            with suppress(psutil.Error):
                one.kill()
        for process in self.running:
            process.wait()


@contextmanager
def drivers_of(folder: Path) -> Iterator[Drivers]:
    made = Drivers(folder)
    try:
        yield made
    finally:
        made.end()


def _lost_its_worker(code: int, words: str) -> bool:
    """Return whether a driver ended because its worker was killed as it measured step times, when no trial ran."""
    return code == LaunchError.exit_code and "killed by SIGKILL" in words


def searched(folder: Path) -> int:
    return sum(
        trial["phase"] == "search" and trial["state"] not in {"lost", "failed", "cancelled", "running", "paused"}
        for trial in trials(folder)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_study_outlives_whatever_happens_to_its_drivers(tmp_path: Path, seed: int) -> None:
    write_task(
        tmp_path,
        workload_settings={"step_seconds": 0.01},
        target={"metric": "accuracy", "value": 1.0},
        space=space_of(32, 64),
        pruner={"name": "none"},
        budget={"trials": BUDGET, "trial_train_seconds": 0.8},
        confirm=UNCONFIRMED,
    )
    rng = random.Random(seed)
    with drivers_of(tmp_path) as drivers:
        drivers.keep_up()
        while bssearch("status", "task", cwd=tmp_path).returncode:
            time.sleep(0.5)
        began, struck = time.monotonic(), 0
        while time.monotonic() - began < SECONDS and (not struck or searched(tmp_path) < BUDGET - 5):
            time.sleep(rng.uniform(0.5, 3.0))
            drivers.keep_up()
            drivers.strike(rng)
            struck += 1
        drivers.end()
        drivers.keep_up()
        drivers.end()
        assert struck >= 5
        assert all(code in ENDED or _lost_its_worker(code, words) for code, words in drivers.exits), drivers.exits
        assert not any("Traceback" in said for _, said in drivers.exits)
        deadline = time.monotonic() + 10
        while alive(list(drivers.family.values())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive(list(drivers.family.values()))
    found = check_complete(tmp_path, BUDGET)
    lost = {trial["number"] for trial in found if trial["state"] in {"lost", "failed"} and trial["phase"] == "search"}
    assert lost, "something had happened to trials"
