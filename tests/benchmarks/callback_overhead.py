"""How much time a trial's callback adds to the bare fit of a library's own trainer.

Run as ``python tests/benchmarks/callback_overhead.py [--library lightning|transformers]``. Exits 1 where the median is
above 2 %, for steps of at least 5 ms.

One fit trains the shipped digits at one batch size on one CPU thread. Segment by segment, in an order that changes, the
callback's hooks of a step are called, or not. So the fit is the same, and its memory, which makes one fit up to 7 %
slower than its twin. A segment is what a trial runs between two evaluations, which are in neither's time. The trial's
has its clock, its line to a worker (a real socket), its check of whether to stop and of its limit. Its first 23 steps,
which are timed one by one, lie before the segments. The A/A row is one kind of bare segments against another: what it
shows is the noise of the method.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

from bssearch.integrations.own_loop import LoopTrial
from bssearch.integrations.trial_run import TIMED_STEPS
from bssearch.workloads.digits import Digits
from tests.benchmarks.harness import one_of, ratio, script, turned
from tests.benchmarks.loop_overhead import misses_bar
from tests.benchmarks.own_loop_overhead import script_trial

BAR = 0.02

KINDS = ("bare", "again", "bssearch")


class Segments:
    """Times a fit's segments of ``steps``; the callback is on in those of ``bssearch``, and before the first."""

    def __init__(self, steps: int, rounds: int) -> None:
        self.times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.is_on = True
        self._steps, self._taken = steps, -(TIMED_STEPS + steps)
        self._kinds = [kind for one in range(rounds) for kind in turned(KINDS, one)]
        self._began = 0.0

    @property
    def total(self) -> int:
        """Return how many steps the fit takes."""
        return -self._taken + self._steps * len(self._kinds) + 1

    def stepped(self) -> None:
        """Take note that a step begins, and all before it have ended."""
        if self._taken >= 0 and self._taken % self._steps == 0:
            segment, now = self._taken // self._steps, time.perf_counter()
            if segment > 0:
                self.times[self._kinds[segment - 1]].append(now - self._began)
            self.is_on = segment < len(self._kinds) and self._kinds[segment] == "bssearch"
            self._began = time.perf_counter()
        self._taken += 1


Fit = Callable[[int, LoopTrial, Segments], None]
"""Fits at a batch size, with a trial's callback that the segments switch."""


def fit_lightning(batch_size: int, trial: LoopTrial, segments: Segments) -> None:
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


def fit_transformers(batch_size: int, trial: LoopTrial, segments: Segments) -> None:
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
            model=Module(),
            args=args,
            train_dataset=rows,
            eval_dataset=rows[:1],
            compute_metrics=lambda prediction: {"accuracy": 0.0},
            callbacks=[Hand(), Switched(trial)],
        )
        trainer.train()


LIBRARIES: dict[str, Fit] = {"lightning": fit_lightning, "transformers": fit_transformers}


def measure(library: str, batch_size: int, steps: int, rounds: int) -> dict[str, Any]:
    """Fit, and time the segments of so many rounds, each with one of every kind."""
    trial, worker = script_trial(batch_size)
    segments = Segments(steps, rounds)
    LIBRARIES[library](batch_size, trial, segments)
    worker.close()
    times = segments.times
    return {
        "library": library,
        "batch_size": batch_size,
        "step_seconds": statistics.median(times["bare"]) / steps,
        "pairs": rounds,
        "again": ratio(times["again"], times["bare"]),
        "bssearch": ratio(times["bssearch"], times["bare"]),
    }


def main(
    library: Annotated[list[str] | None, one_of(sorted(LIBRARIES), "default: each")] = None,
    batch_size: int = 256,
    steps: Annotated[int, typer.Option(help="per segment")] = 4,
    pairs: int = 200,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object a library")] = False,
) -> bool:
    """Measure, print and judge."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {one: measure(one, batch_size, steps, pairs) for one in library or sorted(LIBRARIES)}
    return not any([misses_bar(of_one, one, BAR, as_json=as_json) for one, of_one in found.items()])


if __name__ == "__main__":
    script(main, __doc__)
