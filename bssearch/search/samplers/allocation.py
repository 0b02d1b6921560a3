"""Choose the batch size of the next trial, in this order (`auto`: steps 1 and 3; `grid`: step 1):

1. The default configuration, uncapped unless the pruner limits trials before the first success.
2. Each feasible batch size once, the nearest to the incumbent first.
3. After the share `EVIDENCE_FROM` of the budget: uncapped trials for the answer's comparisons, because caps hide slow
   times. The compared sizes are the largest without accumulation, the default's if a factor of 2 or more from the
   incumbent's, and the nearest sizes a factor of 4 or more from the incumbent's. Sizes with a success get these trials
   after step 4.
4. Up to `FLOOR` trials at each batch size, the nearest to the incumbent first.
5. The batch size with the largest weight / (trials + 1). The weight is (incumbent's objective value / the size's best
   value)², at least ½ for the incumbent's neighbours.

Steps 2 and 4 start from a quick answer's batch size, unless the incumbent is outside the answer's interval. If the
incumbent is inside the interval, step 3 runs only one trial at each size outside, or up to three until a success there.
The default and the largest size keep three trials.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.records import ParameterValue, TrialRecord
from bssearch.search.history import TRIED_AGAIN, History, octaves

FLOOR = 2  # trials per batch size, because a single trial may be lucky

EVIDENCE_FROM = 0.5  # evidence trials start at this spent share of the budget

EVIDENCE_TRIALS = 3  # evidence trials per batch size, the fewest that tune a learning rate

RULED_OUT_TRIALS = 1  # evidence trials per batch size outside the quick answer's interval

# Sources of successive evidence trials at a batch size, until a trial reaches the target
FIRST_SOURCES: tuple[Literal["transfer", "baseline", "sample"], ...] = ("transfer", "baseline", "sample")

EVIDENCE_TRIES = len(FIRST_SOURCES)

BRACKET_OCTAVES = 2  # a batch size 4 times off costs at most 56 % if steps ∝ 1 + γ/B and step seconds are α + βB

UNREACHED = 2.0  # assumed ratio of a batch size's best time to the incumbent's time, if the size has no success

NEIGHBOUR = 0.5  # minimum weight of the incumbent's neighbours


@dataclass(frozen=True, slots=True)
class Proposal:
    """A batch size and the ``source`` of the other parameters.

    ``transfer``: the nearest batch size's best trial. ``baseline``: the default. ``sample``: the sampler.
    """

    batch_size: int
    source: Literal["transfer", "baseline", "sample"]
    uncapped: bool = False


def propose(history: History) -> Proposal | None:
    """The proposal for the next trial after the default, or None if no batch size is feasible."""
    if not history.feasible:
        return None
    start = _start(history)
    counts = {size: len(history.at(size)) for size in history.feasible}
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


def default_is_due(history: History) -> bool:
    default = history.spec.default_configuration
    return default.batch_size in history.feasible and not history.tried(default)


def propose_evidence(history: History) -> Proposal | None:
    wanted = evidence_sizes(history)
    return _first_evidence(history, wanted) or _further_evidence(history, wanted)


def evidence_is_due(history: History) -> bool:
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
    quick, quoted = history.quick, {history.spec.default.batch_size, history.largest}
    is_ruled_out = quick is not None and not quick.holds(batch_size) and _agrees_with_quick(history)
    return RULED_OUT_TRIALS if is_ruled_out and batch_size not in quoted else EVIDENCE_TRIALS


def _agrees_with_quick(history: History) -> bool:
    quick, best = history.quick, history.incumbent
    return quick is not None and best is not None and quick.holds(best.configuration.batch_size)


def evidence_sizes(history: History) -> list[int]:
    centre = _centre(history)
    default = history.spec.default.batch_size
    is_apart = default in history.feasible and octaves(default, centre) >= 1
    smaller = [size for size in history.feasible if math.log2(centre / size) >= BRACKET_OCTAVES]
    larger = [size for size in history.feasible if math.log2(size / centre) >= BRACKET_OCTAVES]
    wanted = [history.largest, default if is_apart else None, max(smaller, default=None), min(larger, default=None)]
    return list(dict.fromkeys(size for size in wanted if size is not None))


def _evidence_at(history: History, batch_size: int) -> list[TrialRecord]:
    here = [trial for trial in history.trials if trial.configuration.batch_size == batch_size and trial.uncapped]
    return [trial for trial in here if trial.state not in TRIED_AGAIN]


def _start(history: History) -> int:
    quick = history.quick
    if quick is not None and (history.incumbent is None or _agrees_with_quick(history)):
        return quick.optimal.batch_size
    return _centre(history)


def _centre(history: History) -> int:
    best = history.incumbent
    return best.configuration.batch_size if best else history.spec.default.batch_size


def _weight(history: History, batch_size: int) -> float:
    if history.incumbent is None:
        return 1.0
    best = history.best_at(batch_size)
    ratio = history.objective.ratio(history.value(best), history.value(history.incumbent)) if best else UNREACHED
    ladder, centre = history.feasible, _centre(history)
    is_neighbour = centre in ladder and abs(ladder.index(batch_size) - ladder.index(centre)) == 1
    return max(ratio**-2, NEIGHBOUR if is_neighbour else 0.0)


def known_coordinates(history: History, proposal: Proposal) -> Mapping[str, ParameterValue] | None:
    """Return the proposal's coordinates, or None if the sampler chooses.

    Also returns None if the default is outside the space, or an uncapped trial would repeat a trial.
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
