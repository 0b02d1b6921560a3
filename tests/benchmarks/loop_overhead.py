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

``--loop`` measures your own loop instead: ``batches`` is `trial.batches`, ``lightning`` and ``transformers`` are the
callbacks of two trainers. Exits 1 if a median is above 2 %, for steps of at least 5 ms. The trial's segment has its
clock, its connection to a worker (a real socket), its stop check and limit check. Its first 23 steps, which are timed
one by one, come before the segments. For ``batches`` a plain loop and a trial's loop take turns, over the same kind of
`DataLoader`. Within one fit of a trainer, the callback's hooks of a step are called or skipped: so both have the same
fit and memory; two equal fits differ by up to 7 %.
"""

if not __package__:
    __import__("from_clone")

import json
import math
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from bssearch import Data, Workload
from bssearch.executors.base import Assign, Program
from bssearch.executors.loops.current import SocketLine
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.trial_run import TIMED_STEPS, TrialRun
from bssearch.records import Configuration, Target, TrialState
from bssearch.spec import TrainingSpec
from bssearch.training.batches import place
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.loop import TrialLoop
from bssearch.training.trainer import Trainer
from bssearch.workloads.digits import Digits
from bssearch.workloads.fashion_mnist import FashionMnist
from tests.benchmarks.harness import one_of, ratio, script, timed_in_turns, turned
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


# Your own loop --------------------------------------------------------------------------------------------------------

OWN_BAR = 0.02
KINDS = ("bare", "again", "bssearch")
Times = dict[str, list[float]]
"""Seconds of the segments of each kind."""


class Training:
    """The digits, a step at a time."""

    def __init__(self, batch_size: int) -> None:
        torch.manual_seed(1)
        self.digits = Digits()
        data = self.digits.load(torch.device("cpu"))
        self.model = self.digits.build_model(dropout=0.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        train = TensorDataset(data.train.inputs, data.train.targets)
        self.loader: DataLoader[Any] = DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True)

    def step(self, batch: Any) -> None:
        inputs, targets = batch
        loss = self.digits.loss(self.model, inputs, targets, label_smoothing=0.0)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def plain(batch_size: int, steps: int) -> Iterator[float]:
    """Yield the seconds of each segment of a plain loop."""
    training, done = Training(batch_size), 0
    began = time.perf_counter()
    while True:
        for batch in training.loader:
            training.step(batch)
            done += 1
            if done % steps == 0:
                yield time.perf_counter() - began
                began = time.perf_counter()


def script_trial(batch_size: int) -> tuple[Trial, socket.socket]:
    """Return a script's trial with an evaluation before its first step only, and the worker's socket.

    Keep the socket open until the trial ends.
    """
    request = make_request(
        number=1,
        configuration=Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.02),
        seed=1,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=10**9,
    )
    worker, script = socket.socketpair()
    program = Program(default=request.plan.configuration, metric=request.target.metric)
    assign = Assign(work=request, program=program, device="cpu", revision="benchmark")
    trial = Trial(TrialRun(request, assign, SocketLine(script.detach())))
    assert (trial.batch_size, trial.learning_rate) == (batch_size, 0.02)
    return trial, worker


def own_loop(batch_size: int, steps: int) -> Iterator[float]:
    """Yield the seconds of each segment of a trial's loop."""
    trial, worker = script_trial(batch_size)
    training = Training(batch_size)
    began = 0.0
    for done, batch in enumerate(trial.batches(training.loader, lambda: {"accuracy": 0.0})):
        if done % steps == 0 and done:
            yield time.perf_counter() - began
        if done % steps == 0:
            began = time.perf_counter()
        training.step(batch)
    worker.close()


def time_batches(batch_size: int, steps: int, rounds: int) -> Times:
    """Let a trial's loop and two plain loops take turns."""
    loops = {kind: (own_loop if kind == "bssearch" else plain)(batch_size, steps) for kind in KINDS}
    times: Times = {kind: [] for kind in KINDS}
    for _ in range(TIMED_STEPS // steps + 1):
        for loop in loops.values():
            next(loop)
    for one in range(rounds):
        for kind in turned(KINDS, one):
            times[kind].append(next(loops[kind]))
    return times


class Segments:
    """Times a fit's segments of ``steps``; the callback is on before the first and in those of ``bssearch``."""

    def __init__(self, steps: int, rounds: int) -> None:
        self.times: Times = {kind: [] for kind in KINDS}
        self.is_on = True
        self._steps, self._taken = steps, -(TIMED_STEPS + steps)
        self._kinds = [kind for one in range(rounds) for kind in turned(KINDS, one)]
        self._began = 0.0

    @property
    def total(self) -> int:
        return -self._taken + self._steps * len(self._kinds) + 1

    def stepped(self) -> None:
        """Record that a step begins and all earlier steps have ended."""
        if self._taken >= 0 and self._taken % self._steps == 0:
            segment, now = self._taken // self._steps, time.perf_counter()
            if segment > 0:
                self.times[self._kinds[segment - 1]].append(now - self._began)
            self.is_on = segment < len(self._kinds) and self._kinds[segment] == "bssearch"
            self._began = time.perf_counter()
        self._taken += 1


Fit = Callable[[int, Trial, Segments], None]
"""Fits at a batch size, with a trial's callback that the segments switch on and off."""


def fit_lightning(batch_size: int, trial: Trial, segments: Segments) -> None:
    """Fit with a Lightning Trainer."""
    import lightning

    from bssearch.executors.loops.lightning import TrialCallback

    digits = Digits()
    data = digits.load(torch.device("cpu"))

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = digits.build_model(dropout=0.0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return digits.loss(self.model, *batch, label_smoothing=0.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", 0.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    class Hand(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *arguments: Any) -> None:
            segments.stepped()  # the trial's own callback has seen the step before

    train = TensorDataset(data.train.inputs, data.train.targets)
    loader: DataLoader[Any] = DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0}

    class Switched(TrialCallback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            if segments.is_on:
                super().on_train_batch_start(*arguments)

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if segments.is_on:
                super().on_train_batch_end(trainer, *arguments)
            else:
                self._steps, self._micro_batches = trainer.global_step, 0

    never: dict[str, Any] = {"check_val_every_n_epoch": 10**9, "max_epochs": -1, "max_steps": segments.total}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[Hand(), Switched(trial)], **never, **quiet)
    trainer.fit(Module(), loader, DataLoader(TensorDataset(torch.zeros(1))))


def fit_transformers(batch_size: int, trial: Trial, segments: Segments) -> None:
    """Fit with a Hugging Face Trainer."""
    import transformers

    from bssearch.executors.loops.transformers import TrialCallback
    from tests.executors.loops.trainers import Scored

    digits = Digits()
    data = digits.load(torch.device("cpu"))

    class Hand(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *arguments: Any, **settings: Any) -> None:
            segments.stepped()  # the trial's own callback has seen the step before

    rows = [
        {"inputs": one, "labels": int(label)}
        for one, label in zip(data.train.inputs, data.train.targets.tolist(), strict=True)
    ]
    rows = rows[: len(rows) - len(rows) % batch_size]  # a trial trains on whole batches alone
    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    settings |= {
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_nan_inf_filter": False,
        "seed": 1,
    }

    class Switched(TrialCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if segments.is_on:
                super().on_step_end(args, state, control, **others)
                return
            self._steps_of_pass += 1
            control.should_epoch_stop = self._steps_of_pass >= self._steps_in_pass

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch_size,
            learning_rate=0.02,
            optim="sgd",
            max_steps=segments.total,
            **settings,
        )
        trainer = transformers.Trainer(
            model=Scored(digits.build_model(dropout=0.0)),
            args=args,
            train_dataset=rows,
            eval_dataset=rows[:1],
            compute_metrics=lambda prediction: {"accuracy": 0.0},
            callbacks=[Hand(), Switched(trial)],
        )
        trainer.train()


def in_a_fit(fit: Fit) -> Callable[[int, int, int], Times]:
    """Return the timing of a library's fit."""

    def time_fit(batch_size: int, steps: int, rounds: int) -> Times:
        trial, worker = script_trial(batch_size)
        segments = Segments(steps, rounds)
        fit(batch_size, trial, segments)
        worker.close()
        return segments.times

    return time_fit


LOOPS: dict[str, Callable[[int, int, int], Times]] = {
    "batches": time_batches,
    "lightning": in_a_fit(fit_lightning),
    "transformers": in_a_fit(fit_transformers),
}
"""Functions of batch size, steps per segment and rounds; each round has a segment of every kind."""


def misses_bar(loop: str, batch_size: int, steps: int, pairs: int) -> bool:
    """Measure a loop and print its ratios; return whether the bar is missed, if steps are long enough."""
    times = LOOPS[loop](batch_size, steps, pairs)
    step_seconds, found = statistics.median(times["bare"]) / steps, ratio(times["bssearch"], times["bare"])
    print(f"batch size {batch_size}, {step_seconds * 1e3:.2f} ms a step, {pairs} pairs")
    print_rows(ratio(times["again"], times["bare"]), loop, found)
    if step_seconds < SHORTEST_STEP:
        print(f"a step takes less than {SHORTEST_STEP * 1e3:g} ms: the bar does not apply", file=sys.stderr)
        return False
    return found[0] > 1 + OWN_BAR


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    reference: Annotated[str, one_of(REFERENCES, "the bare loop")] = "hand",
    workload: Annotated[str, one_of(WORKLOADS)] = "digits",
    precision: Annotated[str, one_of(PRECISIONS)] = "auto",
    compiled: Annotated[str, typer.Option("--compile", help="none, default, reduce-overhead or max-autotune")] = "none",
    batch_size: list[int] | None = None,
    steps: Annotated[int, typer.Option(help="per segment")] = 4,
    pairs: int = 150,
    loop: Annotated[list[str] | None, one_of(LOOPS, "your own loop instead; may be repeated")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> bool:
    """Measure, print and judge."""
    torch.set_num_threads(1)
    sizes = batch_size or [256]
    if loop:
        warnings.simplefilter("ignore")
        return not any([misses_bar(one, size, steps, pairs) for one in loop for size in sizes])
    task, fused = WORKLOADS[workload](), True if reference == "fast" else None
    given = {"precision": precision, "compile": compiled, "fused": fused, "measure_noise": False}
    settings = TrainingSpec.model_validate(given)
    computation = Computation(torch.device(device), settings)
    data, _ = place(task.load(torch.device("cpu")), computation)
    found = [measure(reference, task, data, size, computation, steps=steps, pairs=pairs) for size in sizes]
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
