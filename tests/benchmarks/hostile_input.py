"""Whether random input ever causes a traceback or a hang, or takes the memory of a machine.

Run as ``python tests/benchmarks/hostile_input.py [--cases 10000] [--seeds 3] [--kind NAME]``: some forty minutes a seed
on two cores, most of them for the rows. A process for each kind and seed tries random cases: the kinds of
``tests/hostile.py``, stored rows, rows on a PostgreSQL server, databases of Optuna, and transfers of whole studies
(``tests/hostile_transfers.py``), after which a database is as before or has the whole study.

Bar: a case raises only bssearch's errors and takes at most 2 s of CPU time (of stored rows: each question and each
command), and no process grows by more than 300 MB. Exits 1 if a bar is missed.
"""

if not __package__:
    __import__("from_clone")

import random
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

from bssearch import Launch, run_study
from tests.benchmarks.harness import one_of, script, verdict
from tests.factories import make_spec
from tests.hostile import KINDS, LIBRARY_KINDS, Kind, OptunaDatabases, StoredRows, make_optuna_database, server_rows
from tests.hostile_transfers import Transfers
from tests.postgres import running_postgres
from tests.search.law import LawExecutor

LONGEST_S = 2.0
MOST_MB = 300


def stored_rows(folder: Path) -> Kind:
    """Run a study; return the kind of its rows."""
    file = folder / "made.db"
    spec = make_spec(budget={"trials": 10, "trial_train_seconds": 100.0}, confirm={"top": 2, "runs": 3})
    run_study(spec, Launch(db=f"sqlite:///{file}", make_executor=lambda *_: LawExecutor()))
    rows = StoredRows(file, spec.name)
    return Kind("stored rows", rows.attempt, rows.seconds)


@contextmanager
def made_kind(name: str, folder: Path) -> Iterator[Kind]:
    """Give a kind, after its rows or databases are made."""
    if name == "optuna databases":
        make_optuna_database(folder / "optuna.db")
        databases = OptunaDatabases(folder / "optuna.db")
        yield Kind(name, databases.attempt, databases.seconds)
    elif name == "study transfers":
        transfers = Transfers(folder)

        def attempt(rng: random.Random, folder: Path) -> None:
            fault = transfers.fails(rng.getrandbits(31))
            assert fault is None, fault

        yield Kind(name, attempt)
        print(f"study transfers: {dict(transfers.outcomes)}", flush=True)
        transfers.close()
    elif name == "server rows":
        stored_rows(folder)
        with running_postgres() as server, server_rows(server, folder / "made.db", make_spec().name) as rows:
            yield Kind(name, rows.attempt, rows.seconds)
            print(f"server rows: the server took {rows.changed:,} values", flush=True)
    elif name == "stored rows":
        yield stored_rows(folder)
    else:
        yield next(one for one in (*KINDS, *LIBRARY_KINDS) if one.name == name)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tried(name: str, seed: int, cases: int) -> tuple[list[str], float, float]:
    """Try the cases of a kind; return failures, the longest seconds and the MB grown. The tests use other seeds."""
    with tempfile.TemporaryDirectory() as made, made_kind(name, Path(made)) as kind:
        inside = Path(made) / "case"
        inside.mkdir()
        kind.fails(seed, inside)  # imports
        before, failed, longest = peak_mb(), [], 0.0
        for case in range(cases):
            number = 1_000_000 * (seed + 1) + case
            began = time.process_time()
            error = kind.fails(number, inside)
            longest = max([longest, *(kind.seconds or [time.process_time() - began])])
            if kind.seconds is not None:
                kind.seconds.clear()
            if error is not None:
                failed.append(f"case {number}: {type(error).__name__}: {error}"[:200])
        return failed, longest, peak_mb() - before


NAMES = [
    *(kind.name for kind in (*KINDS, *LIBRARY_KINDS)),
    "stored rows",
    "server rows",
    "optuna databases",
    "study transfers",
]


def main(
    cases: int = 10_000,
    seeds: int = 3,
    kind: Annotated[list[str] | None, one_of(NAMES, "this kind alone; may be repeated")] = None,
) -> bool:
    """Try the kinds, print a table, and judge."""
    print(f"{'kind':<18} {'seed':>4} {'cases':>7} {'failed':>7} {'longest, s':>11} {'grown, MB':>10}")
    is_good = True
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        asked = {(name, seed): pool.submit(tried, name, seed, cases) for seed in range(seeds) for name in kind or NAMES}
        for (name, seed), result in asked.items():
            failed, longest, grown = result.result()
            print(f"{name:<18} {seed:>4} {cases:>7,} {len(failed):>7} {longest:>11.2f} {grown:>10.0f}", flush=True)
            print(*failed[:5], sep="\n", end="\n" if failed else "")
            is_good &= not failed and longest <= LONGEST_S and grown <= MOST_MB
    return verdict(is_good)


if __name__ == "__main__":
    script(main, __doc__)
