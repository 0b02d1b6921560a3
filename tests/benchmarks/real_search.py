"""Real searches at equal budget: `auto` with `balanced`, and Optuna's TPE with its successive halving.

Run as ``python tests/benchmarks/real_search.py [STUDY]``: a shipped study or a spec (default: fashion_mnist_cpu), in a
temporary folder. Each search takes ``--wall-seconds``; ``--searches`` of each run in turns. The search with `auto` then
confirms its finalists as the study says, and answers. Each incumbent, a trial that was the fastest at its end, and each
answer then get ``--seeds`` fresh runs. A true time is the mean of these runs, infinite if a run misses the target
within the limit. Prints the train seconds of a search until its incumbent's true time is within 25 % and 10 % of the
best of all, its last incumbent, and its answer. The size of an answer is right if any configuration with it comes
within 10 % of the best. ``--target`` replaces the study's target.
"""

if not __package__:
    __import__("from_clone")

import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bssearch import Answer, Launch, open_store, run_study
from bssearch.commands.opening import described
from bssearch.errors import TargetNotReachedError
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Phase, ProbeRecord, TrialRecord, TrialState, train_seconds_of
from bssearch.spec import StudySpec, find_spec, load_spec
from tests.benchmarks.harness import script
from tests.evidence.peers import run_to_target

PAIRS = (("auto", "balanced"), ("tpe", "asha"))
WITHIN = (1.25, 1.10)
FRESH = 1_000_000
"""First seed of the runs that judge an incumbent: no search draws it."""


@dataclass(frozen=True)
class Incumbent:
    """A trial that was the fastest at its end, and the train seconds of its search until then."""

    trial: TrialRecord
    spent: float

    @property
    def configuration(self) -> Configuration:
        return self.trial.configuration.in_micro_batches(1)


@dataclass(frozen=True)
class Ended:
    """A search: its incumbents in order, its train seconds and trials; with `auto` also the confirmed answer."""

    found: list[Incumbent]
    spent: float
    count: int
    answer: Configuration | None
    confirmed: str


def variant(spec: StudySpec, sampler: str, pruner: str, seed: int, wall_seconds: float) -> StudySpec:
    """Return the spec with another sampler and pruner, its search ended by the clock only; `auto` confirms."""
    changes = {
        "name": f"{spec.name}-{sampler}-{pruner}-{seed}",
        "sampler": {"name": sampler},
        "pruner": {"name": pruner},
        "confirm": spec.confirm.model_dump() if sampler == "auto" else {"runs": 0},
        "seed": seed,
        "budget": {
            "trials": 10_000,
            "trial_train_seconds": spec.budget.trial_train_seconds,
            "wall_seconds": wall_seconds,
            "least_improvement": 0.0,
        },
    }
    return StudySpec.model_validate({**spec.model_dump(mode="json"), **changes})


def incumbents(trials: Sequence[TrialRecord]) -> tuple[list[Incumbent], float]:
    """Return the incumbents of a search in their order, and its train seconds in all."""
    searched = [trial for trial in trials if trial.phase is Phase.SEARCH and trial.ended_at and trial.outcome]
    in_order = sorted(searched, key=lambda one: str(one.ended_at))
    found: list[Incumbent] = []
    best, spent = math.inf, 0.0
    for trial in in_order:
        assert trial.outcome is not None
        spent += trial.outcome.train_seconds
        seconds = trial.outcome.time_to_target_s if trial.state is TrialState.REACHED else None
        if seconds is not None and seconds < best:
            best = seconds
            found.append(Incumbent(trial, spent))
    return found, spent


def ended(trials: Sequence[TrialRecord], answer: Answer | None) -> Ended:
    """Return a search with its answer; ``confirmed`` says at which cost."""
    found, spent = incumbents(trials)
    confirmed = [trial for trial in trials if trial.phase is Phase.CONFIRM]
    count = len(trials) - len(confirmed)
    if answer is None or not confirmed:
        return Ended(found, spent, count, None, "")
    chosen = next(trial.configuration for trial in trials if trial.number == answer.optimal.trial_numbers[0])
    kind = "provisional" if answer.provisional else "final"
    cost = f"{kind} after {train_seconds_of(confirmed):.0f} more train seconds"
    return Ended(found, spent, count, chosen.in_micro_batches(1), cost)


def true_seconds(
    spec: StudySpec, executor: Executor, configuration: Configuration, probe: ProbeRecord, seeds: int
) -> float:
    """Return a configuration's mean seconds to the target over fresh seeds, infinite if a seed misses the target."""
    cap = spec.budget.trial_train_seconds
    outcomes = [run_to_target(spec, executor, configuration, probe, FRESH + seed, cap) for seed in range(seeds)]
    return statistics.fmean(one.time_to_target_s or math.inf for one in outcomes)


def main(
    study: Annotated[str, typer.Argument()] = "fashion_mnist_cpu",
    wall_seconds: float = 60.0,
    searches: int = 1,
    seeds: int = 5,
    target: float | None = None,
    data_dir: Path | None = None,
) -> None:
    """Run the searches and then their incumbents, and print both."""
    spec = load_spec(find_spec(study))
    if target is not None:
        spec = spec.model_copy(update={"target": spec.target.model_copy(update={"value": target})})
    made: dict[str, Ended] = {}
    probes: dict[int, ProbeRecord] = {}
    with tempfile.TemporaryDirectory() as folder:
        db = f"sqlite:///{folder}/study.db"
        for seed in range(searches):
            for sampler, pruner in PAIRS:
                one = variant(spec, sampler, pruner, seed, wall_seconds)
                answer = None
                with suppress(TargetNotReachedError):
                    answer = run_study(one, Launch(db=db, data_dir=data_dir))
                with open_store(db, write=False) as store:
                    trials = store.trials.of(one.name)
                    environment = store.studies.get(one.name).environment
                    assert environment is not None
                    probes |= store.probes.by_batch_size(one.name, environment)
                made[f"{sampler}+{pruner}, seed {seed}"] = ended(trials, answer)
    with described(spec, Launch(data_dir=data_dir)) as (executor, _):
        true: dict[str, float] = {}
        judged = [incumbent.configuration for one in made.values() for incumbent in one.found]
        judged += [one.answer for one in made.values() if one.answer is not None]
        for configuration in judged:
            if configuration.key not in true:
                probe = probes[configuration.batch_size]
                true[configuration.key] = true_seconds(spec, executor, configuration, probe, seeds)
    least = min(true.values())
    print(f"{spec.name}, {wall_seconds:g} s each; the best configuration takes {least:.3g} s to the target\n")
    print(f"{'search':<22} {'trials':>6} {'train s':>8} {'to 25 %':>9} {'to 10 %':>9}   at the end")
    for name, search in made.items():
        costs = []
        for factor in WITHIN:
            near = [one.spent for one in search.found if true[one.configuration.key] <= factor * least]
            costs.append(f"{near[0]:7.1f} s" if near else "never")
        last = search.found[-1].configuration if search.found else None
        ending = (
            "nothing reached" if last is None else f"batch {last.batch_size}, {true[last.key] / least:.2f} × the best"
        )
        print(f"{name:<22} {search.count:>6} {search.spent:>8.1f} {costs[0]:>9} {costs[1]:>9}   {ending}")
        if search.answer is not None:
            size, seconds = search.answer.batch_size, true[search.answer.key]
            of_size = min(true[one.key] for one in judged if one.batch_size == size)
            verdict = "right" if of_size <= WITHIN[1] * least else "wrong"
            print(f"    answer: batch {size} ({verdict}), {seconds / least:.2f} × the best, {search.confirmed}")


if __name__ == "__main__":
    script(main, __doc__)
