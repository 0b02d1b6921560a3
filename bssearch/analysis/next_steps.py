"""What to do with an answer: the one or two commands that would help most now."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from itertools import islice

from bssearch.analysis.answer import Largest, NextStep
from bssearch.analysis.certainty import Certainty
from bssearch.analysis.optimum import Verdict
from bssearch.settings import shipped_studies
from bssearch.spec import StudySpec

MOST = 2
"""Commands that are proposed at once: a choice."""

MORE_TRIALS = 1.5
"""The factor on the search trials that is proposed where batch sizes may not be fully tuned: a choice."""

SPEC = "SPEC"
"""Stands for the file of a spec, which no study knows."""


def next_steps(
    spec: StudySpec, verdict: Verdict, sure: Certainty | None, largest: Largest, trials: int
) -> list[NextStep]:
    """Return the commands that would help most, the first the most: to settle the answer, to widen it, to use it.

    ``trials`` are those that the search has run.
    """
    return list(islice(_proposed(spec, verdict, sure, largest, trials), MOST))


def _proposed(
    spec: StudySpec, verdict: Verdict, sure: Certainty | None, largest: Largest, trials: int
) -> Iterator[NextStep]:
    name = shlex.quote(spec.name)
    if not spec.is_imported:
        if not verdict.confirmed:
            yield NextStep(command=f"bssearch confirm {name}", why="runs the best again with fresh seeds")
        elif sure is not None and sure.is_provisional:
            yield _settling(spec, sure, trials)
        if (wider := _wider(spec, verdict, largest)) is not None:
            yield wider
    yield NextStep(command=f"bssearch best {name} --export yaml", why="writes these values for your own training")
    yield NextStep(command=f"bssearch report {name} --html {name}.html", why="shows every figure behind them")


def _settling(spec: StudySpec, sure: Certainty, trials: int) -> NextStep:
    """Return what would bring a provisional answer furthest."""
    if sure.settles == "runs":
        return NextStep(
            command=f"bssearch confirm {shlex.quote(spec.name)} --max-runs {sure.runs}",
            why=f"up to {sure.runs} runs of each batch size should settle which is best",
        )
    if sure.settles == "step_times":
        return NextStep(
            command=f"bssearch probe step-time {_spec_of(spec)}",
            why="the step times are not known well enough; each visit adds to them",
        )
    more = max(spec.budget.trials + 1, math.ceil(MORE_TRIALS * max(trials, 1)))
    return NextStep(
        command=f"bssearch run {_spec_of(spec)} --set budget.trials={more}",
        why="a batch size may not be tuned in full yet, which more runs of the same configurations cannot tell",
    )


def _wider(spec: StudySpec, verdict: Verdict, largest: Largest) -> NextStep | None:
    """Return the study of more batch sizes, where the optimum is the smallest or the largest and more can be had."""
    sizes, best = spec.batch_sizes, verdict.optimal.configuration.batch_size
    if len(sizes) == 1:
        return None
    if best == max(sizes) and not largest.bounded_by_memory:
        wider = [*sizes, 2 * best]
    elif best == min(sizes) and best > 1:
        wider = [best // 2, *sizes]
    else:
        return None
    sets = f"--set {shlex.quote(f'name={spec.name}-wider')} --set {shlex.quote(f'space.batch_size={wider}')}"
    return NextStep(
        command=f"bssearch run {_spec_of(spec)} {sets}",
        why=f"batch {best} is at the end of what was tried; the optimum may lie beyond",
    )


def _spec_of(spec: StudySpec) -> str:
    """Return what a command is to be given as the spec: the name of a shipped study, else a word for the file."""
    return shlex.quote(spec.name) if spec.name in shipped_studies() else SPEC
