"""A user's own workload and spec, small enough for a whole study in a few seconds, and the command line."""

import functools
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bssearch.cli import main
from bssearch.cli.app import app

WORKLOAD = """
import ctypes
import os
import time

import torch

import bssearch


class Task:
    metrics = {"accuracy": bssearch.MetricInfo(low=0, high=1, chance=0.5)}

    def __init__(self, step_seconds=0.0, fault=""):
        self.step_seconds, self.fault, self.models = step_seconds, fault, 0

    def load(self, device):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(900, 10, generator=generator).to(device)
        targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
        cut = lambda a, b: bssearch.Part(inputs[a:b], targets[a:b])
        return bssearch.Data(train=cut(0, 500), validation=cut(500, 700), test=cut(700, 900))

    def build_model(self, *, dropout):
        self.calls = 0
        self.models += 1
        print("a new model")
        return torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def loss(self, model, inputs, targets, *, label_smoothing):
        self.calls += 1
        # The first models are described, and timed once at two batch sizes: only trials have the fault.
        if len(inputs) == 16 and self.calls == 10 and self.models > 3:
            if self.fault == "raise":
                raise RuntimeError("this batch size is cursed")
            if self.fault == "segfault":
                ctypes.string_at(0)
            if self.fault == "kill":
                os.kill(os.getpid(), 9)
            if self.fault == "hang":
                time.sleep(1000)
        time.sleep(self.step_seconds)
        return torch.nn.functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).float().mean().item()}
"""

DEFAULT = {"batch_size": 32, "learning_rate": 0.1, "warmup_epochs": 0}

SPEC = {
    "schema_version": 1,
    "name": "task",
    "workload": "task.py:Task",
    "target": {"metric": "accuracy", "value": 0.93},
    "space": {
        "batch_size": {"low": 8, "high": 128},
        "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 1.0, "rule": "sqrt"},
        "warmup_epochs": [0, 1],
    },
    "default": DEFAULT,
    "sampler": {"name": "tpe"},  # every batch size gets its trials, and all of them are made
    "pruner": {"name": "race"},
    "confirm": {"top": 1, "runs": 3},
    "budget": {"trials": 12, "trial_train_seconds": 2.0},
    "executor": {"device": "cpu"},
}

INLINE = {"device": "cpu", "name": "inline"}
"""The executor of a study where no process of its own is needed: to start one takes seconds."""


UNCONFIRMED = {"top": 1, "runs": 0}


def space_of(*batch_sizes: int) -> dict[str, object]:
    """Return the task's space with other batch sizes, each of which a run times before its search."""
    return {**SPEC["space"], "batch_size": list(batch_sizes)}  # type: ignore[dict-item]


def write_task(folder: Path, **changes: object) -> Path:
    """Write the workload and its spec into a folder; return the spec's path."""
    (folder / "task.py").write_text(WORKLOAD)
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **changes}))
    return path


_make_command = typer.main.get_command
_make_command_once = functools.cache(_make_command)


def command_of(one: typer.Typer) -> Any:
    """Return Typer's command for an application; that of ours, longer in the making than most take, is made once."""
    return _make_command_once(one) if one is app else _make_command(one)


def bssearch(*arguments: str | Path, cwd: Path, columns: int = 200) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder, inside this process: it starts as quickly as a function."""
    words = [str(argument) for argument in arguments]
    out, errors = io.StringIO(), io.StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["bssearch", *words])
        patch.setattr(sys, "path", [*sys.path])  # what a command adds to it ends with it
        patch.setenv("COLUMNS", str(columns))
        try:
            main()
        except SystemExit as ending:
            code = ending.code
    return subprocess.CompletedProcess(words, code if isinstance(code, int) else 0, out.getvalue(), errors.getvalue())


def ran(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that succeeds."""
    done = bssearch(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def printed(folder: Path, *words: str | Path) -> str:
    """Run a command that succeeds; return its standard output."""
    return ran(folder, *words).stdout


def read(folder: Path, *words: str | Path) -> Any:
    """Run a command that succeeds; return the JSON that it prints."""
    return json.loads(printed(folder, *words, "--format", "json"))


def refused(folder: Path, *words: str | Path, code: int) -> str:
    """Run a command that fails without a traceback; return its standard error."""
    done = bssearch(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bssearch", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return the environment of a command: this checkout's code, whatever the folder."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "COLUMNS": "200"}
