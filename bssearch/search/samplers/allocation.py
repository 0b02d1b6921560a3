"""Which batch size the next trial is for: the search gives every rung its trials, it leaves none to luck.

In this order:

1. the default configuration, under the full limit: the baseline of every speed-up and the first incumbent;
2. every feasible batch size once, nearest to the incumbent's first, then until each has had `FLOOR` trials;
3. from the middle of the budget evidence: the batch sizes that the optimum is compared with (the largest that runs
   without accumulation, the default's, and one a factor four or more to each side of the incumbent's) get trials that
   the incumbent does not cap. Its cap would hide how much slower they are: before anything but a first trial, up to
   `EVIDENCE_TRIES` where none has reached the target. And it would leave them with the first learning rate they got, a
   speed-up over what nobody tuned: after all have their `FLOOR`, up to `EVIDENCE_TRIALS`;
4. the rest in proportion to (incumbent's figure / batch size's best figure)², the incumbent's neighbours on the
   ladder at least half as often as itself: one lucky seed decides between them more easily than the truth.

Where a quick answer is stored (`bssearch.analysis.law.quick`), and the incumbent lies where it has the optimum,
the ladder begins at the batch size that it recommends, and what brackets the optimum outside its interval gets one
evidence trial; the default's batch size and the largest, of which speed-ups are quoted, get as many as ever. An
incumbent elsewhere has shown it wrong: then all is as without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.records import ParameterValue, TrialRecord
from bssearch.search.history import TRIED_AGAIN, History, octaves

FLOOR = 2
"""Trials that every batch size gets. A choice: one is luck."""

EVIDENCE_FROM = 0.5
"""The share of the budget from which on what the answer compares with gets its trials. A choice."""

EVIDENCE_TRIALS = 3
"""Uncapped trials at each batch size that the answer compares with: the least that tunes a learning rate. A choice."""

RULED_OUT_TRIALS = 1
"""Of these at one that only brackets the optimum, and that a quick answer and the best trial rule out."""

FIRST_SOURCES: tuple[Literal["transfer", "baseline", "sample"], ...] = ("transfer", "baseline", "sample")
"""Where a batch size that has not reached the target gets its parameters from, evidence trial by evidence trial."""

EVIDENCE_TRIES = len(FIRST_SOURCES)
"""Uncapped trials at a batch size that has not reached the target."""

BRACKET_OCTAVES = 2
"""How far from the incumbent the law is bracketed: with t = α + βB a factor 4 costs 56 % at most. A choice."""

UNREACHED = 2.0
"""The ratio to the incumbent's figure that a batch size counts with which has not reached the target. A choice."""

NEIGHBOUR = 0.5
"""The least weight of the incumbent's neighbours, as a share of its own. A choice."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The batch size of the next trial, and where its other parameters come from.

    default: the spec's own. transfer: the best coordinates of the nearest batch size. baseline: the default's
    coordinates. sample: the sampler's choice.
    """

    batch_size: int
    source: Literal["default", "transfer", "baseline", "sample"]
    uncapped: bool = False


def propose(history: History) -> Proposal | None:
    """Return what to try next, or None where no batch size is feasible."""
    default = propose_default(history)
    if default is not None or not history.feasible:
        return default
    start = _start(history)
    counts = {size: history.count_at(size) for size in history.feasible}
    fewest = min(counts.values())
    nearest = min((size for size in counts if counts[size] == fewest), key=lambda size: octaves(size, start))
    if fewest == 0:
        return Proposal(nearest, "transfer")
    wanted = evidence_sizes(history) if evidence_is_due(history) else []
    first = _first_evidence(history, wanted)
    if first is not None:
        return first
    if fewest < FLOOR:
        return Proposal(nearest, "sample")
    further = _further_evidence(history, wanted)
    if further is not None:
        return further
    return Proposal(max(counts, key=lambda size: _weight(history, size) / (counts[size] + 1)), "sample")


def propose_default(history: History) -> Proposal | None:
    """Return the default configuration until it has been tried."""
    default = history.spec.default_configuration
    if default.batch_size in history.feasible and not history.tried(default):
        return Proposal(default.batch_size, "default", uncapped=True)
    return None


def propose_evidence(history: History) -> Proposal | None:
    """Return the trial that the answer still needs at a batch size that the search has no need of, if any."""
    wanted = evidence_sizes(history)
    return _first_evidence(history, wanted) or _further_evidence(history, wanted)


def evidence_is_due(history: History) -> bool:
    """Return whether so much of the budget is spent that evidence must have its share of the rest."""
    return history.budget_share >= EVIDENCE_FROM


def _first_evidence(history: History, wanted: Sequence[int]) -> Proposal | None:
    default = history.spec.default_configuration
    for size in wanted:
        tries = sum(not trial.configuration.trains_like(default) for trial in _evidence_at(history, size))
        if history.best_at(size) is None and tries < EVIDENCE_TRIES:
            return Proposal(size, FIRST_SOURCES[tries], uncapped=True)
    return None


def _further_evidence(history: History, wanted: Sequence[int]) -> Proposal | None:
    for size in wanted:
        if history.best_at(size) is not None and len(_evidence_at(history, size)) < _enough_evidence(history, size):
            return Proposal(size, "sample", uncapped=True)
    return None


def _enough_evidence(history: History, batch_size: int) -> int:
    """Return how many trials tell the time of a batch size that the answer compares with."""
    quick, quoted = history.quick, {history.spec.default.batch_size, history.largest}
    is_ruled_out = quick is not None and not quick.holds(batch_size) and agrees_with_quick(history)
    return RULED_OUT_TRIALS if is_ruled_out and batch_size not in quoted else EVIDENCE_TRIALS


def agrees_with_quick(history: History) -> bool:
    """Return whether the best trial lies where a quick answer has the optimum; False without either."""
    quick, best = history.quick, history.incumbent
    return quick is not None and best is not None and quick.holds(best.configuration.batch_size)


def evidence_sizes(history: History) -> list[int]:
    """Return the batch sizes whose time-to-target the answer needs even where it is long."""
    centre = _centre(history)
    default = history.spec.default.batch_size
    is_apart = default in history.feasible and octaves(default, centre) >= 1
    smaller = [size for size in history.feasible if math.log2(centre / size) >= BRACKET_OCTAVES]
    larger = [size for size in history.feasible if math.log2(size / centre) >= BRACKET_OCTAVES]
    wanted = [history.largest, default if is_apart else None, max(smaller, default=None), min(larger, default=None)]
    return list(dict.fromkeys(size for size in wanted if size is not None))


def _evidence_at(history: History, batch_size: int) -> list[TrialRecord]:
    """Return the evidence trials at a batch size that run, have run or have failed."""
    here = [trial for trial in history.trials if trial.configuration.batch_size == batch_size and trial.uncapped]
    return [trial for trial in here if trial.state not in TRIED_AGAIN]


def _start(history: History) -> int:
    """Return the batch size that the ladder begins at: what a quick answer recommends until trials have another one."""
    quick = history.quick
    if quick is not None and (history.incumbent is None or agrees_with_quick(history)):
        return quick.batch_size
    return _centre(history)


def _centre(history: History) -> int:
    best = history.incumbent
    return best.configuration.batch_size if best else history.spec.default.batch_size


def _weight(history: History, batch_size: int) -> float:
    if history.incumbent is None:
        return 1.0
    best = history.best_at(batch_size)
    ratio = history.objective.ratio(history.value(best), history.incumbent_value) if best else UNREACHED
    ladder, centre = history.feasible, _centre(history)
    is_neighbour = centre in ladder and abs(ladder.index(batch_size) - ladder.index(centre)) == 1
    return max(ratio**-2, NEIGHBOUR if is_neighbour else 0.0)


def known_coordinates(history: History, proposal: Proposal) -> Mapping[str, ParameterValue] | None:
    """Return the coordinates that a proposal takes over, or None where the sampler is to choose them.

    It is where there are none, and where an uncapped trial would repeat a configuration that has had its trial.
    """
    if proposal.source == "sample":
        return None
    spec = history.spec
    sampled = (
        history.coordinates_near(proposal.batch_size)
        if proposal.source == "transfer"
        else spec.space.encode(spec.default_configuration)
    )
    if sampled is None or not proposal.uncapped:
        return sampled
    return None if history.has_trial_of(spec.space.decode(proposal.batch_size, sampled)) else sampled
