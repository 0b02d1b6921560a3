"""Whether more confirmation runs could change which batch size is recommended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bssearch.analysis.optimum import Candidate, Verdict, is_shown_flat
from bssearch.analysis.time_to_target import ratio_interval
from bssearch.intervals import FLAT_RATIO


@dataclass(frozen=True)
class Standing:
    """The state of the confirmation: the recommendation so far, and the candidates that could still change it.

    ``least`` has the least median, ``recommended`` is the smallest batch size shown to be within 5 % of it (else the
    least itself), ``undecided`` are the best candidates of the other batch sizes that could change that, ascending.
    """

    least: Candidate
    recommended: Candidate
    undecided: tuple[Candidate, ...]

    @property
    def is_settled(self) -> bool:
        """Return whether no batch size is left that could change the recommendation."""
        return not self.undecided

    @property
    def undecided_batch_sizes(self) -> list[int]:
        """Return the batch sizes that could still change the recommendation, ascending."""
        return [one.configuration.batch_size for one in self.undecided]

    @property
    def to_run(self) -> list[Candidate]:
        """Return the candidates to run with another seed: the undecided, and those that they are compared with.

        A candidate of which a run missed the target has no interval, however many runs follow: it is left out, and so
        are all where the least is one.
        """
        open_ones = [one for one in self.undecided if not _has_missed(one)]
        if not open_ones or _has_missed(self.least):
            return []
        compared = [self.least] if self.recommended is self.least else [self.least, self.recommended]
        return compared + [one for one in open_ones if one is not self.recommended]


def standing(verdict: Verdict) -> Standing | None:
    """Return where the confirmation stands, None where no confirmation run decides yet.

    Of each batch size its best candidate counts, and only where fresh seeds reached the target in more than half of its
    runs. With the 95 % interval [low, high] of the ratio of two figures (Welch, on logarithms), L the least and R the
    recommended, a batch size b is undecided

    * where it is smaller than R and low(b / L) ≤ 1.05 < high(b / L): neither shown to be within 5 %, which would make
      it the recommended, nor shown not to be;
    * where it could be the least, low(b / L) < 1, and R is not shown to be within 5 % of it, high(R / b) > 1.05: the
      least would then be b, and R perhaps not within 5 % of it;
    * where there is no interval: below three runs, or where one missed the target.

    The recommendation is settled where no batch size is undecided. Two batch sizes that are as good as each other
    settle once each is shown to be within 5 % of the other, though none is ever shown to be the better one.
    """
    if not verdict.confirmed:
        return None
    least = verdict.least
    confirmed = [one for one in verdict.by_batch.values() if one.is_confirmed and math.isfinite(one.value)]
    flat = [one for one in confirmed if one is not least and is_shown_flat(one, least)]
    recommended = min([least, *flat], key=_batch_size)
    undecided = [one for one in confirmed if one is not least and _is_undecided(one, least, recommended)]
    return Standing(least, recommended, tuple(sorted(undecided, key=_batch_size)))


def _is_undecided(one: Candidate, least: Candidate, recommended: Candidate) -> bool:
    to_least = ratio_interval(one.estimate, least.estimate)
    if to_least is None:
        return True
    low, high = to_least
    if _batch_size(one) < _batch_size(recommended) and low <= FLAT_RATIO < high:
        return True
    return low < 1 and one is not recommended and not is_shown_flat(recommended, one)


def _batch_size(candidate: Candidate) -> int:
    return candidate.configuration.batch_size


def _has_missed(candidate: Candidate) -> bool:
    return candidate.estimate.reached < candidate.estimate.runs
