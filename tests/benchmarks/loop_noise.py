"""Whether scripts, LightningModules and Trainers measure the same gradient noise scale as a workload.

Run as ``python tests/benchmarks/loop_noise.py``. All train a linear model at a rate of almost zero, with one
micro-batch a step, on the same samples for each seed. Measurements may take half of the time. Bar: the noise scale,
with moments pooled over the seeds, is 0.9 to 1.1 of the workload's.
"""

if not __package__:
    __import__("from_clone")

import itertools
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bssearch import BatchAdvisor, Part
from bssearch.executors.loops.lightning import TrialCallback
from bssearch.records import Configuration, GradientNoise, TrialState
from bssearch.records.noise_scale import gradient_noise
from bssearch.training.gradient_noise import GradientPasses
from bssearch.training.trainer import Trainer
from tests.benchmarks.harness import script, verdict
from tests.executors.loops.loops import Started, asked
from tests.executors.loops.test_lightning import trainer_of
from tests.executors.loops.trainers import Scored, trainer_of as transformers_trainer_of
from tests.training.test_advisor import BATCH, at_zero, exact_scale, samples
from tests.training.toys import Toy, on_cpu

FARTHEST = 0.1  # of a ratio from 1
AT = Configuration(batch_size=BATCH, micro_batch_size=BATCH, learning_rate=1e-12)
PASSES = 100  # of a workload


def data_of(seed: int) -> TensorDataset:
    """The samples of a seed."""
    return TensorDataset(*(torch.cat(one) for one in zip(*itertools.islice(samples(seed), 128), strict=True)))


def near(step: int) -> dict[str, float]:
    """A metric near the target after the first evaluation."""
    return {"accuracy": 0.89 if step else 0.0}


class Regression(Toy):
    """A workload of the linear model."""

    def loss(self, model: nn.Module, inputs: Any, targets: Any, *, label_smoothing: float) -> torch.Tensor:
        return nn.functional.mse_loss(model(inputs), targets)


def of_workload(seed: int) -> GradientNoise:
    """Measure a workload's noise in passes."""
    inputs, targets = data_of(seed).tensors
    with Trainer(Regression(network=lambda _: at_zero()), AT, Part(inputs, targets), on_cpu(), seed) as trainer:
        passes = GradientPasses(trainer, seed)
        found = (passes.measure() for _ in range(PASSES))
        return gradient_noise([one for one in found if one is not None])


def of_trial(train: Callable[[Started, TensorDataset], object], seed: int, steps: int) -> GradientNoise:
    """Measure the noise of a loop's trial."""
    started = Started(asked(configuration=AT, target=0.9, eval_every_steps=100))
    started.stop_at(steps, TrialState.PRUNED)
    torch.manual_seed(seed)
    train(started, data_of(seed))
    started.run.finish()
    return started.line.outcome.noise


def train_script(started: Started, data: TensorDataset) -> None:
    """Train as a script."""
    trial, model = started.trial, at_zero()
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
    trial.state(model=model, optimizer=optimizer)
    loader = DataLoader(data, batch_size=trial.micro_batch_size, shuffle=True)
    for x, y in trial.batches(loader, evaluate=lambda: near(trial.steps)):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


def train_lightning(started: Started, data: TensorDataset) -> None:
    """Train a LightningModule."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = at_zero()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", near(self.global_step)["accuracy"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=started.trial.learning_rate)

    loader: DataLoader[Any] = DataLoader(data, batch_size=started.trial.micro_batch_size, shuffle=True)
    started.trial.given = {"batch_size": BATCH, "learning_rate": AT.learning_rate, "evaluate_every": None}
    trainer_of(TrialCallback(started.trial)).fit(Module(), loader, DataLoader(data, batch_size=4096))


def train_transformers(started: Started, data: TensorDataset) -> None:
    """Train with a Hugging Face Trainer."""

    rows = [{"inputs": x, "labels": y} for x, y in zip(*data.tensors, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers_trainer_of(
            started.trial,
            Path(folder),
            kind=transformers.Trainer,
            model=Scored(at_zero(), nn.functional.mse_loss),
            data_collator=transformers.default_data_collator,
            train_dataset=rows,
            eval_dataset=rows[:BATCH],
            compute_metrics=lambda prediction: near(started.trial.steps),
            own={"optim": "sgd"},
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


LOOPS = {"script": train_script, "lightning": train_lightning, "transformers": train_transformers}


def scale(found: list[GradientNoise]) -> float:
    """The noise scale of pooled moments."""
    return statistics.fmean(one.trace or 0.0 for one in found) / statistics.fmean(one.square or 0.0 for one in found)


def main(seeds: int = 20, steps: int = 1000) -> bool:
    """Print the ratios and judge."""
    assert BatchAdvisor.__init__.__kwdefaults__ is not None
    BatchAdvisor.__init__.__kwdefaults__["share"] = 1.0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expected, is_met = scale([of_workload(seed) for seed in range(seeds)]), True
    print(f"workload     {expected:.3g} samples, {expected / exact_scale():.3f} of the exact noise scale")
    for name, train in LOOPS.items():
        found = [of_trial(train, seed, steps) for seed in range(seeds)]
        ratio, passes = scale(found) / expected, sum(one.passes or 0 for one in found)
        print(f"{name:<12} {ratio:.3f} of the workload's, {passes} measured steps in {seeds} trials")
        is_met = is_met and abs(ratio - 1) <= FARTHEST
    return verdict(is_met)


if __name__ == "__main__":
    script(main, __doc__)
