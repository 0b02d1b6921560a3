"""Many drivers that start trials of one study at once, compared with workers on Optuna's RDBStorage.

A driver is a process with the real `Driver`, its store and an executor that ends each trial at once. So the whole
sequence is measured (look, choose, start, 20 observations written together, end), without training. A worker of Optuna
asks, reports 20 values and tells. Both run on one PostgreSQL server, in turn, on the server's cores: with fewer cores
than drivers, rates show the processor time of a trial over all processes. Forked processes share imported memory, but
not connections, history and sampler. Trials count after each process has started one. ``tpe`` is compared with the
default `TPESampler`, ``random`` with `RandomSampler`.

Bars: no trial failed, lost or started twice; no slot waits more than 5 s for its next trial; at least twice the trials
per second of Optuna. Run: python tests/benchmarks/many_starters.py
"""

if not __package__:
    __import__("from_clone")

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import optuna
import typer
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from bssearch import Store, StudySpec, open_store
from bssearch.records import TrialState
from bssearch.search.driver import Driver, Listener
from bssearch.search.history import History
from tests.benchmarks.driver_overhead import OBSERVATIONS, EmptyTrials, Started, spec_of
from tests.benchmarks.harness import one_of, script
from tests.factories import make_environment, store_study
from tests.postgres import running_postgres

FIRST = 5
"""Trials of a study before all drivers begin."""
LONGEST_TRIAL_S, LONGEST_WAIT_BAR_S, RATIO_BAR = 100.0, 5.0, 2.0


CASES = {"postgresql-8": (8, 320), "postgresql-64": (64, 512)}  # drivers, and the trials of all drivers

OPTUNA = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
SPACE: dict[str, BaseDistribution] = {
    "batch_size": IntDistribution(8, 128, log=True),
    "learning_rate": FloatDistribution(0.01, 1.0, log=True),
    "weight_decay": CategoricalDistribution([0.0, 1e-4, 1e-3]),
    "dropout": FloatDistribution(0.0, 0.5),
}
CONNECTIONS = "max_connections = 400\nautovacuum = on\n"

_processes = multiprocessing.get_context("fork")


class SearchIsOverError(Exception):
    """A driver saw the end of the search; confirmation is not measured."""


class UntilTheEnd(Listener):
    def search_ended(self, reason: str, history: History) -> None:
        raise SearchIsOverError


@dataclass(frozen=True)
class Rate:
    """Trials per second of all drivers, and the longest wait of a slot."""

    trials_per_second: float
    longest_wait_s: float


def in_processes(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``work(barrier, index, *arguments)`` in forked processes; return the results."""
    barrier, results = _processes.Barrier(count), _processes.SimpleQueue()
    started = [
        _processes.Process(target=_report, args=(results, work, barrier, index, *arguments)) for index in range(count)
    ]
    for process in started:
        process.start()
    found = [results.get() for _ in started]
    for process in started:
        process.join()
    failures = [one for one in found if isinstance(one, BaseException)]
    if failures:
        raise failures[0]
    return found


def _report(results: Any, work: Callable[..., Any], *arguments: Any) -> None:
    try:
        results.put(work(*arguments))
    except BaseException as error:
        results.put(RuntimeError(repr(error)))
        raise


def drive(barrier: Any, index: int, url: str, sampler: str, trials: int) -> list[Started]:
    executor, spec = EmptyTrials(), spec_of(trials, sampler, LONGEST_TRIAL_S)
    with open_store(url) as store:
        driver = Driver(spec, store, executor, make_environment(), UntilTheEnd())
        barrier.wait()
        executor.free_since = time.monotonic()
        with suppress(SearchIsOverError):
            driver.run()
    return executor.starts


def prepare(barrier: Any, index: int, url: str, sampler: str) -> None:
    with open_store(url) as store:
        make(store, spec_of(FIRST, sampler, LONGEST_TRIAL_S))


def make(store: Store, spec: StudySpec) -> None:
    """Make a study and run it in this process."""
    store_study(store, spec)
    Driver(spec, store, EmptyTrials(), make_environment(), Listener()).run()


def ours(url: str, sampler: str, drivers: int, trials: int) -> Rate:
    """Return the rate of the drivers; fail if a trial failed, is lost, or was started twice."""
    in_processes(1, prepare, url, sampler)
    found = in_processes(drivers, drive, url, sampler, trials + FIRST)
    [stored] = in_processes(1, read_back, url)
    assert [number for number, _, _ in stored] == list(range(1, trials + FIRST + 1)), "a number twice, or one missing"
    assert {state for _, state, _ in stored} <= {TrialState.REACHED, TrialState.CAPPED, TrialState.PRUNED}
    assert all(observations for _, _, observations in stored)
    assert sum(map(len, found)) == trials
    return rate_of(found)


def rate_of(found: Sequence[Sequence[Started]]) -> Rate:
    """Return the rate after each process has started a trial; before, processes compile their statements."""
    began = max(own[0].at for own in found)
    late = sorted((one for own in found for one in own if one.at > began), key=lambda one: one.at)
    return Rate(len(late) / (late[-1].at - began), max(one.wait_s for one in late))


def read_back(barrier: Any, index: int, url: str) -> list[tuple[int, TrialState, int]]:
    """Return number, state and count of observations of each stored trial."""
    with open_store(url, write=False) as store:
        trials = store.trials.of("toy")
        curves = store.trials.curves("toy", [trial.number for trial in trials])
    return [(trial.number, trial.state, len(curves[trial.number])) for trial in trials]


def optuna_worker(barrier: Any, index: int, url: str, sampler: str, trials: int, taken: Any) -> list[Started]:
    """Ask, report and tell until all trials are taken; return the starts."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(url)
    study = optuna.load_study(study_name="toy", storage=storage, sampler=OPTUNA[sampler](seed=index))
    barrier.wait()
    ended = time.monotonic()
    starts: list[Started] = []
    while True:
        with taken.get_lock():
            if taken.value >= trials:
                return starts
            taken.value += 1
        asked = ask_report_tell(study)
        starts.append(Started(asked, asked - ended))
        ended = time.monotonic()


def ask_report_tell(study: optuna.Study) -> float:
    """Run one trial; return the time at which it could begin to train."""
    trial = study.ask(SPACE)
    asked = time.monotonic()
    for step in range(OBSERVATIONS):
        trial.report(step / OBSERVATIONS, step)
    study.tell(trial, trial.params["learning_rate"])
    return asked


def prepare_optuna(barrier: Any, index: int, url: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.create_study(study_name="toy", storage=optuna.storages.RDBStorage(url))


def optunas(url: str, sampler: str, workers: int, trials: int) -> Rate:
    """Return the rate of Optuna's workers."""
    in_processes(1, prepare_optuna, url)
    return rate_of(in_processes(workers, optuna_worker, url, sampler, trials, _processes.Value("i", 0)))


def import_all() -> None:
    """Import all modules that trials need, before processes are forked."""
    with tempfile.TemporaryDirectory() as folder:
        for sampler, kind in OPTUNA.items():
            with open_store(f"sqlite:///{folder}/{sampler}.db") as store:
                make(store, spec_of(2 * FIRST + 10, sampler, LONGEST_TRIAL_S))
            study = optuna.create_study(storage=f"sqlite:///{folder}/optuna-{sampler}.db", sampler=kind())
            for _ in range(12):
                ask_report_tell(study)


def show(what: str, rate: Rate) -> None:
    print(f"  {what:16} {rate.trials_per_second:6.1f} trials/s, longest wait {rate.longest_wait_s:.2f} s", flush=True)


def measured(drivers: int, trials: int, sampler: str) -> tuple[float, float]:
    """Return the ratio of the rates of bssearch and Optuna, in turn on one server, and our longest wait."""
    with running_postgres(CONNECTIONS) as server:
        own = ours(server.create_database(), sampler, drivers, trials)
        show("bssearch", own)
        other = optunas(server.create_database(schema=False), sampler, drivers, trials)
        show("Optuna", other)
    ratio = own.trials_per_second / other.trials_per_second
    print(f"  ratio {ratio:.2f}", flush=True)
    return ratio, own.longest_wait_s


def main(
    case: Annotated[list[str] | None, one_of(CASES, "default: all")] = None,
    sampler: Annotated[list[str] | None, one_of(OPTUNA, "default: both")] = None,
    pairs: Annotated[int, typer.Option(help="measurements of both, one after the other")] = 3,
) -> bool:
    """Measure and print; return False if a bar is missed."""
    import_all()
    is_met = True
    for name, kind in itertools.product(case or CASES, sampler or OPTUNA):
        print(f"{name}, {CASES[name][1]} trials, {kind}", flush=True)
        ratios, waits = zip(*(measured(*CASES[name], kind) for _ in range(pairs)), strict=True)
        ratio, wait = statistics.median(ratios), max(waits)
        print(f"  median ratio {ratio:.2f} (bar {RATIO_BAR:g}), longest wait {wait:.2f} s (bar 5)", flush=True)
        is_met &= ratio >= RATIO_BAR and wait <= LONGEST_WAIT_BAR_S
    return is_met


if __name__ == "__main__":
    script(main, __doc__)
