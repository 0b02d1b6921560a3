"""Past runs of the real libraries: from a folder of 24 runs to the answer.

Run as ``python tests/benchmarks/past_runs.py [--source NAME] [--many]``. A small network learns scikit-learn's digits
at six batch sizes and four learning rates. Each library logs the 24 runs; one command imports them.

Bars: at most 20 s a source; each run's crossing as in the recorded curve to one evaluation; its effective batch size
right. With ``--many``: a million evaluations in one table take at most 60 s and 1 GB. Exits 1 if a bar is missed.
"""

if not __package__:
    __import__("from_clone")

import contextlib
import itertools
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from sklearn.datasets import load_digits

from bssearch.records import TrialRecord
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import one_of, script, seconds_of, verdict
from tests.exchange.importers.test_curves import event_files, mlflow_database, wandb_runs

SIZES, RATES = (16, 32, 64, 128, 256, 512), (0.05, 0.15, 0.5, 1.5)
STEPS, EVERY, TARGET = 240, 20, 0.9
LONGEST_S, LONGEST_MANY_S, MOST_MB = 20.0, 60.0, 1000.0

torch.set_num_threads(1)
DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.data, dtype=torch.float32) / 16
LABELS = torch.tensor(DIGITS.target)
HELD_OUT = slice(1300, None)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def accuracy(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float((model(IMAGES[HELD_OUT]).argmax(1) == LABELS[HELD_OUT]).float().mean())


@dataclass
class Made:
    """A run, and its curve: step, train seconds and accuracy of each evaluation."""

    batch_size: int
    rate: float
    curve: list[tuple[int, float, float]]

    def rows(self) -> list[tuple[int, float, float]]:
        return self.curve

    def crossing(self) -> tuple[int, int] | None:
        """Return the last step before the target and the first step at the target."""
        before = 0
        for step, _, value in self.curve:
            if value >= TARGET:
                return before, step
            before = step
        return None


Source = Callable[[Path], list[Made]]


def trained(batch_size: int, rate: float) -> Made:
    """Train in a plain loop."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    curve, seconds = [], 0.0
    for step in range(1, STEPS + 1):
        began = time.thread_time()  # of the only thread, so that other work of the machine does not count
        batch = torch.randint(0, HELD_OUT.start, (batch_size,))
        loss = torch.nn.functional.cross_entropy(model(IMAGES[batch]), LABELS[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds += time.thread_time() - began
        if step % EVERY == 0:
            curve.append((step, seconds, round(accuracy(model), 3)))
    return Made(batch_size, rate, curve)


def all_runs() -> list[Made]:
    return [trained(size, rate) for size in SIZES for rate in RATES]


def parts(one: Made) -> dict[str, Any]:
    """Return the batch size as a tool may record it: per device, with accumulation, on two devices."""
    return {"per_device_batch_size": one.batch_size // 8, "accumulation_steps": 4, "world_size": 2, "lr": one.rate}


def logged(write: Callable[[Path, Sequence[Any]], object]) -> Source:
    """Return a source whose runs are trained here and written by a function."""

    def make(folder: Path) -> list[Made]:
        runs = all_runs()
        write(folder, runs)
        return runs

    return make


def lightning_runs(folder: Path) -> list[Made]:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    runs: list[Made] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, batch_size: int, lr: float, accumulate_grad_batches: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model, self.rate = network(), lr

        def training_step(self, batch: Any, _: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            value = round(accuracy(self.model), 6)
            self.log("val_acc", value)
            if not self.trainer.sanity_checking:
                runs[-1].curve.append((self.global_step, 0.0, value))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    data = torch.utils.data.TensorDataset(IMAGES[: HELD_OUT.start], LABELS[: HELD_OUT.start])
    for size, rate in itertools.product(SIZES, RATES):
        torch.manual_seed(0)
        runs.append(Made(size, rate, []))
        loader = torch.utils.data.DataLoader(data, size // 2, shuffle=True, drop_last=True)
        options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accumulate_grad_batches=2,
            val_check_interval=2 * EVERY,
            check_val_every_n_epoch=None,
            enable_checkpointing=False,
            log_every_n_steps=5,
            logger=CSVLogger(folder, name="digits"),
            num_sanity_val_steps=0,
            **options,
        )
        held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)), 1)
        trainer.fit(Module(size // 2, rate, 2), loader, held_out)
    return runs


def trainer_runs(folder: Path) -> list[Made]:
    import transformers

    from tests.executors.loops.trainers import Scored

    runs = []
    rows = [{"inputs": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    for size, rate in itertools.product(SIZES, RATES):
        place = folder / f"{size}-{rate}"
        arguments = transformers.TrainingArguments(
            place,
            per_device_train_batch_size=size // 4,
            gradient_accumulation_steps=4,
            per_device_eval_batch_size=512,
            learning_rate=rate,
            optim="sgd",
            max_steps=STEPS,
            eval_strategy="steps",
            eval_steps=EVERY,
            logging_steps=EVERY,
            save_steps=STEPS,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            Scored(network()),
            arguments,
            train_dataset=rows[: HELD_OUT.start],
            eval_dataset=rows[HELD_OUT],
            compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
        )
        trainer.train()
        history = trainer.state.log_history
        curve = [(row["step"], 0.0, row["eval_accuracy"]) for row in history if "eval_accuracy" in row]
        runs.append(Made(size, rate, curve))
    return runs


def ray_runs(folder: Path) -> list[Made]:
    os.environ["RAY_TRAIN_V2_ENABLED"] = "0"
    import ray
    from ray import tune

    runs = all_runs()

    def replayed(config: dict[str, Any]) -> None:
        for step, seconds, value in runs[config["number"]].curve:
            tune.report({"steps": step, "train_seconds": seconds, "val_acc": value})

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    space = {"grid": tune.grid_search([parts(one) | {"number": place} for place, one in enumerate(runs)])}
    tune.Tuner(
        lambda config: replayed(config["grid"]),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(folder), name="digits", verbose=0),
    ).fit()
    ray.shutdown()
    return runs


def optuna_runs(folder: Path) -> list[Made]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="digits", storage=f"sqlite:///{folder / 'optuna.db'}", direction="maximize")
    runs = []
    for size, rate in itertools.product(SIZES, RATES):
        study.enqueue_trial({"micro_batch_size": size // 2, "accumulation_steps": 2, "learning_rate": rate})

    def objective(trial: optuna.Trial) -> float:
        micro = trial.suggest_int("micro_batch_size", 1, 512)
        size = micro * trial.suggest_int("accumulation_steps", 1, 2)
        runs.append(trained(size, trial.suggest_float("learning_rate", 0.01, 2, log=True)))
        for step, _, value in runs[-1].curve:
            trial.report(value, step)
        return runs[-1].curve[-1][2]

    study.optimize(objective, n_trials=len(SIZES) * len(RATES))
    return runs


SOURCES: dict[str, tuple[Source, list[str]]] = {
    "wandb": (logged(wandb_runs), []),
    "mlflow": (logged(mlflow_database), []),
    "tensorboard": (logged(event_files), []),
    "lightning": (lightning_runs, ["--column", "batch_size=micro_batch_size"]),
    "trainer": (trainer_runs, ["--with", "world_size=1"]),
    "ray": (ray_runs, []),
    "optuna": (optuna_runs, ["--metric", "val_acc", "--steps", "step"]),
}


LIBRARIES = {"trainer": "transformers"}


def wrong_of(runs: list[Made], trials: Sequence[TrialRecord]) -> list[str]:
    """Return the runs that were read wrongly."""
    found = {(one.configuration.batch_size, one.configuration.learning_rate): one.outcome for one in trials}
    wrong = []
    for one in runs:
        outcome, expected = found.get((one.batch_size, one.rate)), one.crossing()
        if outcome is None:
            wrong.append(f"batch {one.batch_size}, rate {one.rate}: not found")
            continue
        miss, hit = outcome.last_miss_step, outcome.first_hit_step
        is_right = expected is None if hit is None else expected and miss == expected[0] < hit <= expected[1]
        if not is_right:  # Optuna's import interpolates the hit
            wrong.append(f"batch {one.batch_size}, rate {one.rate}: {(miss, hit)} instead of {expected}")
    return wrong


def command(folder: Path, *words: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", "bssearch", *words], cwd=folder, capture_output=True, text=True)
    return time.perf_counter() - began, ended


def try_source(name: str, folder: Path) -> bool:
    """Make the runs, import them with one command, and print and judge."""
    make, options = SOURCES[name]
    place = folder / name
    place.mkdir()
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(None):
        runs = make(place)
    what = str(place / "optuna.db") if name == "optuna" else str(place)
    importer = "optuna" if name == "optuna" else "curves"
    seconds, ended = command(folder, "import", importer, what, "--target", str(TARGET), "--name", name, *options)
    wrong = [ended.stderr]
    if ended.returncode == 0:
        with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
            wrong = wrong_of(runs, store.trials.of(name))
    made_by = LIBRARIES.get(name, name)
    print(
        f"{name:<12} {made_by} {version(made_by):<10} {len(runs)} runs {seconds:6.1f} s  {len(wrong)} wrong",
        *wrong[:3],
        sep="\n    ",
    )
    print(*(f"    {line}" for line in ended.stderr.splitlines()), sep="\n")
    return not wrong and seconds <= LONGEST_S and len(runs) == len(SIZES) * len(RATES)


def many_rows() -> Iterator[str]:
    yield "run,step,elapsed,train_loss,val_acc,batch_size,lr\n"
    for run in range(100):
        for place in range(10_000):
            step = 10 * (place + 1)
            yield f"{run},{step},{step / 50:.2f},{1 / (place + 1):.6f},{1 - 1 / (place + 2):.6f},{2 ** (run % 6)},0.1\n"


def try_many(folder: Path) -> bool:
    """Import a million evaluations in a process of its own."""
    for part in range(2):  # a file has at most 64 MiB
        lines = itertools.islice(many_rows(), 0, 500_001) if part == 0 else itertools.islice(many_rows(), 500_001, None)
        header = "" if part == 0 else next(many_rows())
        (folder / f"many{part}.csv").write_text(header + "".join(lines))
    words = ("import", "curves", "many0.csv", "many1.csv", "--target", "0.999")
    seconds = seconds_of(lambda: command(folder, *words))
    megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"1,000,000 evaluations: {seconds:.1f} s, {megabytes:.0f} MB")
    return seconds <= LONGEST_MANY_S and megabytes <= MOST_MB


def main(
    source: Annotated[list[str] | None, one_of(SOURCES, "this source alone; may be repeated")] = None,
    many: bool = False,
) -> bool:
    """Try the sources, or only the million evaluations."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if many:
            return verdict(try_many(folder))
        return verdict(all([try_source(name, folder) for name in source or SOURCES]))


if __name__ == "__main__":
    script(main, __doc__)
