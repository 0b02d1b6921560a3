"""An optimum whose step is the host's time as much as the device's, and where it would lie without the host's.

B* = √(B_crit·α/β) grows with the fixed time α of a step. Where the host takes longer to launch a step than the device
to run it, α is the host's, and the optimum is that of the program and not of the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from bssearch.analysis.answer import Batch, Notice
from bssearch.analysis.law.affine_step_time import fit_step_time
from bssearch.analysis.law.batch_model import LawFit, PredictedOptimum, RunnableStep, predict_optimum
from bssearch.analysis.optimum import Candidate
from bssearch.records import WITH_CUDA_GRAPHS, ProbeRecord

HOST_BOUND = 0.10
"""The host-bound share above which a step counts as host-bound: a choice."""

FEWEST_SIZES = 2
"""Batch sizes that are not host-bound which the line of the device's step times takes."""


def about_the_host(
    batches: Sequence[Batch],
    optimal: Candidate,
    probes: Collection[ProbeRecord],
    law: LawFit | None,
    compile_mode: str,
) -> list[Notice]:
    """Return the caveat of an optimum that is host-bound: what the host takes, and the optimum without that.

    ``probes`` are the step times by which ``law`` gives seconds, ``compile_mode`` is the one that the study ran in.
    """
    size = optimal.configuration.batch_size
    share = next((row.host_bound_share for row in batches if row.batch_size == size), None)
    if share is None or share <= HOST_BOUND:
        return []
    return [Notice(code="host_bound", message="; ".join(_told(size, share, optimal, probes, law, compile_mode)))]


def _told(
    size: int,
    share: float,
    optimal: Candidate,
    probes: Collection[ProbeRecord],
    law: LawFit | None,
    compile_mode: str,
) -> Iterator[str]:
    yield (
        f"the host may not keep the device busy at the optimum: at batch {size} its host-bound share is {share:.0%} "
        f"(above {HOST_BOUND:.0%}), so that up to as much of a step is the program's time and not the device's"
    )
    if optimal.objective.trials_race:
        wanting = _wanting(probes, law)
        found = None if wanting or law is None else device_optimum(probes, law)
        if found is not None:
            yield f"with steps of the device's own time, {_in_words(found, size)}, by the law of steps"
        else:
            yield f"where it would be with steps of the device's own time cannot be told: {wanting or NO_LINE}"
    if compile_mode not in WITH_CUDA_GRAPHS:
        yield "training: {compile: reduce-overhead} runs the model as CUDA graphs, under a new name"


NO_LINE = "a larger batch is no slower among those that are not host-bound"


def _wanting(probes: Collection[ProbeRecord], law: LawFit | None) -> str | None:
    """Return what a prediction takes that there is not; None where it can be tried."""
    sizes = [one.batch_size for one in device_bound(probes)]
    if len(sizes) < FEWEST_SIZES:
        known = f"only batch {sizes[0]} has" if sizes else "none has"
        return f"that takes step times of two batch sizes with a share of at most {HOST_BOUND:.0%}, and {known}"
    if law is None or law.verdict != "fits":
        return "the law of steps does not fit, or has too few batch sizes"
    return None


def _in_words(found: PredictedOptimum, size: int) -> str:
    interval = "" if found.interval is None else f" [{found.interval[0]}, {found.interval[1]}]"
    if found.batch_size == size:
        return f"it would still be batch {size}{interval}"
    return f"it would be about batch {found.batch_size}{interval}"


def device_bound(probes: Collection[ProbeRecord]) -> list[ProbeRecord]:
    """Return the step times without accumulation that are known not to be host-bound, ascending."""
    return [
        one
        for one in sorted(probes, key=lambda one: one.batch_size)
        if one.step_seconds is not None
        and one.batch_size == one.micro_batch_size
        and one.host_bound_share is not None
        and one.host_bound_share <= HOST_BOUND
    ]


def device_optimum(probes: Collection[ProbeRecord], law: LawFit) -> PredictedOptimum | None:
    """Return the optimum among the batch sizes timed if each step took the device's own time alone, by the law.

    That time is α + β·B through the sizes that are not host-bound, of which it takes two. At the others it is no more
    than was measured, and no less than the seconds in which the host waited: (1 − share)·t. Steps that accumulate keep
    the time that was measured. None where there is no such line, or all sizes are above the largest that was run.
    """
    line = fit_step_time(device_bound(probes), FEWEST_SIZES)
    if line is None:
        return None
    steps = []
    for one in probes:
        seconds, share = one.step_seconds, one.host_bound_share
        if seconds is None:
            continue
        if share is not None and share > HOST_BOUND and one.batch_size == one.micro_batch_size:
            own = line.alpha_seconds + line.beta_seconds * one.batch_size
            seconds = min(max(own, (1 - share) * seconds), seconds)
        steps.append(RunnableStep(one.batch_size, one.micro_batch_size, seconds))
    return predict_optimum(law, steps)
