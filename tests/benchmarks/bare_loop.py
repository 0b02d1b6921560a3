"""How much longer bssearch's loop takes than one that is written for speed alone.

Run on a GPU as ``python tests/benchmarks/bare_loop.py --device cuda``; on a CPU ``--quick`` tries it out. Exits 1 on a
GPU where a median is above 2 %. There is no bar on a CPU.

The reference is written as the fastest public runs of small image models are (Jordan 2024, "94 % on CIFAR-10 in 3.29
seconds on a single GPU", arXiv 2404.00498, and its repository cifar10-airbench): the data lie on the device, which also
draws each epoch's order; batches are gathered by index; one fused SGD with Nesterov momentum, ``set_to_none``; no loss
is kept, no stop is asked for, and nothing waits before the end of a segment. It has no ledgers, no learning-rate
schedule, and drops the incomplete batch, as bssearch does. Model, loss, precision, initial weights and batch sizes are
those of the trial.

Each mode is measured against a reference of that mode: ``eager``, and with ``--compiled`` the model of both compiled.
The loops take turns segment by segment in one process, in alternating order. The A/A row is a second reference against
the first: what it shows is the noise of the method.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer

from bssearch.records import TrainingSettings
from bssearch.training.batches import place
from bssearch.training.computation import Computation
from bssearch.workloads.base import Data, Workload
from tests.benchmarks.harness import one_of, ratio, script, timed_in_turns
from tests.benchmarks.loop_overhead import (
    LEARNING_RATE,
    PRECISIONS,
    SEED,
    WORKLOADS,
    print_rows,
    product,
)

BAR = 0.02
COMPILE = {"eager": "none", "compiled": "default"}
"""What ``training.compile`` is in each mode."""


@dataclass(frozen=True)
class Found:
    """What was measured of one mode at one batch size; ratios over the reference's seconds, with 95 % intervals."""

    mode: str
    batch_size: int
    step_seconds: float
    pairs: int
    steps: int
    again: tuple[float, float, float]
    bssearch: tuple[float, float, float]
    warnings: tuple[str, ...]
    bar: float | None

    @property
    def passes(self) -> bool:
        return self.bar is None or (self.bssearch[0] <= 1 + self.bar and not self.warnings)


class FastLoop:
    """SGD as fast as PyTorch has it, on data that lie on the device."""

    def __init__(self, workload: Workload, data: Data, batch_size: int, computation: Computation, mode: str) -> None:
        torch.manual_seed(SEED)
        self.device = computation.device
        self.workload, self.batch_size = workload, batch_size
        self.inputs, self.targets = data.train.inputs, data.train.targets
        self.autocast_to = torch.bfloat16 if computation.precision == "bf16" else None
        self.model = workload.build_model(dropout=0.0).to(self.device)
        if mode == "compiled":
            self.model.compile(dynamic=False)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, fused=True
        )
        self.order = torch.empty(0, dtype=torch.int64, device=self.device)
        self.rows = torch.arange(batch_size, device=self.device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = self.inputs[self.rows], self.targets[self.rows]
        dtype = self.autocast_to
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype):
            loss = self.workload.loss(self.model, inputs, targets, label_smoothing=0.0)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def segment(self, steps: int) -> None:
        size = self.batch_size
        for _ in range(steps):
            if len(self.order) < size:
                self.order = torch.randperm(len(self.inputs), device=self.device)
            self.rows.copy_(self.order[:size])
            self.order = self.order[size:]
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    workload: Workload, batch_size: int, device: torch.device, precision: str, mode: str, *, steps: int, pairs: int
) -> Found:
    """Let the loops take turns ``pairs`` times, a segment of ``steps`` each."""
    settings = TrainingSettings(precision=precision, compile=COMPILE[mode], fused=True, measure_noise=False)
    computation = Computation(device, settings)
    data, _ = place(workload.load(torch.device("cpu")), computation)
    trial, trainer = product(workload, data, batch_size, computation, steps)
    reference, again = (FastLoop(workload, data, batch_size, computation, mode) for _ in range(2))
    work: dict[str, Callable[[], object]] = {
        "reference": lambda: reference.segment(steps),
        "again": lambda: again.segment(steps),
        "bssearch": lambda: trial.train_segment(trainer),
    }
    times = timed_in_turns(work, pairs)
    trainer.close()
    return Found(
        mode=mode,
        batch_size=batch_size,
        step_seconds=statistics.median(times["reference"]) / steps,
        pairs=pairs,
        steps=steps,
        again=ratio(times["again"], times["reference"]),
        bssearch=ratio(times["bssearch"], times["reference"]),
        warnings=tuple(computation.warnings),
        bar=BAR if device.type == "cuda" and mode != "compiled" else None,
    )


def print_found(found: Found) -> None:
    print(
        f"{found.mode}, batch size {found.batch_size}, {found.step_seconds * 1e3:.3f} ms a step of the reference, "
        f"{found.pairs} pairs of {found.steps} steps"
    )
    print_rows(found.again, "bssearch", found.bssearch)
    for warning in found.warnings:
        print(warning)


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    workload: Annotated[str | None, one_of(WORKLOADS, "default: fashion_mnist on a GPU, else digits")] = None,
    precision: Annotated[str, one_of(PRECISIONS)] = "auto",
    batch_size: list[int] | None = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="compiled models, too")] = False,
    steps: Annotated[int, typer.Option(help="per segment")] = 20,
    pairs: int = 150,
    quick: Annotated[bool, typer.Option("--quick", help="few short segments: to try the script")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> bool:
    """Measure, print and judge."""
    torch.set_num_threads(1)
    place = torch.device(device)
    task = WORKLOADS[workload or ("fashion_mnist" if place.type == "cuda" else "digits")]()
    steps, pairs = (4, 10) if quick else (steps, pairs)
    found: list[Found] = []
    for mode in ["eager", *(["compiled"] if compiled else [])]:
        for size in batch_size or [64, 256, 1024]:
            one = measure(task, size, place, precision, mode, steps=steps, pairs=pairs)
            found.append(one)
            if not as_json:
                print_found(one)
    if as_json:
        print(json.dumps({"device": device, "rows": [{**asdict(one), "passes": one.passes} for one in found]}))
    return all(one.passes for one in found)


if __name__ == "__main__":
    script(main, __doc__)
