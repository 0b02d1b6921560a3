"""Lightning's batch-size finder and accelerate's against a study: the time to the target of what each finds.

Run as ``python tests/benchmarks/other_finders.py [--seeds 7] [--trials 30] [--cap 30] [--memory-samples N]``: half an
hour on a quiet machine. One Lightning module trains the digits on one CPU thread. The finders are:

- Lightning's ``Tuner.scale_batch_size``, in both modes, from its default size of 2 on, with as many trials as it takes.
- accelerate's ``find_executable_batch_size``, from all training samples on.
- ``bssearch.run_study``, whose default is batch size 64 and learning rate 0.03, near the best of that batch size.

The others find the largest batch size that fits into memory. A CPU has memory for all of these, so theirs end at the
samples that there are; with ``--memory-samples N`` the module's forward pass runs out of memory beyond N samples, as on
a GPU. A batch larger than the training data is trained as all of it. The others leave the learning rate to the user: it
is the default's as it is, or scaled linearly or by the root of the batch size, or after Lightning's finder its own
``lr_find``. Of these each gets the one that is soonest at the target over two seeds that are used for nothing else.

Then each batch size found trains ``--seeds`` times with fresh seeds, each a trial of bssearch on its clock, in turns. A
run that is not at the target after ``--cap`` train seconds counts as slower than all others. The table has the wall
seconds of the search itself, the median of the time to the target with the fastest and the slowest run, and its ratio
to ours; rows of one batch size and learning rate share their runs. Bar: none of the others is sooner at the target than
0.9 × ours. Exits 1 where one is.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import importlib
import logging
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bssearch import run_study
from bssearch.commands.opening import local
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Target, TrialRequest, TrialState
from bssearch.space import split_batch
from bssearch.spec import StudySpec, load_spec
from tests.benchmarks.five_ways import outcome_of
from tests.benchmarks.harness import script, verdict

BAR = 0.9
BATCH_SIZE, LEARNING_RATE = 64, 0.03
"""Where all begin: the default of the study, and what the rules scale. It is near the best rate of that batch size."""

TARGET = Target(metric="accuracy", value=0.949)
SEARCH_SEED = 1
PILOT_SEEDS = 2
"""Seeds that choose among the learning rates of one batch size."""

FIT_STEPS = 3
"""Steps after which a batch size fits: those of Lightning's finder."""

MODULE = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from bssearch.workloads.digits import Digits

MEMORY_SAMPLES = None


class Module(lightning.LightningModule):
    def __init__(self, batch_size, learning_rate):
        super().__init__()
        self.batch_size, self.learning_rate = batch_size, learning_rate
        self.digits = Digits()
        self.model = self.digits.build_model(dropout=0.0)
        data = self.digits.load(torch.device("cpu"))
        self.validation = data.validation
        self.train_data = TensorDataset(data.train.inputs, data.train.targets)

    def train_dataloader(self):
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader([0])

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if MEMORY_SAMPLES is not None and len(inputs) > MEMORY_SAMPLES:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {len(inputs)} samples, of {MEMORY_SAMPLES} that fit.")
        return self.digits.loss(self.model, inputs, targets, label_smoothing=0.0)

    def validation_step(self, batch, batch_idx):
        self.log_dict(self.digits.evaluate(self.model, self.validation))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9, nesterov=True)


def trainer_of(**settings):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return lightning.Trainer(accelerator="cpu", max_epochs=-1, **quiet, **settings)


def make_trainer(trial):
    module = Module(trial.micro_batch_size, trial.learning_rate)
    order = trial.sampler(module.train_data)
    rows = DataLoader(
        module.train_data, batch_size=trial.micro_batch_size, sampler=order, generator=torch.Generator()
    )
    return trainer_of(), module, (rows, module.val_dataloader())
"""


@dataclass(frozen=True)
class Candidate:
    """A batch size with a learning rate, and the rule that gave it; ``seconds`` is what the search for both took."""

    tool: str
    found: int
    batch_size: int
    rule: str
    learning_rate: float
    seconds: float

    @property
    def key(self) -> tuple[int, float]:
        """Return what is trained: candidates that share it share its runs."""
        return self.batch_size, self.learning_rate


def spec_of(trials: int) -> StudySpec:
    """Return the spec of the study."""
    return load_spec(
        {
            "name": "digits-found",
            "workload": "found_module.py:make_trainer",
            "target": {"metric": TARGET.metric, "value": TARGET.value},
            "space": {
                "batch_size": {"low": 8, "high": 1024},
                "learning_rate": {"reference_batch": BATCH_SIZE, "low": 0.01, "high": 0.5, "rule": "sqrt"},
            },
            "default": {"batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE},
            "confirm": {"top": 3, "runs": 5},
            "budget": {"trials": trials, "trial_train_seconds": 10},
            "executor": {"device": "cpu"},
        }
    )


def lightning_finds(module: Any, folder: Path, mode: str) -> list[Candidate]:
    """Return the batch size that Lightning's finder finds, with the learning rate of each rule."""
    from lightning.pytorch.tuner import Tuner

    began = time.perf_counter()
    trainer = module.trainer_of(default_root_dir=folder)
    model = module.Module(2, LEARNING_RATE)
    found = Tuner(trainer).scale_batch_size(model, mode=mode, max_trials=25)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    size = min(found, len(model.train_data))
    tuned = module.Module(size, LEARNING_RATE)
    finder = Tuner(module.trainer_of(default_root_dir=folder)).lr_find(tuned)
    rate = finder.suggestion()
    longer = seconds + time.perf_counter() - began
    tool = f"Lightning, {mode}"
    own = [] if rate is None else [Candidate(tool, found, size, "lr_find", rate, longer)]
    return [*by_rules(tool, found, size, seconds), *own]


def accelerate_finds(module: Any) -> list[Candidate]:
    """Return the batch size that accelerate's finder finds, with the learning rate of each rule."""
    from accelerate.utils import find_executable_batch_size

    samples = len(module.Module(1, LEARNING_RATE).train_data)

    @find_executable_batch_size(starting_batch_size=samples)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        model = module.Module(batch_size, LEARNING_RATE)
        optimizer = model.configure_optimizers()
        batch = next(iter(model.train_dataloader()))
        for _ in range(FIT_STEPS):
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
        return batch_size

    began = time.perf_counter()
    found = train()
    return by_rules("accelerate", found, found, time.perf_counter() - began)


def by_rules(
    tool: str, found: int, batch_size: int, seconds: float, default: tuple[int, float] = (BATCH_SIZE, LEARNING_RATE)
) -> list[Candidate]:
    """Return a batch size with the default's learning rate: as it is, and scaled by each of the usual rules.

    ``default`` is the batch size and the learning rate that they scale from.
    """
    size, rate = default
    ratio = batch_size / size
    rates = {"unchanged": rate, "linear": rate * ratio, "sqrt": rate * ratio**0.5}
    return [Candidate(tool, found, batch_size, rule, rate, seconds) for rule, rate in rates.items()]


def ours(folder: Path, trials: int) -> Candidate:
    """Return what a study recommends."""
    began = time.perf_counter()
    answer = run_study(spec_of(trials), db=f"sqlite:///{folder / 'study.db'}", folder=folder)
    seconds, size, rate = (
        time.perf_counter() - began,
        answer.optimal.batch_size,
        answer.optimal.parameters["learning_rate"],
    )
    return Candidate("bssearch", size, size, "searched", float(str(rate)), seconds)


def seconds_to_target(
    executor: Executor, key: tuple[int, float], seed: int, cap: float, memory_samples: int | None
) -> float:
    """Return the train seconds until a run is at the target, infinite where it is not within the cap."""
    size, rate = key
    micro, accumulation = split_batch(size, memory_samples)
    configuration = Configuration(
        batch_size=size, micro_batch_size=micro, accumulation_steps=accumulation, learning_rate=rate
    )
    request = TrialRequest(
        number=1,
        configuration=configuration,
        seed=seed,
        target=TARGET,
        train_seconds_limit=cap,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=max(1, 256 // size),
    )
    outcome = outcome_of(executor, request)
    if outcome.state not in (TrialState.REACHED, TrialState.EXHAUSTED, TrialState.DIVERGED):
        raise RuntimeError(f"batch size {size}, learning rate {rate:.3g}, seed {seed}: {outcome.reason}")
    return outcome.time_to_target_s if outcome.time_to_target_s is not None else math.inf


Timed = Callable[[tuple[int, float], int], float]
"""Trains a batch size and a learning rate with a seed; returns the seconds to the target."""


def times_of(
    candidates: Sequence[Candidate], seeds: Sequence[int], timed: Timed
) -> dict[tuple[int, float], list[float]]:
    """Return the times of what is trained, all of them with one seed after the other."""
    found: dict[tuple[int, float], list[float]] = {one.key: [] for one in candidates}
    for seed in seeds:
        for key, times in found.items():
            times.append(timed(key, seed))
    return found


def soonest_of_each(candidates: Sequence[Candidate], seeds: Sequence[int], timed: Timed) -> list[Candidate]:
    """Return for each tool the candidate whose learning rate is soonest at the target."""
    times = times_of(candidates, seeds, timed)

    def mean(one: Candidate) -> float:
        return statistics.fmean(times[one.key])

    for one in candidates:
        told = f"{mean(one):.3f} s" if math.isfinite(mean(one)) else "not within the cap"
        print(f"  {one.tool}: {one.batch_size} at {one.learning_rate:.3g} ({one.rule}): {told}", flush=True)
    tools = dict.fromkeys(one.tool for one in candidates)
    return [min((one for one in candidates if one.tool == tool), key=mean) for tool in tools]


def shown(seconds: float, cap: float) -> str:
    """Return seconds as the table has them."""
    return f"> {cap:g}" if math.isinf(seconds) else f"{seconds:.3f}"


def print_table(rows: Sequence[Candidate], times: dict[tuple[int, float], list[float]], cap: float) -> list[float]:
    """Print a row for each; return their medians."""
    medians = [statistics.median(times[one.key]) for one in rows]
    own = medians[[one.tool for one in rows].index("bssearch")]
    print(
        f"\n{'tool':<21} {'found':>5} {'batch':>5} {'rate':>7} {'rule':<9} {'search, s':>9} "
        f"{'to target, s':>12} {'fastest, slowest':>18} {'ratio':>7}"
    )
    for one, median in zip(rows, medians, strict=True):
        low, high = (shown(end(times[one.key]), cap) for end in (min, max))
        ratio = f"> {cap / own:.1f}" if math.isinf(median) else f"{median / own:.2f}"
        print(
            f"{one.tool:<21} {one.found:>5} {one.batch_size:>5} {one.learning_rate:>7.3g} {one.rule:<9} "
            f"{one.seconds:>9.1f} {shown(median, cap):>12} {f'[{low}, {high}]':>18} {ratio:>7}"
        )
    return medians


def meets_bar(own: float, others: Sequence[float]) -> bool:
    """Return whether ours is at the target, and none of the others before 0.9 of its time."""
    return math.isfinite(own) and all(other >= BAR * own for other in others)


def module_in(folder: Path, memory_samples: int | None) -> Any:
    """Write the module that all train into a folder, and import it."""
    text = MODULE.replace("MEMORY_SAMPLES = None", f"MEMORY_SAMPLES = {memory_samples}")
    (folder / "found_module.py").write_text(text.lstrip())
    sys.path.insert(0, str(folder))
    warnings.simplefilter("ignore")
    found = importlib.import_module("found_module")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # nothing beside the table
    return found


def main(
    seeds: int = 7,
    trials: int = 30,
    cap: Annotated[float, typer.Option(help="train seconds of a run")] = 30.0,
    memory_samples: Annotated[int | None, typer.Option(help="samples that fit into memory at once")] = None,
) -> bool:
    """Find with each tool, train what was found, print the table and judge."""
    torch.set_num_threads(1)  # as a trial does
    rng = random.Random(SEARCH_SEED)
    pilot, fresh = ([rng.randrange(2**31) for _ in range(count)] for count in (PILOT_SEEDS, seeds))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        module = module_in(folder, memory_samples)
        torch.manual_seed(SEARCH_SEED)
        found = [one for mode in ("power", "binsearch") for one in lightning_finds(module, folder, mode)]
        found += accelerate_finds(module)
        default = Candidate("the default", BATCH_SIZE, BATCH_SIZE, "unchanged", LEARNING_RATE, 0.0)
        executor = local(None, allow_busy=False)(spec_of(trials), folder)
        try:

            def timed(key: tuple[int, float], seed: int) -> float:
                return seconds_to_target(executor, key, seed, cap, memory_samples)

            print(f"means over {PILOT_SEEDS} seeds, by which the learning rates are chosen:")
            others = soonest_of_each(found, pilot, timed)
            rows = [ours(folder, trials), default, *others]
            times = times_of(rows, fresh, timed)
        finally:
            executor.close()
    own, _, *theirs = print_table(rows, times, cap)
    return verdict(meets_bar(own, theirs))


if __name__ == "__main__":
    script(main, __doc__)
