"""Whether a study that ran beside a busy process gives the same answer once its steps are timed again, alone.

Run as ``python tests/benchmarks/table_task.py``: some minutes. The task is a made-up table of 20,000 rows and 20
columns: a row's class is the sign of a sum of two products of three hidden directions each, and 3 labels in 100 are
wrong, so that no more than 97 % can be had. A perceptron with AdamW is to get 82 % of the validation rows right, at
batch 16 to 2048: a thousand steps or more at batch 16, some dozens at 2048. Workload and spec are written into
``--folder``.

There ``bssearch run`` runs beside a process that multiplies matrices and prints the answer; then come ``bssearch probe
step-time``, without that process, and ``bssearch best``. Bar: the batch size that each answer recommends lies in the
flat range of the other, and the intervals of the two times to the target overlap. Exits 1 where they do not, and with
the code of the command that failed.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from bssearch.analysis.answer import Answer
from bssearch.commands.answer import best
from tests.benchmarks.harness import script
from tests.benchmarks.repeatability import BUSY_PRODUCTS, busy_process

NAME = "table_task"

WORKLOAD = '''
import numpy as np
import torch
from torch import nn
from torch.nn import functional

import bssearch

ROWS, COLUMNS, PRODUCTS, FACTORS, WRONG = 20_000, 20, 2, 3, 0.03


class Table:
    """A made-up table of two classes, and a perceptron with two hidden layers."""

    metrics = {"accuracy": bssearch.MetricInfo(low=0.0, high=1.0, chance=0.5)}

    def load(self, device):
        rng = np.random.default_rng(0)
        columns = rng.standard_normal((ROWS, COLUMNS))
        directions, _ = np.linalg.qr(rng.standard_normal((COLUMNS, COLUMNS)))
        hidden = (columns @ directions)[:, : PRODUCTS * FACTORS].reshape(ROWS, PRODUCTS, FACTORS)
        classes = hidden.prod(2).sum(1) > 0
        classes ^= rng.random(ROWS) < WRONG
        inputs = torch.from_numpy(columns.astype(np.float32)).to(device)
        targets = torch.from_numpy(classes.astype(np.int64)).to(device)
        ends = 0, ROWS * 7 // 10, ROWS * 85 // 100, ROWS
        train, validation, test = (
            bssearch.Part(inputs[start:end], targets[start:end]) for start, end in zip(ends, ends[1:])
        )
        return bssearch.Data(train=train, validation=validation, test=test)

    def build_model(self, *, dropout):
        return nn.Sequential(
            nn.Linear(COLUMNS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 2)
        )

    def loss(self, model, inputs, targets, *, label_smoothing):
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model, part):
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in part.chunks(4096))
        return {"accuracy": correct / len(part)}
'''

SPEC = f"""
schema_version: 1
name: {NAME}
workload: {NAME}.py:Table
target: {{metric: accuracy, value: 0.82, goal: maximize}}
space:
  batch_size: {{low: 16, high: 2048}}
  learning_rate: {{reference_batch: 64, low: 0.0005, high: 0.01, rule: sqrt}}
  weight_decay: [0.01, 0.1]
  optimizer: {{name: adamw, beta1: 0.9, beta2: 0.999}}
default: {{batch_size: 1024, learning_rate: 0.004, weight_decay: 0.01}}
budget: {{trials: 40, trial_train_seconds: 10}}
confirm: {{top: 2, runs: 7}}
executor: {{device: cpu}}
"""


def disagreements(one: Answer, other: Answer) -> list[str]:
    """Return in which ways two answers to one question contradict each other."""
    found = []
    for own, against in ((one, other), (other, one)):
        low, high = against.flat_range
        if not low <= own.optimal.batch_size <= high:
            found.append(
                f"batch {own.optimal.batch_size} is not in the flat range of the other answer, {low} to {high}"
            )
    intervals = [
        (time.low, time.high)
        for time in (one.optimal.time_to_target_s, other.optimal.time_to_target_s)
        if time is not None and time.low is not None and time.high is not None
    ]
    if len(intervals) < 2:
        found.append("an answer has no interval of the time to the target")
    elif max(low for low, _ in intervals) > min(high for _, high in intervals):
        described = " and ".join(f"[{low:.3g}, {high:.3g}] s" for low, high in intervals)
        found.append(f"the times to the target do not overlap: {described}")
    return found


def bssearch(folder: Path, *words: str) -> None:
    """Run a command in a folder; exit with its code where it fails."""
    command = [sys.executable, "-m", "bssearch.cli.app", *words]
    code = subprocess.run(command, cwd=folder).returncode
    if code:
        print(f"bssearch {' '.join(words)} ended with code {code}", file=sys.stderr)
        raise SystemExit(code)


def measure(folder: Path, overrides: list[str]) -> bool:
    """Print both answers; return whether they agree."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.py").write_text(WORKLOAD)
    (folder / f"{NAME}.yaml").write_text(SPEC)
    db = f"sqlite:///{folder / NAME}.db"
    asked = [f"{NAME}.yaml", "--db", db, *(word for field in overrides for word in ("--set", field))]
    kept = folder / "before.json"
    if not kept.exists():
        with busy_process(BUSY_PRODUCTS):
            bssearch(folder, "run", *asked)
        kept.write_text(best(NAME, db=db).model_dump_json(indent=1))
    bssearch(folder, "probe", "step-time", *asked)
    bssearch(folder, "best", NAME, "--db", db)
    before, after = Answer.model_validate_json(kept.read_text()), best(NAME, db=db)
    found = disagreements(before, after)
    print("\n".join(found) if found else "the two answers agree")
    return not found


def main(
    folder: Annotated[Path | None, typer.Option(help="go on with the study that is there; else a new one")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE")] = None,
) -> bool:
    """Run the study, print both answers, and judge."""
    scratch = tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder.resolve()))
    with scratch as place:
        return measure(Path(place), overrides or [])


if __name__ == "__main__":
    script(main, __doc__)
