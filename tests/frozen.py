"""Configurations that are frozen and measured again, and what two measurements of one come to.

Shared by the benchmarks that hold whole studies against a second measurement. The times are those that an answer
states: `confirmed` compares runs by the seconds by which `bssearch best` compares them, and the interval of the least
holds what having been chosen may have taken off it. A `Ratio` does not hold that: it is the stricter for it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bssearch.analysis.objectives.base import objective_of
from bssearch.analysis.optimum import Candidate, decide, repeats
from bssearch.analysis.time_to_target import Estimate, ratio_interval
from bssearch.commands.opening import Launch, opened
from bssearch.errors import LaunchError, UsageError
from bssearch.files import replacing
from bssearch.history import History
from bssearch.records import Configuration, Phase, TrialPlan
from bssearch.search.confirmation import CompletedRuns, interleaved
from bssearch.search.engine import NextRun
from bssearch.spec import StudySpec
from bssearch.step_times import step_seconds_of
from bssearch.storage.repository import open_store

LIMITS = 3.0
"""A run may take this many times the study's limit of train seconds, so that a slow machine ends none of them early: a
choice."""

FEWEST_RUNS = 3
"""Runs below which a time has no interval."""

SIGNIFICANCE = 0.05
"""A count is refused where so few, or fewer, come with less than this probability: the convention."""


@dataclass(frozen=True)
class Ratio:
    """One time to the target over another, with the 95 % interval that follows from the errors of both.

    The errors are those of the seeds and of the step times. ``low`` and ``high`` also hold what other work on the
    device may have left in either step time (`PooledStepTime.excess`), as the interval of a time does in an answer;
    ``bare_low`` and ``bare_high`` do not.
    """

    value: float
    low: float
    high: float
    bare_low: float
    bare_high: float

    @property
    def covers_one(self) -> bool:
        """Return whether the two times may be the same."""
        return self.low <= 1 <= self.high

    @property
    def covers_one_bare(self) -> bool:
        """Return whether they may be the same, were the step times free of other work."""
        return self.bare_low <= 1 <= self.bare_high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(numerator: Estimate, denominator: Estimate) -> Ratio | None:
    """Return one time over another of an independent measurement; None where one of them has no interval."""
    interval = ratio_interval(_bare(numerator), _bare(denominator))
    if interval is None or numerator.median is None or denominator.median is None:
        return None
    value = numerator.median / denominator.median
    low, high = min(interval[0], value), max(interval[1], value)
    return Ratio(value, low * math.exp(-numerator.excess), high * math.exp(denominator.excess), low, high)


def coverage_document(ratios: Sequence[Ratio | None]) -> dict[str, Any]:
    """Return how many of some ratios cover 1, those of which a run missed not, and the median of high over low."""
    known = [one for one in ratios if one is not None]
    return {
        "of": len(ratios),
        "held": sum(one.covers_one for one in known),
        "held_bare": sum(one.covers_one_bare for one in known),
        "width": statistics.median(one.high / one.low for one in known) if known else None,
        "width_bare": statistics.median(one.bare_high / one.bare_low for one in known) if known else None,
    }


def coverage_text(document: Mapping[str, Any]) -> str:
    """Return the sentence of a `coverage_document`."""
    said = f"{document['held']} of {document['of']} intervals cover 1"
    if document["width"] is None:
        return said
    return (
        f"{said}, in the median {document['width']:.2f} × from end to end; {document['held_bare']} do, with "
        f"{document['width_bare']:.2f} ×, without what other work may have left in a step time"
    )


def _bare(known: Estimate) -> Estimate:
    """Return an estimate as if other work had left nothing in its step time."""
    return known if known.step_time is None else replace(known, step_time=replace(known.step_time, excess=0.0))


def is_as_nominal(held: int, count: int, nominal: float) -> bool:
    """Return whether so few of ``count`` intervals hold the truth by chance where a share of ``nominal`` does.

    One-sided binomial test at `SIGNIFICANCE`. True of none at all.
    """
    from scipy.special import bdtr

    return count == 0 or float(bdtr(held, count, nominal)) >= SIGNIFICANCE


def identity(configuration: Configuration) -> str:
    """Return what a configuration shares with those that train alike, however their batches are split."""
    return configuration.in_micro_batches(1).key


def confirmed(db: str, study: str) -> list[Candidate]:
    """Return what was confirmed in a study, the least median time first, as the study's answer has it."""
    with open_store(db, write=False) as store:
        spec = StudySpec.model_validate(store.study(study).spec)
        trials, probes = store.trials(study), store.probes(study)
    counted = [one for one in trials if one.state.is_finished and not one.state.is_missing]
    runs = [one for one in counted if one.phase is Phase.CONFIRM]
    objective, step_seconds = objective_of(spec), step_seconds_of(probes.values())
    verdict = decide(trials, spec.confirm.runs, objective, step_seconds)
    table = [] if verdict is None else [one for one in verdict.by_batch.values() if one.is_confirmed]
    stated = {one.configuration.key: one for one in table}
    found = repeats(runs, objective.between(runs, step_seconds, counted))
    return sorted((stated.get(one.configuration.key, one) for one in found), key=lambda one: one.value)


def best_of_each_batch_size(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate with an interval of each batch size, in the order given."""
    chosen: dict[int, Candidate] = {}
    for one in candidates:
        if one.time.low is not None:
            chosen.setdefault(one.configuration.batch_size, one)
    return list(chosen.values())


def remeasure(spec: StudySpec, configurations: Sequence[Configuration], runs: int, launch: Launch) -> list[Candidate]:
    """Run configurations of a spec's space with the seeds of that spec, interleaved, and return what they took.

    They run in new worker processes, under a study of the spec's name that holds nothing else; what its database
    holds already is not run again. Raises what `opened` and the driver raise, and `LaunchError` where runs failed.
    """
    assert launch.db is not None, "it is read again"
    with opened(spec, launch) as study:
        study.driver().run_planned(repeated(configurations, runs), Phase.CONFIRM)
    found = confirmed(launch.db, spec.name)
    made = {identity(one.configuration): len(one.runs) for one in found}
    for configuration in configurations:
        if (count := made.get(identity(configuration), 0)) < runs:
            raise LaunchError(f"batch {configuration.batch_size}: {runs - count} of {runs} runs failed")
    return found


def repeated(configurations: Sequence[Configuration], runs: int) -> NextRun:
    """Return the plan of so many runs of each configuration, seed by seed over all of them."""

    def next_run(history: History) -> TrialPlan | None:
        made = CompletedRuns.of(history, [one for one in history.all_trials if one.phase is Phase.CONFIRM])
        chosen = {one.key: one for one in map(history.as_run, configurations)}
        plan = next(interleaved(history, made, list(chosen.values()), runs), None)
        return None if plan is None else replace(plan, train_seconds_limit=LIMITS * plan.train_seconds_limit)

    return next_run


def by_identity(candidates: Iterable[Candidate]) -> dict[str, Candidate]:
    """Return candidates by `identity`."""
    return {identity(one.configuration): one for one in candidates}


def contended_share(candidate: Candidate) -> float:
    """Return the share of a candidate's runs during which something else used the device."""
    return sum(run.outcome is not None and run.outcome.contended for run in candidate.runs) / len(candidate.runs)


def time_document(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate's time to the target, its errors and its step time as JSON values."""
    known = candidate.time
    step = known.step_time
    return {
        "median_s": known.median,
        "low_s": known.low,
        "high_s": known.high,
        "runs": known.runs,
        "reached": known.reached,
        "log_deviation": known.log_deviation,
        "step_time_s": None if step is None else step.seconds,
        "step_time_log_error": None if step is None else step.error,
        "step_time_log_excess": None if step is None else step.excess,
        "contended_share": contended_share(candidate),
    }


def time_text(candidate: Candidate) -> str:
    """Return a candidate's seconds to the target with their interval."""
    known = candidate.time
    median = "missed" if known.median is None else f"{known.median:.3g}"
    return median if known.low is None or known.high is None else f"{median} [{known.low:.3g}, {known.high:.3g}]"


def documents_of(configurations: Iterable[Configuration]) -> list[dict[str, Any]]:
    """Return configurations as JSON values, which `configurations_of` reads."""
    return [asdict(one) for one in configurations]


def configurations_of(values: object, source: str) -> list[Configuration]:
    """Return the configurations of a JSON list; raise `UsageError` naming the ``source`` where it is none."""
    try:
        found = TypeAdapter(list[Configuration]).validate_python(values)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "configurations"
        raise UsageError(f"{source}: {place}: {problem['msg']}") from None
    if not found:
        raise UsageError(f"{source} holds no configuration")
    return found


def read_configurations(path: Path) -> list[Configuration]:
    """Return the configurations of a file: a JSON list of them, or an object with one as ``configurations``."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    return configurations_of(values.get("configurations") if isinstance(values, dict) else values, str(path))


class Results:
    """What a benchmark has found so far, in a JSON file that is replaced whole; of one set of settings alone.

    ``found`` holds JSON values; `save` writes them.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Read what is there; raise `UsageError` where it was found under other settings."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"settings": dict(settings)}
        stored = self.found["settings"]
        for name in sorted({*stored, *settings}):
            if stored.get(name) != settings.get(name):
                raise UsageError(
                    f"{path} holds results with {name} = {stored.get(name)!r}, not {settings.get(name)!r}",
                    hint="give another folder, or the settings as they were",
                )
        self.save()

    def save(self) -> None:
        """Write all that has been found."""
        with replacing([self.path]) as (file,):
            json.dump(self.found, file, indent=1, allow_nan=False)
