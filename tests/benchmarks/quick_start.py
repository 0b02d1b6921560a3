"""What a study spends to its verdict when it begins with a quick answer, against the same study by itself, in pairs.

Run as ``python tests/benchmarks/quick_start.py TABLE.csv.gz@TARGET…``: 50 pairs of studies a table, and 50 on laws
drawn at random, each with another default, drawn from the combinations that reach the target; six minutes of one core
for two targets. Both studies of a pair have one seed. The first is ``bssearch run``; the second makes the runs
of ``bssearch quick``, and then runs from its answer. Search, confirmation and verdict are those of real studies, on a
virtual clock; confirmation runs take fresh seeds of the table's smooth truth (`tests.benchmarks.simulate.truth`).

Counted are the train seconds of everything: probes, search and confirmation; of the second study the runs of the quick
answer too, a training of its fastest configuration up to the target, where gradients are measured, and the measurement
at its share of a quick answer's time (0.15). A run of the quick answer has the table's limit, and is a cell with the
default's other parameters and the recorded learning rate nearest to the rule of the root.

A table has no gradients. The noise scale is the table's own B_crit times an error, drawn for each pair, log-normal with
1.5 octaves (`bssearch.noise.CRITICAL_BATCH_OCTAVES`); B_crit is that of the law nearest to the least true steps of each
batch size, tuned. With ``--noise-error 8`` every noise scale is off by that factor instead, upwards in every other
pair: what a wrong quick answer costs.

Printed for each table: the median of the ratios of the paired costs, with its 90 % interval by bootstrap over the
pairs; the mean regret of either recommended batch size (true time at it over the least, less 1), and of the promised
one, with their intervals; the share within 5 %; by how much the configuration found at the largest batch size is slower
than the best one there; and where the seconds went, over the least true time. Exits 1 where a median is above 0.9.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bssearch.analysis.answer import Answer
from bssearch.analysis.law.critical_batch import CriticalBatchPosterior, ExpectedOptimum
from bssearch.analysis.law.quick import QuickPrior
from bssearch.commands import quick
from bssearch.errors import TargetNotReachedError
from bssearch.history import History, measured_seconds
from bssearch.intervals import FLAT_RATIO
from bssearch.noise import CRITICAL_BATCH_OCTAVES
from bssearch.records import Configuration, Phase, TrialPlan
from bssearch.search import events
from bssearch.search.engine import Engine
from bssearch.spec.parts import ConfirmSpec, PrunerSpec
from tests.benchmarks.harness import script
from tests.benchmarks.simulate.processes import repeating
from tests.benchmarks.simulate.replay import Replay, VirtualClock
from tests.benchmarks.simulate.studies import answer_of
from tests.benchmarks.simulate.table_study import (
    TableRows,
    TableSearchSpace,
    TableStudySpec,
    probes_cost,
    table_probes,
    table_study,
)
from tests.benchmarks.verdicts import Case, case_at, law_case

PAIRS = 50
BAR = 0.9
NOISES = (0.04, 0.10, 0.20)
BUDGET = 120
"""Train seconds of a search, as so many times the least true time."""

KINDS = ("probes", "quick", "noise scale", "search", "evidence", "confirmation")
RESAMPLES = 2000


@dataclass(frozen=True)
class Outcome:
    """What a study came to: costs and times are over the least true time of its table, regrets less 1.

    ``promised`` is the regret of what the quick answer recommended, ``largest`` by how much the configuration that was
    found at the largest batch size is slower than the best there; None where there is none.
    """

    cost: float
    regret: float
    promised: float | None
    largest: float | None
    spent: Mapping[str, float]


@dataclass(frozen=True)
class Question:
    """What both studies of a pair share: a table with its truth, a default, a seed, and the noise scale in samples."""

    case: Case
    default: int
    seed: int
    noise_scale: float

    @classmethod
    def of(cls, case: Case, index: int, error: float | None) -> Question:
        """Return the question of a pair; ``error`` is the factor by which the noise scale is off, None for any."""
        rng = np.random.default_rng((11, index))
        seed = int(rng.integers(2**31))
        feasible = [point for point, seconds in enumerate(case.seconds) if seconds < case.space.limit]
        default = feasible[int(rng.integers(len(feasible)))]
        factor = 2 ** rng.normal(0, CRITICAL_BATCH_OCTAVES) if error is None else error ** (-1) ** index
        return cls(case, default, seed, float(true_critical_batch(case) * factor))

    def study(self) -> tuple[TableStudySpec, TableSearchSpace]:
        """Return the spec of the study, and its space."""
        return table_study(
            self.case.space,
            default=self.default,
            pruner=PrunerSpec.model_validate({"name": "balanced"}),
            seed=self.seed,
            budget=BUDGET * min(self.case.seconds),
            confirm=ConfirmSpec(),
        )


class Clock(VirtualClock):
    """A virtual clock of a question's study, whose engine may be followed by another one."""

    def __init__(self, question: Question, engine: Engine, space: TableSearchSpace) -> None:
        searched, probes = TableRows(question.case.space, space), table_probes(question.case.space)

        def rows(plan: TrialPlan) -> Replay:
            if plan.phase is Phase.SEARCH:
                return searched(plan)
            return question.case.fresh_run(space.point_of(plan.configuration), plan.seed)

        super().__init__(engine, rows, probes=probes, charged=probes_cost(probes))

    def finish(self) -> None:
        """Run until the engine has nothing left to do."""
        for _ in self.run():
            pass

    def go_on(self, engine: Engine, prior: QuickPrior) -> None:
        """Tell another engine what has happened, as a driver does that takes up a stored study."""
        evaluations: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for event in self.journal or []:
            if isinstance(event, events.Evaluated):
                seen = event.observation
                evaluations[event.number].append((seen.train_seconds, seen.metric))
        self.engine, self._is_done, self._is_waiting = engine, False, False
        trials = [self.trials[number] for number in sorted(self.trials)]
        self._feed(events.Changed(trials, evaluations, quick=prior))
        self._find_saved()


def least_by_size(case: Case) -> dict[int, float]:
    """Return the least true seconds of each batch size that reaches the target."""
    least: dict[int, float] = {}
    for point, seconds in enumerate(case.seconds):
        size = case.space.batch_size(point)
        if math.isfinite(seconds):
            least[size] = min(seconds, least.get(size, math.inf))
    return least


def true_critical_batch(case: Case) -> float:
    """Return the B_crit of the law steps = S_min (1 + B_crit / B) that is nearest to the least true steps, in logs."""
    least = least_by_size(case)
    sizes = np.array(list(least), dtype=float)
    steps = np.log([seconds / case.space.step_seconds[size] for size, seconds in least.items()])
    grid = np.geomspace(sizes.min() / 16, 16 * sizes.max(), 400)
    off = steps - np.log1p(grid[:, None] / sizes)
    return float(grid[np.argmin(off.var(axis=1))])


def by_rule(case: Case, space: TableSearchSpace, default: Configuration, size: int) -> Configuration:
    """Return the cell at a batch size with the default's parameters and the rate nearest to the rule of the root."""
    points = (point for point in range(len(case.space.cells)) if case.space.batch_size(point) == size)
    cells = [space.configuration(point) for point in points]
    wanted = default.learning_rate * math.sqrt(size / default.batch_size)
    alike = [one for one in cells if one.parameters == default.parameters] or cells
    return min(alike, key=lambda one: abs(math.log(one.learning_rate / wanted)))


def alone(question: Question) -> Outcome:
    """Run the study by itself."""
    spec, space = question.study()
    clock = Clock(question, Engine(spec), space)
    clock.finish()
    return outcome(question, spec, space, clock)


def from_quick(question: Question) -> Outcome:
    """Make the quick answer, then run the study from it."""
    spec, space = question.study()
    seconds = question.case.space.limit / quick.SHARE_OF_A_RUN

    def plan(history: History) -> TrialPlan | None:
        share, fastest = question.case.space.limit, min(map(measured_seconds, history.trials), default=math.inf)
        if quick.ended_run(history, spec.default_configuration) is None:
            return quick.run_plan(history, spec.default_configuration, seconds, share=share)
        if clock.now + fastest >= (1 - quick.NOISE_SHARE) * seconds - fastest:
            return None
        size = quick.next_size(history, history.trials)
        if size is None:
            return None
        configuration = by_rule(question.case, space, spec.default_configuration, size)
        return quick.run_plan(history, configuration, quick.SLOWER * fastest, share=share)

    clock = Clock(question, Engine(spec, next_run=plan, phase=Phase.SEARCH), space)
    clock.finish()
    history, trained, runs = clock.engine.history, clock.now, len(clock.trials)
    fastest = min(question.case.space.limit, *map(measured_seconds, history.trials))
    noise = fastest + trained * quick.NOISE_SHARE / (1 - quick.NOISE_SHARE)
    posterior, optimum = quick.expected(history, quick.law_points(history.trials), question.noise_scale)
    clock.go_on(Engine(spec), prior_of(posterior, optimum, question.noise_scale))
    clock.finish()
    return outcome(question, spec, space, clock, runs, noise, optimum.step.batch_size)


def prior_of(posterior: CriticalBatchPosterior, optimum: ExpectedOptimum, noise_scale: float) -> QuickPrior:
    """Return what is handed to the search."""
    low, high = posterior.interval
    return QuickPrior(optimum.step.batch_size, optimum.interval, (low, posterior.estimate, high), noise_scale)


def outcome(
    question: Question,
    spec: TableStudySpec,
    space: TableSearchSpace,
    clock: Clock,
    quick_runs: int = 0,
    noise: float = 0.0,
    promised: int | None = None,
) -> Outcome:
    """Return what a study came to; the first ``quick_runs`` trials and ``noise`` seconds are the quick answer's."""
    least = least_by_size(question.case)
    best = min(least.values())
    spent: dict[str, float] = defaultdict(float, {"probes": clock.charged, "noise scale": noise})
    for number, trial in clock.trials.items():
        kind = "confirmation" if trial.phase is Phase.CONFIRM else "evidence" if trial.uncapped else "search"
        spent["quick" if number <= quick_runs else kind] += trial.outcome.train_seconds if trial.outcome else 0.0
    regret, largest = math.inf, None
    try:
        found = answer_of(spec, [clock.trials[number] for number in sorted(clock.trials)], clock)
        regret = least.get(found.optimal.batch_size, math.inf) / best - 1
        largest = regret_at_largest(question.case, space, clock, found, least)
    except TargetNotReachedError:
        pass
    return Outcome(
        cost=(clock.cost + noise) / best,
        regret=regret,
        promised=None if promised is None else least.get(promised, math.inf) / best - 1,
        largest=largest,
        spent={kind: seconds / best for kind, seconds in spent.items()},
    )


def regret_at_largest(
    case: Case, space: TableSearchSpace, clock: Clock, found: Answer, least: dict[int, float]
) -> float | None:
    """Return by how much the best configuration found at the largest batch size is slower than the best there."""
    size = found.largest_that_fits.batch_size
    row = next(one for one in found.batches if one.batch_size == size)
    if row.best is None or size not in least:
        return None
    point = space.point_of(clock.trials[row.best.trial].configuration)
    return case.seconds[point] / least[size] - 1


def pair(shared: tuple[Case | None, float | None], _sampler: str, _pruner: str, index: int) -> tuple[Outcome, Outcome]:
    """Run both studies of a pair; without a table on a law drawn at random."""
    case, error = shared
    if case is None:
        case = law_case(np.random.default_rng((7, index)), NOISES[index % len(NOISES)])
    question = Question.of(case, index, error)
    return alone(question), from_quick(question)


def interval(values: Sequence[float], statistic: str) -> str:
    """Return a median or a mean with its 90 % interval by bootstrap."""
    known = np.array(values)
    drawn = np.random.default_rng(0).choice(known, (RESAMPLES, len(known)))
    middle: Callable[..., Any] = np.median if statistic == "median" else np.mean
    low, high = np.quantile(middle(drawn, axis=1), [0.05, 0.95])
    return f"{middle(known):.3f} [{low:.3f}, {high:.3f}]"


def told(name: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> float:
    """Print what the pairs of a table came to; return the median ratio."""
    ratios = [second.cost / first.cost for first, second in pairs]
    print(f"{name}: {len(pairs)} pairs, median ratio of the costs {interval(ratios, 'median')}")
    for label, arm in (("run alone", [one for one, _ in pairs]), ("from quick", [one for _, one in pairs])):
        within = statistics.fmean(one.regret <= FLAT_RATIO - 1 for one in arm)
        mean = {kind: statistics.fmean(one.spent.get(kind, 0.0) for one in arm) for kind in KINDS}
        shares = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in mean.items() if seconds)
        largest = [one.largest for one in arm if one.largest is not None]
        print(f"  {label}: cost {statistics.median(one.cost for one in arm):.1f}, {shares}")
        print(
            f"    regret {interval([one.regret for one in arm], 'mean')}, within 5 % {within:.0%}; configuration at "
            f"the largest {interval(largest, 'mean')}"
        )
    promised = [second.promised for _, second in pairs if second.promised is not None]
    print(f"  regret of what was promised {interval(promised, 'mean')}", flush=True)
    return statistics.median(ratios)


def main(
    tables: Annotated[list[str] | None, typer.Argument(help="recorded tables, TABLE or TABLE@TARGET")] = None,
    pairs: int = PAIRS,
    first: Annotated[int, typer.Option(help="the number of the first pair: from 1000 on to try things")] = 0,
    noise_error: Annotated[float | None, typer.Option(help="the factor by which every noise scale is off")] = None,
    processes: int = 0,
) -> bool:
    """Run all pairs and print; return False where a median ratio is above the bar."""
    cases: dict[str, Case | None] = {Path(path).name: case_at(path) for path in tables or []}
    cases["laws"] = None
    every, missed = [], []
    for name, case in cases.items():
        with repeating(pair, (case, noise_error), processes) as mapped:
            found = list(mapped("", "", range(first, first + pairs)))
        every += found
        if told(name, found) > BAR:
            missed.append(name)
    told("all", every)
    print(f"missed: {', '.join(missed)}" if missed else "met: all bars")
    return not missed


if __name__ == "__main__":
    script(main, __doc__)
