"""`bssearch probe branch` against full continuations of the same run: the local critical batch size within a factor 2.

Run as ``python tests/benchmarks/branch_probe.py``: some twelve minutes on one core. The shipped ``char_lm_cpu``
trains at B = 8 with a constant rate, and is saved early, midway and late. At each checkpoint the probe makes five
branches of 4,096 samples at each batch size (the whole run has 16,384).

The truth is what the probe is too cheap to see: from each checkpoint three seeds go on at B to the end of the run, and
at 2B, 4B, … until they have the loss that B has there, the mean of its seeds. A batch size loses where it needs more
samples than B by more than the seeds' spread: the same one-sided bound, of samples. The truth is the largest that does
not lose. Bar: at each of the checkpoints the probe's batch size is within a factor 2 of it.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bssearch.analysis.law.branches import BranchedSize, bound_of, holds
from bssearch.commands.opening import Launch
from bssearch.commands.probe.branch import branch, configuration_at
from bssearch.records import (
    Branch,
    Configuration,
    Goal,
    Target,
    TrainingSettings,
    TrialRequest,
    TrialState,
)
from bssearch.scaling import LearningRateRule
from bssearch.spec import StudySpec, load_spec
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.loop import Trial
from bssearch.workloads.char_lm import CharLM
from tests.benchmarks.harness import script

SPEC = Path(__file__).parents[2] / "studies" / "char_lm_cpu.yaml"
CHANGES = ["default.batch_size=8", "default.learning_rate=0.002", "default.warmup_epochs=0.01", "executor.name=inline"]
CHECKPOINTS = (1024, 4096, 10240)
END = 16384
"""Samples of the run at its checkpoints, and at its end."""

BRANCH_SAMPLES = 4096
REPEATS = 5
OCTAVES = 4
SEEDS = (101, 102, 103)
EVERY = 512
"""Samples between two evaluations of a continuation."""

SMOOTHED = 3
"""Evaluations over which a continuation's loss is averaged: those of a batch of 128 are 512 samples apart."""

PATIENCE = 1.6
"""A continuation is given up, as one that loses, after so many times the samples that B needs."""


@dataclass(frozen=True)
class Row:
    """A checkpoint with the probe's batch size and the true one."""

    samples: int
    probed: int | None
    verdict: str
    truth: int

    @property
    def is_within_two(self) -> bool:
        """Return whether the probe meets the bar."""
        return self.probed is not None and self.truth / 2 <= self.probed <= 2 * self.truth


class Task:
    """The run, and its continuations, in this process."""

    def __init__(self, spec: StudySpec) -> None:
        self.spec = spec
        self._workload = CharLM(**spec.workload_settings)  # type: ignore[arg-type]
        cpu = torch.device("cpu")
        self._data = self._workload.load(cpu)
        self._computation = Computation(cpu, TrainingSettings(measure_noise=False))

    def at(self, octave: int) -> Configuration:
        """Return the configuration at 2^octave B."""
        size = self.spec.default.batch_size * 2**octave
        return configuration_at(self.spec, size, size, LearningRateRule.SQRT)

    def save_run(self, folder: Path) -> list[Path]:
        """Train the run to its last checkpoint; return the files of all."""
        size = self.spec.default.batch_size
        every = math.gcd(*CHECKPOINTS)
        trial = self._trial(self.at(0), seed=7, every=every)
        paths = []
        for one in trial.observations():
            if one.samples in CHECKPOINTS:
                trainer = trial._trainer
                assert trainer is not None
                paths.append(folder / f"{one.samples}.pt")
                state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
                torch.save({**state, "step": one.samples // size, "samples": one.samples}, paths[-1])
            if one.samples >= CHECKPOINTS[-1]:
                return paths
        raise AssertionError("the run ended before its last checkpoint")

    def continuation(self, path: Path, octave: int, seed: int, most: int) -> Iterator[tuple[int, float]]:
        """Yield the samples since a checkpoint and the smoothed loss."""
        branch = Branch(checkpoint=str(path), samples=most, start_samples=int(path.stem))
        losses: list[float] = []
        for one in self._trial(self.at(octave), seed, EVERY, branch).observations():
            losses.append(one.metric)
            yield one.samples, statistics.fmean(losses[-SMOOTHED:])

    def _trial(self, configuration: Configuration, seed: int, every: int, branch: Branch | None = None) -> Trial:
        request = TrialRequest(
            number=1,
            configuration=configuration,
            seed=seed,
            target=Target(metric="loss", value=0.0, goal=Goal.MINIMIZE),
            train_seconds_limit=1e9,
            limit_state=TrialState.CAPPED,
            eval_every_steps=max(1, every // configuration.batch_size),
            stop_at_target=False,
            branch=branch,
        )
        return Trial(request, self._workload, self._data, self._computation, clock=clock_for(torch.device("cpu")))


def samples_to(curve: Iterator[tuple[int, float]], loss: float) -> float:
    """Return the samples at which a curve has come to a loss, by a line between evaluations; ∞ where it has not."""
    for before, now in itertools.pairwise(curve):
        if now[1] <= loss:
            return before[0] + (now[0] - before[0]) * max(0.0, before[1] - loss) / max(1e-12, before[1] - now[1])
    return math.inf


def truth_at(task: Task, path: Path) -> int:
    """Return the largest batch size whose full continuations from a checkpoint need no more samples than those at B."""
    rest = END - int(path.stem)
    most = int(PATIENCE * rest) // EVERY * EVERY
    curves = [list(task.continuation(path, 0, seed, int(1.25 * rest) // EVERY * EVERY)) for seed in SEEDS]
    loss = statistics.fmean(next(value for samples, value in curve if samples >= rest) for curve in curves)
    base = BranchedSize(batch_size=task.at(0).batch_size, ends=tuple(samples_to(iter(one), loss) for one in curves))
    print(f"  after {path.stem}: loss {loss:.4f} at the end; B needs {_shown(base.ends)}", flush=True)
    bound = bound_of(base, len(SEEDS), Goal.MINIMIZE)
    assert bound is not None, "the continuations at B reach the mean of their own ends"
    largest = base.batch_size
    for octave in range(1, OCTAVES + 1):
        ends = tuple(samples_to(task.continuation(path, octave, seed, most), loss) for seed in SEEDS)
        size = BranchedSize(batch_size=task.at(octave).batch_size, ends=ends)
        print(f"  after {path.stem}: {size.batch_size} needs {_shown(ends)}, bound {bound:.0f}", flush=True)
        if not holds(size, bound, Goal.MINIMIZE):
            break
        largest = size.batch_size
    return largest


def _shown(ends: Sequence[float | None]) -> str:
    return " ".join(f"{end:.0f}" for end in ends if end is not None)


def probed(spec: StudySpec, folder: Path, paths: list[Path]) -> dict[int, tuple[int | None, str]]:
    """Return the probe's batch size and verdict at each checkpoint."""
    tokens = BRANCH_SAMPLES * CharLM(**spec.workload_settings).tokens_per_sample  # type: ignore[arg-type]
    launch = Launch(db=f"sqlite:///{folder / 'study.db'}", progress=False)
    found = branch(spec, launch, checkpoint=paths, tokens=tokens, octaves=OCTAVES, repeats=REPEATS).document
    for one in found["checkpoints"]:
        for row in one["branches"]:
            print(f"  probe after {one['samples']}: {row['batch_size']} ends at {row['ends']}, bound {one['bound']}")
    return {one["samples"]: (one["batch_size"], one["verdict"]) for one in found["checkpoints"]}


def main() -> bool:
    """Run the probe and the continuations, print the table, and return 1 where the bar is missed."""
    torch.set_num_threads(1)
    started = time.process_time()
    spec = load_spec(SPEC, CHANGES)
    task = Task(spec)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = task.save_run(folder)
        answers = probed(spec, folder, paths)
        probe_seconds = time.process_time() - started
        rows = [Row(int(path.stem), *answers[int(path.stem)], truth_at(task, path)) for path in paths]
    print("| checkpoint, samples | probe | verdict | full continuations | within a factor 2 |")
    print("|---|---|---|---|---|")
    for row in rows:
        met = "yes" if row.is_within_two else "no"
        print(f"| {row.samples:,} | {row.probed} | {row.verdict} | {row.truth} | {met} |")
    print(f"CPU seconds: {probe_seconds:.0f} of the run and its probe, {time.process_time() - started:.0f} in all")
    return all(row.is_within_two for row in rows)


if __name__ == "__main__":
    script(main, __doc__)
