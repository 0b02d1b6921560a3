"""``check --walk``: six steps from the memory budget to the task's priority, with measured figures."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from bssearch.analysis.law.batch_model import MemoryFit, fit_memory
from bssearch.analysis.shape import Model
from bssearch.commands.branch_probe import configuration_at
from bssearch.commands.probes import run_default
from bssearch.errors import BSSearchError
from bssearch.executors.base import Executor
from bssearch.planning.memory.request import GIB, HEADROOM, MIB
from bssearch.planning.start import OBJECTIVES
from bssearch.records import MemoryRequest, ProbeRecord, TrialOutcome, WorkloadDescription
from bssearch.search.calibration import default_at
from bssearch.spec import StudySpec

DROP = 0.02  # relative loss of the metric at the maximum that calls for fewer samples or more regularisation


class WalkStep(Model):
    """A step: its question, the measured figures by name, and the decision."""

    question: str
    figures: dict[str, float | None]
    decision: str


@dataclass(frozen=True)
class Walk:
    """Measurements of a check: step times by batch size, and the default's short trial."""

    spec: StudySpec
    executor: Executor
    found: WorkloadDescription
    probes: Mapping[int, ProbeRecord]
    trial: TrialOutcome
    limit: float

    def steps(self) -> Iterator[WalkStep]:
        """Yield the six steps."""
        environment = self.found.environment
        budget = environment.device_memory_bytes or psutil.virtual_memory().total
        usable = (1 - HEADROOM) * budget
        yield WalkStep(
            question="How much memory is there?",
            figures={"memory_gib": budget / GIB, "usable_gib": usable / GIB},
            decision=f"plan with {1 - HEADROOM:.0%} of {environment.device_name}: feasible, not optimal",
        )
        fit, reason = self._memory()
        yield self._memory_step(fit, reason)
        most = self._most(fit, usable)
        yield self._largest_step(most)
        yield from self._training_steps()
        objective = next((one for one in OBJECTIVES.values() if one[0] == self.spec.objective), None)
        yield WalkStep(
            question="What comes first?",
            figures={},
            decision=f"objective {self.spec.objective}" + (f": {objective[1]}" if objective else ""),
        )

    def _memory(self) -> tuple[MemoryFit | None, str]:
        probes, samples = self.probes, self.found.train_samples or math.inf
        fitting = {probe.micro_batch_size for probe in probes.values() if probe.micro_batch_size <= samples}
        try:
            uses = [
                self.executor.measure_memory(
                    MemoryRequest(
                        configuration=default_at(self.spec, size, size).configuration,
                        threads=self.spec.executor.threads,
                    )
                )
                for size in sorted({*fitting, max(1, max(fitting) // 2)})
            ]
        except BSSearchError as error:
            return None, error.message
        return fit_memory(uses), "unknown from fewer than three micro-batches"

    def _memory_step(self, fit: MemoryFit | None, reason: str) -> WalkStep:
        question = "How much memory does a sample take?"
        if fit is None:
            return WalkStep(question=question, figures={}, decision=f"not measured: {reason}")
        return WalkStep(
            question=question,
            figures={"fixed_gib": fit.fixed_bytes / GIB, "sample_mib": fit.bytes_per_sample / MIB},
            decision="a fixed part, and an equal part for each sample",
        )

    def _most(self, fit: MemoryFit | None, usable: float) -> int | None:
        if fit is None or fit.bytes_per_sample <= 0:
            return self.found.train_samples if fit else None
        most = max(0, math.floor((usable - fit.fixed_bytes) / fit.bytes_per_sample))
        return min(most, self.found.train_samples or most)

    def _largest_step(self, most: int | None) -> WalkStep:
        largest = self.spec.batch_sizes[-1]
        if most is None:
            decision = "unknown: `bssearch probe memory` finds the limit"
        elif most >= largest:
            decision = f"batch {largest}, the largest of the space, fits at once"
        else:
            decision = f"batches above {most} accumulate: set space.max_micro_batch_size: {most}"
        return WalkStep(
            question="What is the largest safe micro-batch?", figures={"safe_micro_batch": most}, decision=decision
        )

    def _training_steps(self) -> Iterator[WalkStep]:
        metric, default, largest = self.spec.record_target.metric, self.spec.default.batch_size, max(self.probes)
        other = self.trial if largest == default else self._at_largest(largest)
        mine, its = self.trial.best_metric, other.best_metric
        gain = self.spec.record_target.gain
        drop = None if mine is None or its is None or not mine else (gain(mine) - gain(its)) / abs(mine)
        if drop is None:
            decision = "not measured: no evaluation in time"
        elif drop > DROP:
            decision = f"{metric} drops by {drop:.1%} in {self.limit:g} s: take fewer samples, or retune and regularise"
        else:
            decision = f"the metric drops by at most {DROP:.0%}: batch {largest} trains as well in {self.limit:g} s"
        figures = {f"{metric}_at_{default}": mine, f"{metric}_at_{largest}": its, "drop": drop}
        yield WalkStep(question="Does the maximum converge?", figures=figures, decision=decision)
        times = {size: run.time_to_target_s for size, run in ((default, self.trial), (largest, other))}
        reached = {size: seconds for size, seconds in times.items() if seconds is not None}
        soonest = min(reached, key=lambda size: reached[size], default=None)
        yield WalkStep(
            question="Which batch size reaches the target soonest?",
            figures={
                **{f"step_s_at_{size}": probe.step_seconds for size, probe in self.probes.items()},
                **{f"time_to_target_s_at_{size}": seconds for size, seconds in times.items()},
            },
            decision=(
                f"batch {soonest} of these two batch sizes, untuned"
                if soonest
                else f"neither batch size within {self.limit:g} s"
            )
            + "; `bssearch run` tries the sizes between, each with its own learning rate",
        )

    def _at_largest(self, largest: int) -> TrialOutcome:
        spec, probe = self.spec, self.probes[largest]
        rule = spec.space.rate_rule(spec.default_configuration.optimizer)
        configuration = configuration_at(spec, largest, probe.micro_batch_size, rule)
        return run_default(
            spec, self.executor, 1, probe=probe, limit=self.limit, stop_at_target=True, configuration=configuration
        )[0]
