"""Time that bssearch's training loop adds to a bare PyTorch loop of the same steps.

Run as ``python tests/benchmarks/loop_overhead.py``, on a GPU with ``--device cuda --workload fashion_mnist --precision
bf16 --batch-size 256 --batch-size 4096 --steps 20 --pairs 60``. Exits 1 if a median is above 3 % on the CPU or 2 % on a
GPU.

The loops train a shipped workload at one batch size on one CPU thread. They take turns in one process, segment by
segment, in alternating order. The product's segment is the work of a trial between two evaluations: ledger, stop check,
limit check, progress, schedule and loss bookkeeping. A segment has a cost of its own, so ``--steps`` should be the
study's evaluation cadence: in digits 18, 10 and 4 steps at batch sizes 16, 64 and 128. On a GPU both loops wait for the
device at the end of a segment.
The A/A row compares two bare loops: it shows the noise of the method.

``--reference`` chooses the bare loop:

- ``hand`` is a hand-written loop, with the trial's seed, data order, learning rate, precision and optimizer; on the CPU
  both loops end with bit-equal weights. With ``--compile`` only the product's model is compiled: the row shows its gain
  over the eager loop, without a bar.
- ``fast`` is written for speed, as the fastest public runs of small image models (Jordan 2024, "94 % on CIFAR-10 in
  3.29 seconds on a single GPU", arXiv 2404.00498, and its repository cifar10-airbench): data and order are on the
  device, batches are gathered by index, SGD is fused, and the loop synchronises once a segment. With ``--compile`` both
  models are compiled. The bar holds on a GPU only, for eager models without a warning.
"""

if not __package__:
    __import__("from_clone")

import json
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch.nn.utils import parameters_to_vector

from bssearch import Data, Workload
from bssearch.records import Configuration, Target, TrialState
from bssearch.spec import TrainingSpec
from bssearch.training.batches import place
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.loop import TrialLoop
from bssearch.training.trainer import Trainer
from bssearch.workloads.digits import Digits
from bssearch.workloads.fashion_mnist import FashionMnist
from tests.benchmarks.harness import one_of, ratio, script, timed_in_turns
from tests.factories import make_request

BARS = {"cpu": 0.03, "cuda": 0.02}
SHORTEST_STEP = 0.005
"""On a CPU the bar is for steps of at least so many seconds."""

SEED = 1
LEARNING_RATE = 0.02
PRECISIONS = ("auto", "fp32", "tf32", "bf16")
WORKLOADS: dict[str, Callable[[], Workload]] = {"digits": Digits, "fashion_mnist": FashionMnist}


@dataclass(frozen=True)
class Overhead:
    """The measurement at one batch size; ratios of seconds over the bare loop's, with 95 % intervals.

    ``warnings`` of the computation count, because the fast loop makes no concessions to a device.
    """

    batch_size: int
    step_seconds: float
    pairs: int
    steps: int
    bit_equal: bool
    again: tuple[float, float, float]
    bssearch: tuple[float, float, float]
    warnings: tuple[str, ...]
    bar: float | None

    @property
    def passes(self) -> bool:
        return self.bar is None or (self.bssearch[0] <= 1 + self.bar and not self.warnings)


class BareLoop:
    """A hand-written loop: momentum SGD over shuffled epochs without the incomplete batch."""

    def __init__(self, workload: Workload, data: Data, batch_size: int, computation: Computation) -> None:
        torch.manual_seed(SEED)
        self.device = computation.device
        self.model = workload.build_model(dropout=0.0).to(self.device)
        self.workload, self.data, self.batch_size = workload, data, batch_size
        self.bf16 = computation.precision == "bf16"
        self.optimizer = torch.optim.SGD(
            [
                {"params": [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]},
                {"params": [parameter for parameter in self.model.parameters() if parameter.ndim < 2]},
            ],
            lr=LEARNING_RATE,
            momentum=0.9,
            nesterov=True,
            fused=computation.fused,
        )
        self.generator = torch.Generator().manual_seed(SEED)
        self.order = torch.empty(0, dtype=torch.int64)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext():
            loss = self.workload.loss(self.model, inputs, targets, label_smoothing=0.0)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def take(self, rows: torch.Tensor) -> None:
        self.step(self.data.train.inputs[rows], self.data.train.targets[rows])

    def segment(self, steps: int) -> None:
        samples, size = len(self.data.train.inputs), self.batch_size
        for _ in range(steps):
            if len(self.order) < size:
                self.order = torch.randperm(samples, generator=self.generator, device=self.generator.device)
                self.order = self.order.to(self.device)
            rows, self.order = self.order[:size], self.order[size:]
            self.take(rows)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class FastLoop(BareLoop):
    """PyTorch's fastest SGD, on data on the device."""

    def __init__(self, workload: Workload, data: Data, batch_size: int, computation: Computation) -> None:
        super().__init__(workload, data, batch_size, computation)
        if computation.compiles:
            self.model.compile(dynamic=False)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, fused=True
        )
        self.generator = torch.Generator(self.device)
        self.rows = torch.arange(batch_size, device=self.device)

    def take(self, rows: torch.Tensor) -> None:
        super().take(self.rows.copy_(rows))  # the same memory in every step


REFERENCES: dict[str, type[BareLoop]] = {"hand": BareLoop, "fast": FastLoop}


def product(
    workload: Workload, data: Data, batch_size: int, computation: Computation, steps: int
) -> tuple[TrialLoop, Trainer]:
    """Return a prepared trial with segments of ``steps``, and its trainer."""
    request = make_request(
        number=0,
        configuration=Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=LEARNING_RATE),
        seed=SEED,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=steps,
    )
    asked: list[tuple[TrialState, str]] = []
    trial = TrialLoop(
        request,
        workload,
        data,
        computation,
        clock=clock_for(computation.device),
        stop=lambda: asked[0] if asked else None,
    )
    return trial, trial.prepare()


def measure(
    reference: str,
    workload: Workload,
    data: Data,
    batch_size: int,
    computation: Computation,
    *,
    steps: int,
    pairs: int,
) -> Overhead:
    """Let the loops take ``pairs`` turns, each a segment of ``steps``."""
    bare, again = (REFERENCES[reference](workload, data, batch_size, computation) for _ in range(2))
    trial, trainer = product(workload, data, batch_size, computation, steps)
    work: dict[str, Callable[[], object]] = {
        "bare": lambda: bare.segment(steps),
        "again": lambda: again.segment(steps),
        "bssearch": lambda: trial.train_segment(trainer),
    }
    times = timed_in_turns(work, pairs)
    trainer.close()
    weights = [parameters_to_vector(model.parameters()) for model in (bare.model, trainer.model)]
    step_seconds = statistics.median(times["bare"]) / steps
    is_long = reference == "hand" and step_seconds >= SHORTEST_STEP
    judged = not computation.compiles and (computation.device.type != "cpu" or is_long)
    return Overhead(
        batch_size=batch_size,
        step_seconds=step_seconds,
        pairs=pairs,
        steps=steps,
        bit_equal=torch.equal(*weights),
        again=ratio(times["again"], times["bare"]),
        bssearch=ratio(times["bssearch"], times["bare"]),
        warnings=tuple(computation.warnings) if reference == "fast" else (),
        bar=BARS[computation.device.type] if judged else None,
    )


def print_rows(again: tuple[float, float, float], name: str, found: tuple[float, float, float]) -> None:
    """Print ratios with their intervals: of two bare loops, and of the measurement."""
    for row, (median, low, high) in (("A/A", again), (name, found)):
        print(f"{row:<14} {median - 1:+7.2%}   [{low - 1:+.2%}, {high - 1:+.2%}]")


def print_table(found: Overhead, compiled: bool) -> None:
    print(
        f"batch size {found.batch_size}, {found.step_seconds * 1e3:.3f} ms a step, "
        f"{found.pairs} pairs of {found.steps} steps, 1 thread; weights bit-equal: {found.bit_equal}"
    )
    print_rows(found.again, "compiled" if compiled else "bssearch", found.bssearch)
    if found.bar is None:
        print("no bar: compiled, or on a CPU with --reference fast or steps of less than 5 ms")


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    reference: Annotated[str, one_of(REFERENCES, "the bare loop")] = "hand",
    workload: Annotated[str, one_of(WORKLOADS)] = "digits",
    precision: Annotated[str, one_of(PRECISIONS)] = "auto",
    compiled: Annotated[str, typer.Option("--compile", help="none, default, reduce-overhead or max-autotune")] = "none",
    batch_size: list[int] | None = None,
    steps: Annotated[int, typer.Option(help="per segment")] = 4,
    pairs: int = 150,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> bool:
    """Measure, print and judge."""
    torch.set_num_threads(1)
    task, fused = WORKLOADS[workload](), True if reference == "fast" else None
    given = {"precision": precision, "compile": compiled, "fused": fused, "measure_noise": False}
    settings = TrainingSpec.model_validate(given)
    computation = Computation(torch.device(device), settings)
    data, _ = place(task.load(torch.device("cpu")), computation)
    found = [
        measure(reference, task, data, size, computation, steps=steps, pairs=pairs) for size in batch_size or [256]
    ]
    if as_json:
        head = {"device": device, "workload": workload, "reference": reference, "compile": compiled}
        rows = [{**asdict(one), "passes": one.passes} for one in found]
        print(json.dumps({**head, "precision": computation.precision, "warnings": computation.warnings, "rows": rows}))
    else:
        for one in found:
            print_table(one, computation.compiles)
        print(*computation.warnings, sep="\n", end="\n" if computation.warnings else "")
    is_comparable = computation.device.type == "cpu" and reference == "hand" and not computation.compiles
    if is_comparable and not all(one.bit_equal for one in found):
        print("the two loops did not take the same steps", file=sys.stderr)
        return False
    return all(one.passes for one in found)


if __name__ == "__main__":
    script(main, __doc__)
