"""The belief that large batches need an optimizer that scales each layer's rate: LARS or LAMB."""

from __future__ import annotations

from collections.abc import Sequence

from bssearch.analysis.optimum import Candidate
from bssearch.analysis.rules.regret import Judgement, judge
from bssearch.records import Configuration, Phase, TrialRecord, TrialState
from bssearch.step_times import StepSeconds

LAYERWISE = frozenset({"lars", "lamb"})
"""LARS (You et al. 2017, arXiv 1708.03888) and LAMB (You et al. 2020, arXiv 1904.00962)."""

LARGE = 8192
"""The batch size from which on the belief has them needed: that of LARS's first evidence, and what practice quotes."""


def other_kind(trials: Sequence[TrialRecord], tuned: Candidate) -> Configuration | str:
    """Return the best that the search found at the tuned optimum's batch size with the other kind of optimizer.

    Where no trial with one reached the target there, a sentence says so.
    """
    size, is_layerwise = tuned.configuration.batch_size, tuned.configuration.optimizer in LAYERWISE
    found = [
        (figure, trial.number, trial.configuration)
        for trial in trials
        if trial.phase is Phase.SEARCH
        and trial.state is TrialState.REACHED
        and trial.configuration.batch_size == size
        and (trial.configuration.optimizer in LAYERWISE) != is_layerwise
        if (figure := tuned.objective.figure(trial)) is not None
    ]
    if not found:
        wanted = "another optimizer than lars and lamb" if is_layerwise else "lars or lamb"
        return (
            f"no search trial there with {wanted} reached the target; bssearch enqueue STUDY batch_size={size} "
            "optimizer=… learning_rate=… tries one to the full limit, whatever the search thinks of it"
        )
    return min(found, key=lambda one: one[:2])[2]


def judge_layerwise(
    other: Candidate, tuned: Candidate, step_seconds: StepSeconds, *, wanted: int, limit: float
) -> Judgement:
    """Judge the belief by runs with such an optimizer and runs without, one kind of them the ``tuned`` optimum's.

    The regret is the time without over the time with. Held: it is above `bssearch.analysis.rules.regret.BROKE` for
    sure, broke: below ``HELD``. Below a batch of `LARGE` samples nothing is decided, for the belief is not about those.
    """
    size, is_layerwise = tuned.configuration.batch_size, tuned.configuration.optimizer in LAYERWISE
    plain, layerwise = (other, tuned) if is_layerwise else (tuned, other)
    names = f"{plain.configuration.optimizer} against {layerwise.configuration.optimizer}"
    if not layerwise.estimate.reached:
        runs = len(layerwise.runs)
        finding = Judgement("broke" if runs >= wanted else "undecided", f"{names}: 0 of {runs} runs with it reached")
    else:
        found = judge(plain, layerwise, step_seconds, wanted=wanted, limit=limit).reversed()
        finding = Judgement(found.finding, f"{names}: {found.reason}", found.regret)
    if size >= LARGE:
        return finding
    reason = f"batch {size} is below {LARGE:,}, from where on they are said to be needed; {finding.reason}"
    return Judgement("undecided", reason, finding.regret)
