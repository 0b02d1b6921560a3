"""How much time a trial's callback adds to the bare fit of a library's own trainer.

Run as ``python tests/benchmarks/callback_overhead.py [--library lightning|transformers]``. Exits 1 where the mean is
above 2 %, for steps of at least 5 ms.

Both fits train the shipped digits at one batch size on one CPU thread, with the same trainer. They take turns in one
process, segment by segment, in an order that changes: each fit runs in a thread of its own, and hands over after so
many steps of the optimizer. Where a fit's memory lies makes it up to 7 % slower than another for as long as it runs, so
there are several rounds of pairs, each with fits of its own, made in another order; the interval is over the rounds.

A segment is what a trial runs between two evaluations, which are in neither's time. The trial's has its clock, its line
to a worker (a real socket), its check of whether to stop and of its limit. Its first 23 steps, which are timed one by
one, lie before the pairs. The A/A row is a second bare fit against the first: what it shows is the noise of the method.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from bssearch.integrations.line import SocketLine
from bssearch.integrations.loop_clock import TIMED_STEPS
from bssearch.integrations.own_loop import LoopTrial
from bssearch.integrations.trial_run import TrialRun
from bssearch.intervals import student_t
from bssearch.records import Configuration, Target, TrialRequest, TrialState
from bssearch.workloads.digits import Digits

BAR = 0.02
SHORTEST_STEP = 0.005
"""The bar is for steps of at least so many seconds."""

Stepped = Callable[[], None]
Fit = Callable[[int, LoopTrial | None, Stepped], None]
"""Fits at a batch size, with a trial's callback where there is one, and calls what it is given after each step."""


class Turns:
    """A fit in a thread of its own, which runs a segment of ``steps`` when it is asked to."""

    def __init__(self, fit: Fit, batch_size: int, steps: int, trial: LoopTrial | None) -> None:
        self._begin, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._steps, self._taken = steps, 0
        self._thread = threading.Thread(target=self._run, args=(fit, batch_size, trial), daemon=True)
        self._thread.start()
        self._done.acquire()  # it has taken its first step, and waits

    def segment(self) -> float:
        """Return the seconds of the next segment."""
        began = time.perf_counter()
        self._begin.release()
        self._done.acquire()
        return time.perf_counter() - began

    def _run(self, fit: Fit, batch_size: int, trial: LoopTrial | None) -> None:
        torch.set_num_threads(1)
        fit(batch_size, trial, self._stepped)

    def _stepped(self) -> None:
        if self._taken % self._steps == 0:
            self._done.release()
            self._begin.acquire()
        self._taken += 1


def fit_lightning(batch_size: int, trial: LoopTrial | None, stepped: Stepped) -> None:
    """Fit with a Lightning Trainer."""
    import lightning

    from bssearch.integrations.lightning import TrialCallback

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
            stepped()  # the trial's own callback has seen the step before

    train = TensorDataset(data.train.inputs, data.train.targets)
    loader: DataLoader[Any] = DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    callbacks = [Hand(), *([TrialCallback(trial)] if trial else [])]
    never: dict[str, Any] = {"check_val_every_n_epoch": 10**9, "max_epochs": -1}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=callbacks, **never, **quiet)
    trainer.fit(Module(), loader, DataLoader(TensorDataset(torch.zeros(1))))


def fit_transformers(batch_size: int, trial: LoopTrial | None, stepped: Stepped) -> None:
    """Fit with a Hugging Face Trainer."""
    import transformers

    from bssearch.integrations.transformers import TrialCallback

    digits = Digits()
    data = digits.load(torch.device("cpu"))

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = digits.build_model(dropout=0.0)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(inputs)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Hand(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *arguments: Any, **settings: Any) -> None:
            stepped()  # the trial's own callback has seen the step before

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
        "max_steps": 10**9,
        "seed": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, learning_rate=0.02, optim="sgd", **settings
        )
        trainer = transformers.Trainer(
            model=Module(),
            args=args,
            train_dataset=rows,
            eval_dataset=rows[:1],
            compute_metrics=lambda prediction: {"accuracy": 0.0},
            callbacks=[Hand(), *([TrialCallback(trial)] if trial else [])],
        )
        trainer.train()


LIBRARIES: dict[str, Fit] = {"lightning": fit_lightning, "transformers": fit_transformers}


def trial_of(batch_size: int) -> tuple[LoopTrial, socket.socket]:
    """Return a trial that is evaluated once, before its first step, and the worker's end of its line."""
    request = TrialRequest(
        number=1,
        configuration=Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.02),
        seed=1,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=10**9,
    )
    worker, script = socket.socketpair()
    trial = LoopTrial(TrialRun(request, {}, "cpu", SocketLine(script.detach()), "benchmark"))
    assert (trial.batch_size, trial.learning_rate) == (batch_size, 0.02)
    return trial, worker


FITS = ("bare", "again", "bssearch")


def measure(library: str, batch_size: int, steps: int, pairs: int, rounds: int) -> dict[str, Any]:
    """Let new fits take turns ``pairs`` times in each round, a segment of ``steps`` each."""
    made = [
        times_of(LIBRARIES[library], batch_size, steps, pairs, list(FITS[one % 3 :] + FITS[: one % 3]))
        for one in range(rounds)
    ]
    medians = [{name: statistics.median(times) for name, times in one.items()} for one in made]
    return {
        "library": library,
        "batch_size": batch_size,
        "step_seconds": statistics.median(one["bare"] for one in medians) / steps,
        "pairs": pairs * rounds,
        "same_fit_again": over_rounds([one["again"] / one["bare"] for one in medians]),
        "bssearch": over_rounds([one["bssearch"] / one["bare"] for one in medians]),
    }


def over_rounds(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios with its 95 % interval, by Student's t."""
    logs = [math.log(one) for one in ratios]
    mean = statistics.fmean(logs)
    half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def times_of(fit: Fit, batch_size: int, steps: int, pairs: int, order: list[str]) -> dict[str, list[float]]:
    """Return the seconds of each segment of new fits, which are made in an order."""
    trial, worker = trial_of(batch_size)
    fits = {name: Turns(fit, batch_size, steps, trial if name == "bssearch" else None) for name in order}
    times: dict[str, list[float]] = {name: [] for name in fits}
    for _ in range(TIMED_STEPS // steps + 1):
        for one in fits.values():
            one.segment()
    for pair in range(pairs):
        names = list(fits)[pair % 3 :] + list(fits)[: pair % 3]
        for name in names if pair % 2 else reversed(names):
            times[name].append(fits[name].segment())
    worker.close()
    return times


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=sorted(LIBRARIES), action="append", help="default: each")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="per segment")
    parser.add_argument("--pairs", type=int, default=20, help="per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object a library")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    misses = 0
    for library in arguments.library or sorted(LIBRARIES):
        found = measure(library, arguments.batch_size, arguments.steps, arguments.pairs, arguments.rounds)
        misses += judged(found, as_json=arguments.json)
    return int(misses > 0)


def judged(found: dict[str, Any], *, as_json: bool) -> bool:
    """Print what was found; return whether the bar is missed."""
    if as_json:
        print(json.dumps(found))
    else:
        print(f"batch size {found['batch_size']}, {found['step_seconds'] * 1e3:.2f} ms a step, {found['pairs']} pairs")
        for name, (median, low, high) in (("A/A", found["same_fit_again"]), (found["library"], found["bssearch"])):
            print(f"{name:<14} {median - 1:+7.2%}   [{low - 1:+.2%}, {high - 1:+.2%}]")
    if found["step_seconds"] < SHORTEST_STEP:
        print(f"a step takes less than {SHORTEST_STEP * 1e3:g} ms: the bar does not apply", file=sys.stderr)
        return False
    return bool(found["bssearch"][0] > 1 + BAR)


if __name__ == "__main__":
    sys.exit(main())
