"""Whether times to the target, and what a study recommends, are the same beside busy processes as on a quiet machine.

Run as ``python tests/benchmarks/busy_machine.py``: about an hour on two cores that do nothing else. It begins with the
shipped digits study (or another, ``--study``). Its confirmed batch sizes, each with its best configuration, are frozen
(or those of ``--configurations FILE.json`` are).

Times: the frozen configurations are run ``--runs`` times each, with seeds of their own, quiet and beside a process on
each CPU that multiplies matrices. A time is the study's own estimate, with its interval. Bar: the 95 % intervals of
busy ÷ quiet cover 1 as often as intervals that do so in 92 %, by a binomial test at 5 %.

Recommendations: the whole study runs ``--studies`` times each way. All that is recommended is then run together, with
fresh seeds, quiet. Bar: nine of ten recommendations are within 10 % of the fastest there, or were called provisional.

Quiet means, by the bars of the package's own contention checks: others use at most 0.2 CPUs, a thread waits for a CPU
in at most 10 % of its time, and at most a quarter of the looks at the reference kernel take 1.4 × as long as the
fastest tenth. What others use is watched in every trial, quiet or busy. Where the machine is not quiet, or a busy
process ended or got too little of a CPU, the measurement at hand is dropped.

Exits 0 where the bars are met, 1 where one is missed, 75 where the machine did not allow to measure, and with a code of
bssearch where something is wrong. Everything is kept in ``--database``: the same command goes on from there.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from bssearch.commands.opening import Launch
from bssearch.commands.run import run_study
from bssearch.errors import TargetNotReachedError
from bssearch.records import Configuration
from bssearch.spec import StudySpec, find_spec, load_spec
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import TEMPORARY, script
from tests.frozen import (
    FEWEST_RUNS,
    Ratio,
    Results,
    best_of_each_batch_size,
    by_identity,
    configurations_of,
    confirmed,
    coverage_document,
    coverage_text,
    documents_of,
    identity,
    is_as_nominal,
    ratio,
    read_configurations,
    remeasure,
    time_document,
    time_text,
)
from tests.quiet import NotMeasuredError, Watch, condition

NOMINAL = 0.92
WITHIN = 1.10
GOOD_SHARE = 0.9
NOT_RUN = os.EX_TEMPFAIL

CONDITIONS = ("quiet", "busy")
SEEDS = {"quiet": 1001, "busy": 1002, "together": 1003}
"""Seeds of the studies of frozen configurations; whole studies have 1, 2, …, quiet and busy in turns."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """The spec, the folders of its workload and of the databases, and what has been found.

    ``tolerance`` is above 1 in a try alone.
    """

    spec: StudySpec
    workload_folder: Path
    folder: Path
    results: Results
    tolerance: float

    def variant(self, key: str, seed: int) -> StudySpec:
        """Return the spec under another name, with another seed."""
        return self.spec.model_copy(update={"name": f"{self.spec.name}-{key}", "seed": seed})

    def url(self, key: str) -> str:
        """Return the URL of the database of one measurement."""
        return f"sqlite:///{self.folder / key}.db"

    def measured(self, key: str, state: str, measure: Callable[[Watch], T]) -> T:
        """Return what is measured in a state of the machine; drop its database where the state did not hold."""
        try:
            with condition(state, self.tolerance) as busy:
                watch = Watch(self.results, key, busy, self.tolerance)
                found = measure(watch)
                watch.check()
        except NotMeasuredError:
            self._drop(key)
            raise
        return found

    def recommend(self, key: str, state: str, seed: int) -> dict[str, Any]:
        """Return the recommendation of a whole study, as it was found before or by running it."""
        known: dict[str, Any] = self.results.found.setdefault("recommendations", {})
        if key not in known:
            spec = self.variant(key, seed)
            known[key] = self.measured(key, state, lambda watch: self._recommendation(key, state, spec, watch))
            self.results.save()
        found: dict[str, Any] = known[key]
        return found

    def frozen_times(self, key: str, state: str, configurations: Sequence[Configuration], runs: int) -> str:
        """Run configurations with seeds of their own, unless they have been, and return the name of their study."""
        spec, done = self.variant(key, SEEDS[key]), self.results.found.setdefault("measured", {})
        wanted = {"identities": sorted(map(identity, configurations)), "runs": runs}
        if done.get(key) != wanted:

            def measure(watch: Watch) -> None:
                remeasure(
                    spec, configurations, runs, Launch(db=self.url(key), folder=self.workload_folder, listener=watch)
                )

            self.measured(key, state, measure)
            done[key] = wanted
            self.results.save()
        return spec.name

    def _recommendation(self, key: str, state: str, spec: StudySpec, watch: Watch) -> dict[str, Any]:
        found: dict[str, Any] = {"condition": state, "seed": spec.seed, "study": spec.name}
        try:
            answer = run_study(spec, db=self.url(key), folder=self.workload_folder, listener=watch)
        except TargetNotReachedError:
            return {**found, "configuration": None, "provisional": False}
        with open_store(self.url(key), write=False) as store:
            configuration = store.trial(spec.name, answer.optimal.trial_numbers[0]).configuration
        return {
            **found,
            "configuration": asdict(configuration),
            "provisional": answer.provisional,
            "within_5_percent": answer.within_5_percent,
            "time_to_target_s": answer.optimal.time_to_target_s and answer.optimal.time_to_target_s.model_dump(),
        }

    def _drop(self, key: str) -> None:
        """Forget a measurement that does not count."""
        self.results.found.get("watched", {}).pop(key, None)
        self.results.save()
        for file in self.folder.glob(f"{key}.db*"):
            file.unlink()


def frozen_configurations(bench: Bench, given: Path | None) -> list[Configuration]:
    """Return the configurations to freeze: those given, or the best of each confirmed batch size of the first study."""
    found = bench.results.found
    if "configurations" not in found:
        if given is not None:
            chosen = read_configurations(given)
        else:
            bench.recommend("study-quiet-1", "quiet", 1)
            candidates = best_of_each_batch_size(
                confirmed(bench.url("study-quiet-1"), bench.variant("study-quiet-1", 1).name)
            )
            chosen = [one.configuration for one in candidates]
        found["configurations"] = documents_of(chosen)
        bench.results.save()
    return configurations_of(found["configurations"], str(bench.results.path))


def compare_times(bench: Bench, configurations: Sequence[Configuration], runs: int) -> bool:
    """Run the frozen configurations quiet and busy, print and store the ratios; return whether the bar is met."""
    quiet, busy = (
        by_identity(confirmed(bench.url(state), bench.frozen_times(state, state, configurations, runs)))
        for state in CONDITIONS
    )
    rows: list[dict[str, Any]] = []
    ratios: list[Ratio | None] = []
    print(f"\n{'batch':>6} {'quiet, s':>24} {'busy, s':>24} {'busy ÷ quiet':>24} {'step time ÷':>12}  covers 1")
    for configuration in sorted(configurations, key=lambda one: one.batch_size):
        sides = quiet[identity(configuration)], busy[identity(configuration)]
        found = ratio(sides[1].time, sides[0].time)
        ratios.append(found)
        steps = [one.time.step_time.seconds for one in sides if one.time.step_time is not None]
        row = {
            "batch_size": configuration.batch_size,
            "quiet": time_document(sides[0]),
            "busy": time_document(sides[1]),
            "ratio": None if found is None else asdict(found),
            "step_time_ratio": steps[1] / steps[0] if len(steps) == len(sides) else None,
            "covers_1": found is not None and found.covers_one,
            "covers_1_bare": found is not None and found.covers_one_bare,
        }
        rows.append(row)
        of_times = "a run missed" if found is None else str(found)
        of_steps = "–" if row["step_time_ratio"] is None else f"{row['step_time_ratio']:.3f}"
        print(
            f"{configuration.batch_size:>6} {time_text(sides[0]):>24} {time_text(sides[1]):>24} {of_times:>24} "
            f"{of_steps:>12}  {'yes' if row['covers_1'] else 'no'}"
        )
    coverage = coverage_document(ratios)
    is_met = is_as_nominal(coverage["held"], len(rows), NOMINAL)
    bench.results.found["times"] = {"rows": rows, **coverage, "met": is_met}
    bench.results.save()
    print(coverage_text(coverage))
    print(f"{'met' if is_met else 'missed'}: as many as intervals of which {NOMINAL:.0%} cover 1")
    return is_met


def compare_recommendations(bench: Bench, studies: int, runs: int) -> bool:
    """Run the whole studies, then all that they recommend together; return whether the bar is met."""
    found = [
        bench.recommend(f"study-{state}-{index + 1}", state, 2 * index + 1 + CONDITIONS.index(state))
        for index in range(studies)
        for state in CONDITIONS
    ]
    named = [one["configuration"] for one in found if one["configuration"] is not None]
    regrets: dict[str, float] = {}
    if named:
        together = {identity(one): one for one in configurations_of(named, str(bench.results.path))}
        study = bench.frozen_times("together", "quiet", list(together.values()), runs)
        times = {key: one.value for key, one in by_identity(confirmed(bench.url("together"), study)).items()}
        regrets = {key: value / min(times.values()) for key, value in times.items() if math.isfinite(value)}
    print(f"\n{'study':<16} {'batch':>6} {'÷ fastest':>10}  provisional")
    rows: list[dict[str, Any]] = []
    for one in found:
        recommended = None if one["configuration"] is None else Configuration(**one["configuration"])
        regret = None if recommended is None else regrets.get(identity(recommended))
        is_good = one["provisional"] or (regret is not None and regret <= WITHIN)
        batch = None if recommended is None else recommended.batch_size
        rows.append({**one, "batch_size": batch, "over_fastest": regret, "good": is_good})
        name, text = f"{one['condition']}, seed {one['seed']}", "missed" if regret is None else f"{regret:.3f}"
        print(f"{name:<16} {batch or '–':>6} {text:>10}  {'yes' if one['provisional'] else 'no'}")
    good = sum(bool(row["good"]) for row in rows)
    is_met = good >= GOOD_SHARE * len(rows)
    bench.results.found["regret"] = {"rows": rows, "good": good, "of": len(rows), "met": is_met}
    bench.results.save()
    print(f"{good} of {len(rows)} recommendations are within {WITHIN - 1:.0%} of the fastest, or called provisional")
    print(f"{'met' if is_met else 'missed'}: {GOOD_SHARE:.0%} of them")
    return is_met


def main(
    study: Annotated[str, typer.Option(help="a shipped study or a spec")] = "digits",
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE")] = None,
    configurations: Annotated[Path | None, typer.Option(help="a JSON file of configurations to freeze")] = None,
    runs: Annotated[int, typer.Option(min=FEWEST_RUNS, help="runs of each frozen configuration")] = 10,
    studies: Annotated[int, typer.Option(min=0, help="whole studies each way; 0 for the times alone")] = 5,
    database: Path = TEMPORARY / "bssearch-busy-machine",
    tolerance: Annotated[float, typer.Option(help="times what a quiet machine may use: for a try")] = 1.0,
) -> bool | int:
    """Measure what is missing, print, and judge."""
    torch.set_num_threads(1)
    try:
        path = find_spec(study)
        spec = load_spec(path, overrides or [])
        settings = {
            "study": study,
            "set": overrides or [],
            "runs": runs,
            "configurations": None if configurations is None else str(configurations.resolve()),
            "tolerance": tolerance,
        }
        bench = Bench(spec, path.resolve().parent, database, Results(database / "results.json", settings), tolerance)
        print(f"kept in {database}", flush=True)
        met = [compare_times(bench, frozen_configurations(bench, configurations), runs)]
        if studies:
            met.append(compare_recommendations(bench, studies, runs))
    except NotMeasuredError as error:
        print(f"not run: {error}")
        return NOT_RUN
    return all(met)


if __name__ == "__main__":
    script(main, __doc__)
