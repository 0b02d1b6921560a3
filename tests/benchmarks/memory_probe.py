"""Claim: the memory probe's largest micro-batch never runs out in 200 steps; a size above its upper bracket does.

    python tests/benchmarks/memory_probe.py studies/fashion_mnist_cpu.yaml --limit-gib 2

Probes in real worker processes, and prints each size with its peak and the fitted line. Then a whole trial (warm-up,
steps, evaluations) runs at the probe's answer, and one above its upper bracket: n = 1 of each. On the CPU the limit
applies to the process's data segment; the peak is its resident memory.
"""

if not __package__:
    __import__("from_clone")

import tempfile
from dataclasses import replace
from pathlib import Path

from bssearch.commands.launch import Launch
from bssearch.commands.opening import opened
from bssearch.commands.probes import MemoryProbe, probe_memory, run_request
from bssearch.executors.base import Executor
from bssearch.records import Goal, TrialOutcome, TrialState
from bssearch.records.text import gib
from bssearch.search.calibration import default_at
from bssearch.search.driver import Listener
from bssearch.spec import StudySpec, find_spec, load_spec
from tests.benchmarks.harness import script
from tests.factories import make_request

STEPS = 200
EVALUATE_EVERY = 100
ABOVE = 1.02
"""How much above the upper bracket a size is."""


def run(spec: StudySpec, executor: Executor, size: int, steps: int = STEPS) -> TrialOutcome:
    """Train the default at a micro-batch size for some steps, towards a target out of reach."""
    target = spec.record_target
    request = make_request(
        number=size,
        configuration=replace(default_at(spec, size, size).configuration, learning_rate=1e-6),
        seed=0,
        target=replace(target, value=1e9 if target.goal is Goal.MAXIMIZE else -1e9),
        train_seconds_limit=3600.0,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=min(EVALUATE_EVERY, steps),
        threads=spec.executor.threads,
    )
    outcome, _ = run_request(executor, request, until_step=steps)
    return outcome


class Printer(Listener):
    """Prints the result of each size."""

    def note(self, message: str) -> None:
        print(message, flush=True)


def show(found: MemoryProbe) -> None:
    for use in sorted([*found.uses, *found.marginal], key=lambda use: use.micro_batch_size):
        verdict = "fits" if use.fits else "marginal" if use in found.marginal else "too large"
        peak = "" if use.peak_memory_bytes is None else f"peak {gib(use.peak_memory_bytes)}"
        print(f"{use.micro_batch_size:>8}  {verdict:9}  {peak}  {use.reason or ''}".rstrip())
    if found.fit is not None:
        fit = found.fit
        print(
            f"peak = {gib(round(fit.fixed_bytes))} + {fit.bytes_per_sample / 2**10:.4g} KiB × micro-batch, "
            f"largest residual {fit.largest_residual:.1%}"
        )
    if found.whole_training_part_fits:
        print(f"the whole training part ({found.ceiling} samples) fits at once")
    else:
        print(f"largest that fits: {found.largest_that_fits}; smallest that does not: {found.smallest_that_does_not}")


def main(spec: str, limit_gib: float | None = None) -> None:
    """Probe, print, and check the answer by two trials."""
    path = find_spec(spec)
    asked = load_spec(path, [] if limit_gib is None else [f"executor.memory_limit_gib={limit_gib}"])
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(db=f"sqlite:///{Path(folder) / 'probe.db'}", folder=Path(path).parent, listener=Printer())
        with opened(asked, launch) as study:
            found = probe_memory(study)
            show(found)
            fits = run(asked, study.executor, found.largest_that_fits)
            print(f"{found.largest_that_fits}: {fits.steps} steps, {fits.state} ({fits.reason})")
            if found.smallest_that_does_not is not None:
                above = min(found.ceiling, int(found.smallest_that_does_not * ABOVE) + 1)
                fails = run(asked, study.executor, above)
                print(f"{above}: {fails.steps} steps, {fails.state} ({fails.reason})")


if __name__ == "__main__":
    script(main, __doc__)
