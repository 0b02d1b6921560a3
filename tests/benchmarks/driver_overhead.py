"""Seconds of a driver per trial beside 100, 1,000 and 5,000 stored trials, and of its first look at 5,000.

A real driver and a SQLite file. The executor ends each trial at once after 20 observations; the sampler's choices are
prepared. A trial's cost is the time from its submission to the next submission: storing its observations and its end,
asking the pruner at each, computing a due answer, planning and storing the next trial. The first look is the time from
the driver's creation to its first submission.

Bars: the median at 5,000 is at most 1.5 times the median at 100 and at most 40 ms; the first look takes at most 2 s.
Run: python tests/benchmarks/driver_overhead.py
"""

if not __package__:
    __import__("from_clone")

import itertools
import random
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from bssearch import StudySpec, open_store
from bssearch.executors.base import Event
from bssearch.records import TrialEnded, TrialObserved, TrialRequest
from bssearch.search.driver import Driver, Listener
from bssearch.search.engine import Engine
from bssearch.search.history import History
from bssearch.search.samplers.base import Choice, Sampler
from tests.benchmarks.harness import script
from tests.factories import make_environment, make_spec, store_study
from tests.search import law

SIZES = (100, 1000, 5000)
MEASURED = 20
TEMPLATES = 10
OBSERVATIONS = 20
RATIO_BAR, OVERHEAD_BAR_S, FIRST_LOOK_BAR_S = 1.5, 0.040, 2.0


@dataclass(frozen=True)
class Started:
    """When a trial could begin to train, and how long its slot was free before."""

    at: float
    wait_s: float


@dataclass
class EmptyTrials(law.LawExecutor):
    """Ends each trial at once with 20 observations, and records the idle seconds of its slot."""

    free_since: float = field(default_factory=time.monotonic)
    starts: list[Started] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        now = time.monotonic()
        self.starts.append(Started(now, now - self.free_since))
        super().submit(request)

    def events(self, timeout: float) -> list[Event]:
        if not self.running:
            time.sleep(timeout)
            return []
        request = self.running[0]
        found = super().events(timeout)
        total = law.steps_needed(request.plan.configuration) * law.step_seconds(request.plan.configuration.batch_size)
        shares = [n / (OBSERVATIONS - 1) for n in range(OBSERVATIONS)]
        self.free_since = time.monotonic()
        assert isinstance(found[-1], TrialEnded)
        return [*(TrialObserved(request.number, self.observe(request, share, total)) for share in shares), found[-1]]


@dataclass
class MadeBeforehand(Sampler):
    """Chooses at once, cycling through the batch sizes with random learning rates."""

    spec: StudySpec
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    asked: int = 0

    def choose(self, history: History, batch_size: int | None = None) -> Choice:
        size = self.spec.batch_sizes[self.asked % len(self.spec.batch_sizes)]
        self.asked += 1
        rate = 0.1 * (size / 32) ** 0.5 * self.rng.uniform(0.3, 3.0)
        configuration = replace(
            self.spec.default_configuration, batch_size=size, micro_batch_size=size, learning_rate=rate
        )
        return Choice(configuration, self.spec.space.encode(configuration))


def spec_of(trials: int, sampler: str = "auto", trial_train_seconds: float = 10.0) -> StudySpec:
    """Return a study of this number of search trials, without confirmation."""
    return make_spec(
        sampler={"name": sampler},
        pruner={"checkpoint_gib": 0},
        confirm={"runs": 0},
        budget={"trials": trials, "trial_train_seconds": trial_train_seconds},
    )


def run(url: str, trials: int) -> tuple[float, list[float]]:
    """Search a study to a number of trials; return the seconds of the first look, and of each trial."""
    spec, executor = spec_of(trials), EmptyTrials()
    with open_store(url) as store:
        if store.studies.find(spec.name) is None:
            store_study(store, spec)
        began = time.monotonic()
        driver = Driver(spec, store, executor, make_environment(), Listener())
        driver.engine = Engine(spec, sampler=MadeBeforehand(spec))
        driver.run()
    at = [one.at for one in executor.starts]
    return at[0] - began, [after - before for before, after in itertools.pairwise(at)]


def multiply(file: Path, trials: int) -> None:
    """Copy the trials of a study, with their observations, up to a number of trials."""
    with closing(sqlite3.connect(file)) as connection:
        names = {
            table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            for table in ("bss_trial", "bss_observation")
        }
        columns = [name for name in names["bss_trial"] if name != "id"]
        replaced = {"number": "n.i", "plan_id": "NULL"}
        values = ", ".join(replaced.get(name, name) for name in columns)
        connection.execute(
            f"WITH RECURSIVE n(i) AS (SELECT {TEMPLATES + 1} UNION ALL SELECT i + 1 FROM n WHERE i < {trials}) "
            f"INSERT INTO bss_trial ({', '.join(columns)}) "
            f"SELECT {values} FROM n JOIN bss_trial ON number = 1 + (n.i - 1) % {TEMPLATES}"
        )
        values = ", ".join("made.id" if name == "trial_id" else f"old.{name}" for name in names["bss_observation"])
        connection.execute(
            f"INSERT INTO bss_observation ({', '.join(names['bss_observation'])}) SELECT {values} FROM bss_trial made "
            f"JOIN bss_trial template ON template.number = 1 + (made.number - 1) % {TEMPLATES} "
            f"JOIN bss_observation old ON old.trial_id = template.id WHERE made.number > {TEMPLATES}"
        )
        connection.commit()


def main() -> bool:
    """Measure and print; return 1 above a bar."""
    overheads: dict[int, float] = {}
    first_look = 0.0
    for trials in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "study.db"
            run(f"sqlite:///{file}", TEMPLATES)
            multiply(file, trials)
            first_look, seconds = run(f"sqlite:///{file}", trials + MEASURED)
        overheads[trials] = statistics.median(seconds)
        print(
            f"{trials:5,} stored trials: {overheads[trials] * 1e3:7.1f} ms a trial (median of {len(seconds)}; "
            f"mean {statistics.fmean(seconds) * 1e3:.1f}), first look {first_look:.2f} s",
            flush=True,
        )
    few, many = overheads[SIZES[0]], overheads[SIZES[-1]]
    print(
        f"ratio {many / few:.2f} (bar {RATIO_BAR:g}), {many * 1e3:.1f} ms (bar {OVERHEAD_BAR_S * 1e3:g}), "
        f"first look {first_look:.2f} s (bar {FIRST_LOOK_BAR_S:g})"
    )
    return many <= RATIO_BAR * few and many <= OVERHEAD_BAR_S and first_look <= FIRST_LOOK_BAR_S


if __name__ == "__main__":
    script(main, __doc__)
