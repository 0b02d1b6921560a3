"""Time that bssearch adds to your own training loop: `trial.batches`, and the callbacks of two trainers.

Run as ``python tests/benchmarks/own_loop_overhead.py [--loop batches|lightning|transformers]``. Exits 1 if a median is
above 2 %, for steps of at least 5 ms.

All train the shipped digits at one batch size on one CPU thread, segment by segment, in changing order. A segment is a
trial's work between two evaluations. The trial's segment has its clock, its connection to a worker (a real socket), its
stop check and limit check. Its first 23 steps, which are timed one by one, come before the segments. The A/A row
compares two kinds of plain segments: it shows the noise.

- ``batches``: a plain loop and a trial's loop take turns, over the same kind of `DataLoader`.
- ``lightning``, ``transformers``: within one fit of the library's trainer, the callback's hooks of a step are called or
  skipped. So both have the same fit and memory; two equal fits differ by up to 7 %.
"""

if not __package__:
    __import__("from_clone")

import math
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

from bssearch.executors.base import Assign, Program
from bssearch.executors.loops.current import SocketLine
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.trial_run import TIMED_STEPS, TrialRun
from bssearch.records import Configuration, Target, TrialState
from bssearch.workloads.digits import Digits
from tests.benchmarks.harness import one_of, ratio, script, turned
from tests.benchmarks.loop_overhead import SHORTEST_STEP, print_rows
from tests.factories import make_request

BAR = 0.02
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
    return found[0] > 1 + BAR


def main(
    loop: Annotated[list[str] | None, one_of(LOOPS, "default: each")] = None,
    batch_size: int = 256,
    steps: Annotated[int, typer.Option(help="per segment")] = 4,
    pairs: int = 200,
) -> bool:
    """Measure, print and judge."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return not any([misses_bar(one, batch_size, steps, pairs) for one in loop or LOOPS])


if __name__ == "__main__":
    script(main, __doc__)
