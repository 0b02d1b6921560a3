"""The environment of trials: device, versions, workload code."""

import hashlib
import inspect
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType

import psutil
import torch

from bssearch.records import Environment, MetricInfo, ModelDescription, WorkloadDescription, is_metric
from bssearch.training.computation import Computation
from bssearch.training.process_times import found_in
from bssearch.workloads.base import MAIN

OWN = "own"  # precision and compile mode of a user's program

# dependencies of bssearch with recorded versions; torch has a separate field
DEPENDENCIES = ("bssearch", "numpy", "optuna", "sqlalchemy")

# record the version of such a library if a workload imports the library, because the version affects training
OF_WORKLOADS = ("accelerate", "lightning", "pytorch_lightning", "timm", "torchvision", "transformers")

GIT_SECONDS = 5.0  # limit for each git command


def describe_environment(
    computation: Computation, workload: object | None = None, *, memory_limit_bytes: int | None = None
) -> Environment:
    return describe_device(
        computation.device,
        precision=computation.precision,
        compile_mode=computation.settings.compile if computation.compiles else "none",
        memory_limit_bytes=memory_limit_bytes,
        workload_revision=None if workload is None else workload_revision(workload),
        source=None if workload is None else _source_file(workload),
    )


def describe_device(
    device: torch.device,
    *,
    precision: str,
    compile_mode: str,
    memory_limit_bytes: int | None = None,
    workload_revision: str | None = None,
    source: Path | None = None,
) -> Environment:
    """Describe a device and the software versions. ``source`` is a file in the Git repository to record."""
    is_cuda = device.type == "cuda"
    revision, is_dirty = (None, None) if source is None else git_state(source)
    memory = torch.cuda.get_device_properties(device).total_memory if is_cuda else psutil.virtual_memory().total
    return Environment(
        device_name=device_name(device),
        device_type=device.type,
        device_memory_bytes=memory if memory_limit_bytes is None else min(memory, memory_limit_bytes),
        precision=precision,
        compile_mode=compile_mode,
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        driver_version=found_in(Path("/proc/driver/nvidia/version"), r"\b(\d+\.\d+(?:\.\d+)?)\b") if is_cuda else None,
        python_version=platform.python_version(),
        host=platform.node(),
        workload_revision=workload_revision,
        cudnn_version=cudnn_version() if is_cuda else None,
        git_revision=revision,
        git_dirty=is_dirty,
        libraries=library_versions(),
    )


def describe_program(
    device: torch.device,
    metrics: Iterable[str],
    untrained: Mapping[str, float],
    *,
    memory_limit_bytes: int | None,
    revision: str,
    batch_norm_layers: int = 0,
    notice: str | None = None,
    source: Path | None = None,
) -> WorkloadDescription:
    return WorkloadDescription(
        train_samples=None,
        validation_samples=None,
        test_samples=None,
        metrics={name: MetricInfo() for name in metrics},
        environment=describe_device(
            device,
            precision=OWN,
            compile_mode=OWN,
            memory_limit_bytes=memory_limit_bytes,
            workload_revision=revision,
            source=source,
        ),
        model=ModelDescription(
            parameters=None,
            batch_norm_layers=batch_norm_layers,
            initial_metrics={name: value if is_metric(value) else None for name, value in untrained.items()},
        ),
        notice=notice,
    )


def workload_revision(workload: object) -> str | None:
    """Return 12 hex digits of the SHA-256 of the workload's file, if any.

    For a class in ``__main__``, the digest covers the source of the class and of base classes in ``__main__``.
    """
    if type(workload).__module__ == MAIN:
        parts = [_source(one) for one in type(workload).__mro__ if one.__module__ == type(workload).__module__]
        known = [part for part in parts if part is not None]
        code = "\n".join(known).encode() if len(known) == len(parts) else None
    else:
        source = _source_file(workload)
        code = None if source is None else source.read_bytes()
    return None if code is None else hashlib.sha256(code).hexdigest()[:12]


def _source(kind: type) -> str | None:
    for parts in ([kind], filter(inspect.isfunction, vars(kind).values())):
        with suppress(OSError, TypeError):
            return "\n".join(map(inspect.getsource, parts)) or None
    return None


def git_state(source: Path) -> tuple[str | None, bool | None]:
    """Return the commit (12 hex digits) of a file's repository, and whether tracked files differ from the commit.

    The commit ends in ``+`` if the file itself differs. Values are None if unknown, or if Git ignores the file.
    """
    commit = _git(source.parent, "rev-parse", "--verify", "HEAD")
    state = _git(source.parent, "status", "--porcelain", "--ignored", "--", source.name)
    if commit is None or state is None or state.startswith("!!"):
        return None, None
    changed = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return commit[:12] + ("+" if state else ""), None if changed is None else bool(state or changed)


def library_versions() -> tuple[str, ...]:
    names = {*DEPENDENCIES, *(name for name in OF_WORKLOADS if name in sys.modules)}
    return tuple(f"{name} {version}" for name in sorted(names) if (version := installed_version(name)) is not None)


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def _source_file(workload: object) -> Path | None:
    try:
        source = inspect.getsourcefile(workload if isinstance(workload, ModuleType) else type(workload))
    except (OSError, TypeError):  # OSError in a notebook
        return None
    return None if source is None or not Path(source).is_file() else Path(source).resolve()


def cudnn_version() -> str | None:
    # The number is 90100 for 9.1.0 and, before version 9, 8902 for 8.9.2.
    number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = found_in(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+?)\s*$")
    return model or platform.processor() or platform.machine() or "CPU"
