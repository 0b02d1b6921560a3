"""Whether the same training gives the same answer in each of five ways.

Run as ``python tests/benchmarks/five_ways.py [--trials 30] [--configurations 6]``: some twenty minutes on a quiet
machine. The digits model is trained by the shipped workload, by a script that asks for its trial, by a program that
takes options and prints JSON lines, and by scripts with a Lightning Trainer and with a Hugging Face Trainer. Each obeys
the seed, the order of the samples and the cadence of evaluations, and has the same groups of parameters. The Hugging
Face Trainer's own clipping is off. Lightning logs the accuracy in single precision, where 342 of 360 are 0.94999999:
the target, 0.949, lies between two accuracies that there are.

Bars: configurations drawn at random reach the target in the same number of steps in all five ways; the batch sizes
that whole studies recommend are within one rung of each other. Exits 1 where one is missed.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bssearch import run_study
from bssearch.commands.opening import local
from bssearch.executors.base import Ended, Executor
from bssearch.records import Configuration, TrialOutcome, TrialRequest, TrialState
from bssearch.space import split_batch
from bssearch.spec import StudySpec, load_spec
from tests.benchmarks.harness import script, verdict

MODEL = """
import torch
from torch import nn
from bssearch.workloads.digits import Digits

workload = Digits()
data = workload.load(torch.device("cpu"))


def build():
    return workload.build_model(dropout=0.0)


def optimizer_of(model, learning_rate):
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    others = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9, nesterov=True)


def accuracy(model):
    model.eval()
    with torch.no_grad():
        found = workload.evaluate(model, data.validation)["accuracy"]
    model.train()
    return found


def train_on(model, optimizer, rows):
    loss = nn.functional.cross_entropy(model(data.train.inputs[rows]), data.train.targets[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LOOP = """
import torch
import bssearch
from digits_model import accuracy, build, data, optimizer_of, train_on

trial = bssearch.current_trial(batch_size=64, learning_rate=0.1)
model = build()
optimizer = optimizer_of(model, trial.learning_rate)
trial.state(model=model, optimizer=optimizer)
sampler = torch.utils.data.BatchSampler(trial.sampler(data.train), trial.micro_batch_size, drop_last=False)
for rows in trial.batches(sampler, evaluate=lambda: {"accuracy": accuracy(model)}):
    train_on(model, optimizer, rows)
"""

PROGRAM = """
import json, sys, time
import torch
from digits_model import accuracy, build, data, optimizer_of, train_on

batch_size, seed, every, threads = (int(word) for word in sys.argv[1:5])
torch.set_num_threads(threads)
torch.manual_seed(seed)
model = build()
optimizer = optimizer_of(model, float(sys.argv[5]))
order = torch.Generator().manual_seed(seed)
samples = len(data.train)
step, seconds = 0, 0.0


def report():
    line = {"step": step, "accuracy": accuracy(model), "seconds": seconds}
    print(json.dumps(line), flush=True)


report()
while True:
    for rows in torch.randperm(samples, generator=order)[: samples - samples % batch_size].split(batch_size):
        began = time.perf_counter()
        train_on(model, optimizer, rows)
        seconds += time.perf_counter() - began
        step += 1
        if step % every == 0:
            report()
"""

LIGHTNING = """
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import bssearch
from bssearch.integrations.lightning import TrialCallback
from digits_model import accuracy, build, data, optimizer_of


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build()

    def training_step(self, rows, batch_idx):
        return nn.functional.cross_entropy(self.model(data.train.inputs[rows]), data.train.targets[rows])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", accuracy(self.model))

    def configure_optimizers(self):
        return optimizer_of(self.model, 0.1)


trial = bssearch.current_trial(batch_size=64, learning_rate=0.1)
module = Module()
rows, order = range(len(data.train)), trial.sampler(data.train)
loader = DataLoader(rows, batch_size=trial.micro_batch_size, sampler=order, generator=torch.Generator())
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=-1, callbacks=[TrialCallback(trial)], **quiet)
trainer.fit(module, loader, DataLoader([0]))
"""

TRAINER = """
from torch import nn
from transformers import Trainer

import bssearch
from bssearch.integrations.transformers import TrialCallback, training_arguments
from digits_model import build, data, optimizer_of


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = build()

    def forward(self, inputs, labels):
        scores = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Ordered(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return trial.sampler(self.train_dataset)


def rows_of(part):
    return [{"inputs": one, "labels": label} for one, label in zip(part.inputs, part.targets.tolist())]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


trial = bssearch.current_trial(batch_size=64, learning_rate=0.1)
model = Model()
args = training_arguments(
    trial, output_dir="out", max_grad_norm=0.0, logging_strategy="no", per_device_eval_batch_size=360
)
Ordered(
    model=model,
    args=args,
    train_dataset=rows_of(data.train),
    eval_dataset=rows_of(data.validation),
    compute_metrics=accuracy,
    optimizers=(optimizer_of(model, trial.learning_rate), None),
    callbacks=[TrialCallback(trial)],
).train()
"""

SPEC: dict[str, Any] = {
    "target": {"metric": "accuracy", "value": 0.949},
    "space": {
        "batch_size": {"low": 8, "high": 512},
        "learning_rate": {"reference_batch": 64, "low": 0.01, "high": 0.5, "rule": "sqrt"},
        "warmup_epochs": 0,
        "weight_decay": 1e-4,
    },
    "default": {"batch_size": 64, "learning_rate": 0.1},
    "confirm": {"top": 3, "runs": 5},
    "executor": {"device": "cpu"},
}
COMMAND = [sys.executable, "program.py", "{batch_size}", "{seed}", "{evaluate_every}", "{threads}", "{learning_rate}"]
WAYS: dict[str, dict[str, Any]] = {
    "workload": {"workload": "digits"},
    "own loop": {"workload": "loop.py"},
    "command": {"command": COMMAND},
    "lightning": {"workload": "lightning_script.py"},
    "trainer": {"workload": "trainer_script.py"},
}
PROGRAMS = {
    "digits_model.py": MODEL,
    "loop.py": LOOP,
    "program.py": PROGRAM,
    "lightning_script.py": LIGHTNING,
    "trainer_script.py": TRAINER,
}


def spec_of(way: str, trials: int) -> StudySpec:
    """Return the spec of a study in one of the ways."""
    budget = {"trials": trials, "trial_train_seconds": 6}
    return load_spec({"name": f"digits-{way.replace(' ', '-')}", **SPEC, "budget": budget, **WAYS[way]})


def write_programs(folder: Path) -> None:
    """Write the model, and the programs that train it."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text.lstrip())


@contextmanager
def executor_of(way: str, folder: Path) -> Iterator[Executor]:
    """Give an executor of a way."""
    executor = local(None, allow_busy=False)(spec_of(way, 10), folder)
    try:
        yield executor
    finally:
        executor.close()


def outcome_of(executor: Executor, request: TrialRequest) -> TrialOutcome:
    """Return how a trial ends."""
    executor.submit(request)
    while True:
        for event in executor.events(1.0):
            if isinstance(event, Ended):
                return event.outcome


def requests(count: int) -> list[TrialRequest]:
    """Return trials drawn at random, the same in every run of this script."""
    rng, spec, found = random.Random(0), spec_of("workload", 10), []
    for number in range(1, count + 1):
        size = rng.choice(spec.batch_sizes)
        micro, accumulation = split_batch(size, None)
        configuration = Configuration(
            batch_size=size,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
            learning_rate=0.02 * (size / 8) ** 0.5 * rng.uniform(0.7, 2.0),
            weight_decay=1e-4,
            parameters={"momentum": 0.9, "nesterov": True, "schedule": "constant"},
        )
        found.append(
            TrialRequest(
                number=number,
                configuration=configuration,
                seed=rng.randrange(2**31),
                target=spec.record_target,
                train_seconds_limit=300.0,
                limit_state=TrialState.EXHAUSTED,
                eval_every_steps=rng.choice((1, 3, 10)),
            )
        )
    return found


def same_steps(folder: Path, count: int) -> bool:
    """Print the steps to the target in each way; return whether they are the same."""
    print(f"{'batch':>6} {'rate':>7} {'every':>6} {'seed':>11}  " + "  ".join(f"{way:>9}" for way in WAYS))
    asked = requests(count)
    found: dict[str, list[int | None]] = {}
    for way in WAYS:
        with executor_of(way, folder) as executor:
            found[way] = [outcome_of(executor, request).steps_to_target for request in asked]
    for index, request in enumerate(asked):
        one = request.configuration
        print(
            f"{one.batch_size:>6} {one.learning_rate:>7.3g} {request.eval_every_steps:>6} {request.seed:>11}  "
            + "  ".join(f"{found[way][index]!s:>9}" for way in WAYS)
        )
    first, *others = found.values()
    return None not in first and all(other == first for other in others)


def one_rung(folder: Path, trials: int) -> bool:
    """Print the answer of a study in each way; return whether the batch sizes are within one rung of each other."""
    rungs = []
    print(f"\n{'way':>9} {'batch':>6} {'rate':>7} {'time, s':>8} {'interval':>16} {'steps':>6}  flat")
    for way in WAYS:
        spec = spec_of(way, trials)
        answer = run_study(spec, db=f"sqlite:///{folder / 'study.db'}", folder=folder)
        optimal, time = answer.optimal, answer.optimal.time_to_target_s
        rungs.append(spec.batch_sizes.index(optimal.batch_size))
        assert time is not None
        interval = "–" if time.low is None or time.high is None else f"[{time.low:.3f}, {time.high:.3f}]"
        print(
            f"{way:>9} {optimal.batch_size:>6} {optimal.parameters['learning_rate']:>7.3g} {time.median:>8.3f} "
            f"{interval:>16} {optimal.steps_to_target!s:>6}  {answer.flat_range}",
            flush=True,
        )
    return max(rungs) - min(rungs) <= 1


def main(configurations: int = 6, trials: int = 30) -> bool:
    """Try both, print tables, and judge."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_programs(folder)
        steps = same_steps(folder, configurations)
        print("steps to the target: " + ("the same" if steps else "not the same"), flush=True)
        rungs = one_rung(folder, trials)
        print("recommended batch sizes: " + ("within one rung" if rungs else "further apart than one rung"))
    return verdict(steps and rungs)


if __name__ == "__main__":
    script(main, __doc__)
