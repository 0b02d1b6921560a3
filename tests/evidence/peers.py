"""Trains the batch sizes of other tools and of bssearch in the same loop, seed by seed, and compares the times."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bssearch.commands.probes import run_request
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Goal, ProbeRecord, TrialOutcome, TrialRequest, TrialState, student_t
from bssearch.search.calibration import measure_step_time_at
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN
from tests.evidence.task import Found
from tests.factories import make_request

# Ratios of two trainings' times to the target, from paired seeds ------------------------------------------------------

FEWEST_PAIRS = 3
"""Pairs that an interval needs, as every interval over seeds in bssearch."""


def paired_ratio(theirs: Sequence[float | None], ours: Sequence[float | None], cap: float) -> Found:
    """Return the median of theirs / ours over the common seeds, with its 95 % interval.

    Both are seconds for each seed in the same order; None is a run that missed the target within ``cap`` seconds. If
    their run missed, the pair counts as ``cap`` / ours, and ``at_least`` says that the true median may be larger. The
    interval is Student's t on the logarithms of the pairs, widened to hold their median; None below three pairs, and if
    a run missed. If one of our runs missed, the median is None.
    """
    pairs = list(zip(theirs, ours, strict=False))
    known = [(other, own) for other, own in pairs if own is not None]
    if not known or len(known) < len(pairs):
        return {"median": None, "low": None, "high": None, "pairs": len(pairs), "at_least": False}
    hits = [other / own for other, own in known if other is not None]
    ordered = sorted((math.inf if other is None else other / own) for other, own in known)
    is_miss = math.isinf(ordered[len(ordered) // 2])
    median = statistics.median((cap if other is None else other) / own for other, own in known)
    low = high = None
    if len(hits) == len(known) >= FEWEST_PAIRS:
        logs = [math.log(one) for one in hits]
        half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        mean = statistics.fmean(logs)
        low, high = min(median, math.exp(mean - half)), max(median, math.exp(mean + half))
    return {"median": median, "low": low, "high": high, "pairs": len(known), "at_least": is_miss}


# Races ----------------------------------------------------------------------------------------------------------------


MISSES = 2
"""A candidate stops after this number of misses of the cap, if it never reached the target."""

Key = tuple[int, float]
Timed = Callable[[Configuration, int], float | None]
"""Trains a configuration with a seed; returns the seconds to the target, or None if the run missed the cap.

Raises `TrialFailed`."""


class TrialFailed(Exception):  # noqa: N818
    """A trial ended by an error or out of memory, so its time to the target is unknown."""


@dataclass(frozen=True)
class Candidate:
    """A batch size with a learning rate and the rule for the rate; ``seconds``: the duration of the tool's search."""

    tool: str
    found: int
    batch_size: int
    rule: str
    learning_rate: float
    seconds: float

    @property
    def key(self) -> Key:
        """Return the trained configuration; candidates with equal keys share their runs."""
        return self.batch_size, self.learning_rate


def by_rules(tool: str, found: int, batch_size: int, seconds: float, default: Key) -> list[Candidate]:
    """Return a batch size with the default's learning rate: unchanged, and scaled by each of the usual rules."""
    size, rate = default
    ratio = batch_size / size
    rates = {"unchanged": rate, "linear": rate * ratio, "sqrt": rate * ratio**0.5}
    return [Candidate(tool, found, batch_size, rule, rate, seconds) for rule, rate in rates.items()]


@dataclass
class Race:
    """The candidates, and the seconds of their runs by batch size and learning rate; ``ours`` is one of them.

    ``times`` has a value for each seed in order, None for a run that missed the target within ``cap`` seconds.
    ``failed`` has the errors of candidates, which are not trained again.
    """

    candidates: Sequence[Candidate]
    configurations: dict[Key, Configuration]
    ours: Key
    cap: float
    times: dict[Key, list[float | None]] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)

    def rows(self) -> list[Found]:
        """Return a row for each candidate: its times, and their ratio to our times with the same seeds."""
        own = self.times.get(self.ours, [])
        rows = []
        for one in self.candidates:
            times = self.times.get(one.key, [])
            ratio = paired_ratio(times, own[: len(times)], self.cap) if times else None
            rows.append(
                {**asdict(one), "seconds_to_target": times, "over_ours": ratio, "failed": self.failed.get(one.key)}
            )
        return rows

    def run(
        self, seeds: Sequence[int], timed: Timed, seconds_left: Callable[[], float], save: Callable[[], None]
    ) -> int:
        """Train all candidates, seed by seed, while there is time for a whole round; return the number of rounds."""
        longest = 0.0
        for number, seed in enumerate(seeds):
            if seconds_left() < longest:
                return number
            began = time.monotonic()
            keys = [self.ours, *(key for key in self.configurations if key != self.ours)]
            for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
                known = self.times.setdefault(key, [])
                if len(known) == number and key not in self.failed and not self._has_lost(known):
                    try:
                        known.append(timed(self.configurations[key], seed))
                    except TrialFailed as error:
                        self.failed[key] = str(error)
                    save()
            longest = max(longest, time.monotonic() - began)
        return len(seeds)

    @staticmethod
    def _has_lost(times: Sequence[float | None]) -> bool:
        return len(times) >= MISSES and all(one is None for one in times)


def race_of(
    found: Sequence[Found], ours: Configuration, default: Configuration, largest: int, samples: int, cap: float
) -> Race:
    """Return the race of the tools' batch sizes, each by the usual learning rate rules, against ours.

    The default and the study's ``largest`` batch size run too. Batch sizes are at most the training samples.
    """
    base = default.batch_size, default.learning_rate
    candidates = [
        Candidate("bssearch", ours.batch_size, ours.batch_size, "searched", ours.learning_rate, 0.0),
        Candidate("the default", default.batch_size, default.batch_size, "unchanged", default.learning_rate, 0.0),
        *by_rules("the largest of the study", largest, min(largest, samples), 0.0, base),
    ]
    for one in found:
        candidates += by_rules(one["tool"], one["found"], min(one["found"], samples), one["seconds"], base)
    configurations = {
        one.key: replace(default, batch_size=one.batch_size, learning_rate=one.learning_rate) for one in candidates
    }
    key = ours.batch_size, ours.learning_rate
    configurations[key] = ours
    return Race(candidates, configurations, key, cap)


def fresh_seeds(count: int) -> list[int]:
    """Return seeds that differ from a study's seeds and are equal in every run."""
    rng = random.Random(20)
    return [rng.randrange(2**31) for _ in range(count)]


OUT_OF_REACH = 1e9
"""A metric beyond the reach of every training."""


def step_times_at(
    spec: StudySpec, executor: Executor, sizes: Iterable[int], seconds: float, may_go_on: Callable[[], bool]
) -> Iterable[Found]:
    """Yield the step time of the default at each batch size, while there is time; see `bssearch.records.StepTime`."""
    for size in sizes:
        if not may_go_on():
            return
        measured = measure_step_time_at(spec, executor, size, UNKNOWN, seconds_limit=seconds)
        yield {"batch_size": size, "fits": False} if measured is None else row_of(measured)


def row_of(measured: Any) -> Found:
    """Return a step time as a row, with its host-bound share."""
    return {**asdict(measured), "host_bound_share": getattr(measured, "host_bound_share", None)}


def run_to_target(
    spec: StudySpec, executor: Executor, configuration: Configuration, probe: ProbeRecord, seed: int, cap: float
) -> TrialOutcome:
    """Train a configuration to the spec's target, for ``cap`` train seconds at most.

    Cadence and micro-batches follow from the step time ``probe`` of the batch size, as in a study.
    """
    assert probe.eval_every_steps is not None, "the batch size was timed"
    request = make_request(
        number=1,
        configuration=configuration.in_micro_batches(probe.micro_batch_size),
        seed=seed,
        target=spec.record_target,
        train_seconds_limit=cap,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=probe.eval_every_steps,
        threads=spec.executor.threads,
    )
    outcome, _ = run_request(executor, request)
    return outcome


def for_seconds(
    spec: StudySpec, configuration: Configuration, seconds: float, eval_every_steps: int, number: int = 1
) -> TrialRequest:
    """Return a request to train for ``seconds`` toward a target that is out of reach."""
    target = spec.record_target
    return make_request(
        number=number,
        configuration=configuration,
        seed=number,
        target=replace(target, value=OUT_OF_REACH if target.goal is Goal.MAXIMIZE else -OUT_OF_REACH),
        train_seconds_limit=seconds,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=eval_every_steps,
        stop_at_target=False,
        threads=spec.executor.threads,
    )
