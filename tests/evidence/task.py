"""The input of a section: device, folder, seconds; and the specs of all sections."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bssearch.executors.base import Executor
    from bssearch.records import Configuration, WorkloadDescription
    from bssearch.spec import StudySpec

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"

Found = dict[str, Any]

EAGER = ("training.compile=none", "training.channels_last=false")
"""The way to run a step that every device supports."""


@dataclass(frozen=True)
class Task:
    """A measurement on a device for at most ``seconds``; the findings go to the folder ``out``."""

    device: str
    quick: bool
    out: Path
    seconds: float = 600.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the section must end."""
        return self.began + self.seconds - time.monotonic()

    @property
    def workload(self) -> str:
        """Return the shipped workload whose batch size is searched."""
        return "digits" if self.quick else "fashion_mnist"

    @property
    def study(self) -> str:
        """Return the name of call A's study."""
        return f"{self.workload}_{self.device.partition(':')[0]}"

    def database(self, name: str) -> str:
        """Return the URL of a database in this folder."""
        return f"sqlite:///{(self.out / f'{name}.db').resolve()}"

    def new_database(self, name: str) -> str:
        """Return the URL of a new, empty database in this folder."""
        for path in self.out.glob(f"{name}.db*"):
            path.unlink()
        return self.database(name)

    def save(self, found: Found) -> None:
        """Keep the findings of a section so far, in case the section fails or is late."""
        write_json(self.out / "section.json", found)

    def spec(self, *overrides: str) -> StudySpec:
        """Return the shipped spec of the workload on the device, with trials of a few seconds."""
        from bssearch.spec import load_spec

        seconds = 2 if self.quick else 12
        named = [f"name={self.study}", f"executor.device={self.device}", f"budget.trial_train_seconds={seconds}"]
        return load_spec(self.workload, [*named, *overrides])

    @property
    def answer_file(self) -> Path:
        """Return the file with the answer of call A's study."""
        return self.out / f"{self.study}.best.json"

    def answer(self) -> Found | None:
        """Return the answer of call A's study; None if the folder has no export of it."""
        if not self.answer_file.exists():
            return None
        found: Found = json.loads(self.answer_file.read_text())
        return found

    def benchmark(self, name: str, *options: str) -> Found:
        """Return the JSON of a benchmark, also if the benchmark misses its bar."""
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--json", "--device", self.device, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if not done.stdout:
            raise RuntimeError(f"{name} printed nothing and exited with code {done.returncode}")
        found: Found = json.loads(done.stdout)
        return found


def write_json(path: Path, value: Found) -> None:
    """Write a file whole or not at all; raise ValueError for numbers that are not finite."""
    text = json.dumps(value, indent=1, default=str, allow_nan=False) + "\n"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)  # noqa: PTH105


@contextmanager
def worker(spec: StudySpec) -> Iterator[tuple[Executor, WorkloadDescription]]:
    """Yield an executor whose new worker has loaded the workload, and the workload's description."""
    from bssearch.commands.launch import Launch
    from bssearch.commands.opening import described

    with described(spec, Launch()) as found:
        yield found


def configuration_of(optimal: Found) -> Configuration:
    """Return the configuration of the ``optimal`` part of an answer."""
    from bssearch.records import Configuration

    names = {"learning_rate", "warmup_epochs", "weight_decay", "dropout", "label_smoothing", "optimizer"}
    parameters = optimal["parameters"]
    return Configuration(
        batch_size=optimal["batch_size"],
        micro_batch_size=optimal["micro_batch_size"],
        accumulation_steps=optimal["accumulation_steps"],
        parameters={name: value for name, value in parameters.items() if name not in names},
        **{name: value for name, value in parameters.items() if name in names},
    )


Run = Callable[[Task], Found]


@dataclass(frozen=True)
class Section:
    """A part of a call with its limit of ``seconds``, which are reserved if the section ``must`` run."""

    name: str
    run: Run
    seconds: float
    must: bool = False


def can_build_kernels() -> bool:
    """True if Triton can compile kernels: with a C compiler and Python's header."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def environment(task: Task) -> Found:
    """Describe the machine, and time the start of a first worker and of a second, with warm caches."""
    from dataclasses import asdict

    started = time.monotonic()
    with worker(task.spec(*EAGER)) as (_, description):
        first = time.monotonic() - started
    found: Found = {**asdict(description.environment), "cpus": os.cpu_count(), "first_start_seconds": first}
    found["can_build_kernels"] = can_build_kernels()
    task.save(found)
    started = time.monotonic()
    with worker(task.spec(*EAGER)):
        found["second_start_seconds"] = time.monotonic() - started
    return found


ENVIRONMENT = Section("environment", environment, 70)
"""The first section of every call; the first start of CUDA on a new machine may take a minute."""
