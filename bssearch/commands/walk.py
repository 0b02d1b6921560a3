"""``check --walk``: six steps from the memory budget to the task's priority, with measured figures."""

import math
from collections.abc import Iterator

import psutil

from bssearch.analysis.law.batch_model import MemoryFit, fit_memory
from bssearch.analysis.shape import Model
from bssearch.commands.branch_probe import configuration_at
from bssearch.commands.pitfalls import CheckEvidence
from bssearch.commands.probes import run_default
from bssearch.errors import BSSearchError
from bssearch.executors.base import Executor
from bssearch.planning.memory.request import GIB, HEADROOM, MIB
from bssearch.planning.start import OBJECTIVES
from bssearch.records import MemoryRequest, TrialOutcome
from bssearch.search.calibration import default_at

DROP = 0.02  # relative loss of the metric at the maximum that calls for fewer samples or more regularisation


class WalkStep(Model):
    """A step: its question, the measured figures by name, and the decision."""

    question: str
    figures: dict[str, float | None]
    decision: str


def walk_steps(evidence: CheckEvidence, executor: Executor) -> Iterator[WalkStep]:
    """Yield the six steps; measure the memory of micro-batches, and train at the largest batch size."""
    spec, samples = evidence.spec, evidence.found.train_samples
    environment = evidence.found.environment
    budget = environment.device_memory_bytes or psutil.virtual_memory().total
    usable = (1 - HEADROOM) * budget
    yield WalkStep(
        question="How much memory is there?",
        figures={"memory_gib": budget / GIB, "usable_gib": usable / GIB},
        decision=f"plan with {1 - HEADROOM:.0%} of this memory, which is feasible, not optimal",
    )
    fit, reason = _memory(evidence, executor)
    yield WalkStep(
        question="How much memory does a sample take?",
        figures={} if fit is None else {"fixed_gib": fit.fixed_bytes / GIB, "sample_mib": fit.bytes_per_sample / MIB},
        decision=f"not measured: {reason}" if fit is None else "a fixed part, and an equal part for each sample",
    )
    most = None if fit is None else samples
    if fit is not None and fit.bytes_per_sample > 0:
        fitting = max(0, math.floor((usable - fit.fixed_bytes) / fit.bytes_per_sample))
        most = min(fitting, samples or fitting)
    yield _largest_step(spec.batch_sizes[-1], most)
    yield from _training_steps(evidence, executor)
    meaning = next((meaning for name, meaning in OBJECTIVES.values() if name == spec.objective), "")
    yield WalkStep(
        question="What comes first?",
        figures={},
        decision=f"objective {spec.objective}{meaning and f': {meaning}'}",
    )


def _memory(evidence: CheckEvidence, executor: Executor) -> tuple[MemoryFit | None, str]:
    spec, samples = evidence.spec, evidence.found.train_samples or math.inf
    fitting = {probe.micro_batch_size for probe in evidence.probes.values() if probe.micro_batch_size <= samples}
    try:
        uses = [
            executor.measure_memory(
                MemoryRequest(configuration=default_at(spec, size, size).configuration, threads=spec.executor.threads)
            )
            for size in sorted({*fitting, max(1, max(fitting) // 2)})
        ]
    except BSSearchError as error:
        return None, error.message
    return fit_memory(uses), "fewer than three micro-batches ran"


def _largest_step(largest: int, most: int | None) -> WalkStep:
    if most is None:
        decision = "unknown; find the limit with `bssearch probe memory`"
    elif most < 1:
        decision = "none: not even one sample fits safely; take a smaller model or a larger device"
    elif most >= largest:
        decision = f"batch {largest}, the largest of the space, fits at once"
    else:
        decision = f"batches above {most} accumulate: set space.max_micro_batch_size: {most}"
    return WalkStep(
        question="What is the largest safe micro-batch?", figures={"safe_micro_batch": most}, decision=decision
    )


def _training_steps(evidence: CheckEvidence, executor: Executor) -> Iterator[WalkStep]:
    spec, trial, limit = evidence.spec, evidence.outcome, evidence.limit
    target, default, largest = spec.record_target, spec.default.batch_size, max(evidence.probes)
    other = trial if largest == default else _at_largest(evidence, executor, largest)
    mine, its = trial.best_metric, other.best_metric
    drop = None if mine is None or its is None or not mine else (target.gain(mine) - target.gain(its)) / abs(mine)
    if mine is None or its is None:
        decision = "not measured: no evaluation in time"
    elif drop is None:
        decision = f"not measured: {target.metric} is 0 at batch {default}"
    elif drop > DROP:
        decision = f"{target.metric} drops by {drop:.1%} in {limit:g} s: take fewer samples, or retune and regularise"
    else:
        decision = f"the metric drops by at most {DROP:.0%}: batch {largest} trains as well in {limit:g} s"
    yield WalkStep(
        question="Does the maximum converge?",
        figures={f"{target.metric}_at_{default}": mine, f"{target.metric}_at_{largest}": its, "drop": drop},
        decision=decision,
    )
    times = {size: run.time_to_target_s for size, run in ((default, trial), (largest, other))}
    reached = {size: seconds for size, seconds in times.items() if seconds is not None}
    soonest = (
        f"batch {min(reached, key=reached.__getitem__)} of these two batch sizes, untuned"
        if reached
        else f"neither batch size within {limit:g} s"
    )
    yield WalkStep(
        question="Which batch size reaches the target soonest?",
        figures={
            **{f"step_s_at_{size}": probe.step_seconds for size, probe in evidence.probes.items()},
            **{f"time_to_target_s_at_{size}": seconds for size, seconds in times.items()},
        },
        decision=f"{soonest}; `bssearch run` tries the sizes between, each with its own learning rate",
    )


def _at_largest(evidence: CheckEvidence, executor: Executor, largest: int) -> TrialOutcome:
    spec, probe = evidence.spec, evidence.probes[largest]
    rule = spec.space.rate_rule(spec.default_configuration.optimizer)
    outcome, _ = run_default(
        spec,
        executor,
        1,
        probe=probe,
        limit=evidence.limit,
        stop_at_target=True,
        configuration=configuration_at(spec, largest, probe.micro_batch_size, rule),
    )
    return outcome
