"""Whether a study in a SQLite file survives a kill, or a disk failure, at any write.

Run as ``python tests/benchmarks/crash_points.py [--points 200]``: some fifteen minutes, with a C compiler and Linux. A
study runs by a law; a preloaded library counts the writes to the database and its log. At a random write the process
ends in the middle of the write, or the write fails once, as on a broken disk. The output names the trials that the
process reported as ended. Then the study runs to its end.

Bar, for every point: the file is whole (``PRAGMA integrity_check``), every trial that was reported as ended is stored,
and the study completes with its budget and each number once. Exits 1 if a point misses the bar.
"""

if not __package__:
    __import__("from_clone")

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from bssearch import BSSearchError, Launch, open_store, run_study
from bssearch.records import Phase, TrialRecord
from bssearch.search.driver import Listener
from tests.benchmarks.harness import script, verdict
from tests.factories import make_spec
from tests.search.law import LawExecutor

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long seen = 0;

/* Return whether a file is the database or its log. */
static int is_ours(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, "study.db") != NULL;
}

/* Count a write; return 1 where it is to fail. Ends the process where it is to end. */
static int strikes(int file, const void *bytes, size_t count, off_t place,
                   ssize_t (*real)(int, const void *, size_t, off_t)) {
    const char *at = getenv("CRASH_AT"), *how = getenv("CRASH_HOW");
    if (at == NULL || !is_ours(file)) return 0;
    if (++seen != atol(at)) return 0;
    if (strcmp(how, "count") == 0) return 0;
    if (strcmp(how, "fail") == 0) return 1;
    if (real != NULL) real(file, bytes, count / 2, place);
    _exit(137);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off_t place) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    if (strikes(file, bytes, count, place, real)) { errno = EIO; return -1; }
    return real(file, bytes, count, place);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t place) { return pwrite64(file, bytes, count, place); }

int fdatasync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    if (strikes(file, NULL, 0, 0, NULL)) { errno = EIO; return -1; }
    return real(file);
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    if (strikes(file, NULL, 0, 0, NULL)) { errno = EIO; return -1; }
    return real(file);
}

__attribute__((destructor)) static void tell(void) {
    const char *how = getenv("CRASH_HOW");
    if (how != NULL && strcmp(how, "count") == 0) fprintf(stderr, "writes %ld\n", seen);
}
"""

TRIALS, TOP, RUNS = 12, 2, 3
SPEC = make_spec(budget={"trials": TRIALS, "trial_train_seconds": 100.0}, confirm={"top": TOP, "runs": RUNS})


class Reports(Listener):
    """Prints the number of each ended trial, once it is stored."""

    def ended(self, trial: TrialRecord, history: object) -> None:
        print(f"ended {trial.number} {trial.state.value}", flush=True)


def run_study_in(folder: Path) -> int:
    try:
        run_study(
            SPEC,
            Launch(db=f"sqlite:///{folder / 'study.db'}", listener=Reports(), make_executor=lambda *_: LawExecutor()),
        )
    except BSSearchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def run(folder: Path, shim: Path | None = None, at: int = 0, how: str = "") -> subprocess.CompletedProcess[str]:
    """Run the study in a new process, with the library if given."""
    preloaded = {} if shim is None else {"LD_PRELOAD": str(shim), "CRASH_AT": str(at), "CRASH_HOW": how}
    return subprocess.run(
        [sys.executable, __file__, "--child", str(folder)],
        env={**os.environ, **preloaded},
        capture_output=True,
        text=True,
        timeout=300,
    )


def reported(output: str) -> dict[int, str]:
    words = [line.split() for line in output.splitlines() if line.startswith("ended ")]
    return {int(number): state for _, number, state in (one for one in words if len(one) == 3)}


def faults(folder: Path, told: dict[int, str]) -> list[str]:
    """Faults of the file and the study after a crash; also runs the study to its end."""
    found: list[str] = []
    database = folder / "study.db"
    if database.exists() and database.stat().st_size:
        with closing(sqlite3.connect(database)) as connection:
            whole = connection.execute("PRAGMA integrity_check").fetchone()[0]
        if whole != "ok":
            found.append(f"the file is not whole: {whole}")
    if told:
        with open_store(f"sqlite:///{database}", write=False) as store:
            stored = {trial.number: trial.state.value for trial in store.trials.of(SPEC.name)}
        found += [
            f"trial {number} was reported {state}, and is {stored.get(number, 'missing')}"
            for number, state in told.items()
            if stored.get(number) != state
        ]
    done = run(folder)
    if done.returncode:
        return [*found, f"the study does not complete: {done.stderr.strip()[-200:]}"]
    with open_store(f"sqlite:///{database}", write=False) as store:
        trials = store.trials.of(SPEC.name)
    counted = Counter(trial.phase for trial in trials if trial.state.is_finished and not trial.state.is_missing)
    if counted[Phase.SEARCH] != TRIALS:
        found.append(f"{counted[Phase.SEARCH]} search trials, of {TRIALS}")
    if [trial.number for trial in trials] != list(range(1, len(trials) + 1)):
        found.append("numbers are missing or doubled")
    if any(not trial.state.is_finished for trial in trials):
        found.append("a trial is left running")
    return found


def main(
    points: int = 200, seed: int = 0, child: Annotated[Path | None, typer.Option(hidden=True)] = None
) -> bool | int:
    """Try all points, print the faults, and judge."""
    if child is not None:
        return run_study_in(child)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shim = folder / "shim.so"
        (folder / "shim.c").write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(folder / "shim.c"), "-ldl"], check=True)
        whole = folder / "whole"
        whole.mkdir()
        counted = run(whole, shim, 0, "count")
        writes = int(next(line for line in counted.stderr.splitlines() if line.startswith("writes ")).split()[1])
        print(f"the study makes {writes} writes to its database", flush=True)
        bad = struck = 0
        for index in range(points):
            how, at = ("end", "fail")[index % 2], rng.randint(1, writes)
            place = folder / f"point-{index}"
            place.mkdir()
            crashed = run(place, shim, at, how)
            struck += crashed.returncode != 0
            wrong = faults(place, reported(crashed.stdout))
            if "Traceback" in crashed.stderr:
                wrong.append(f"a traceback: {crashed.stderr.strip().splitlines()[-1][:200]}")
            if wrong:
                bad += 1
                print(f"write {at}, {how}: {'; '.join(wrong)}", flush=True)
            shutil.rmtree(place)
    print(f"{points} points, of which {struck} ended the run; {bad} left something wrong")
    return verdict(not bad)


if __name__ == "__main__":
    script(main, __doc__)
