"""Where trials run: the device, the versions and the workload's own code."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType

import psutil
import torch

from bssearch.records import Environment, MetricInfo, ModelDescription, WorkloadDescription, is_metric
from bssearch.training.computation import Computation
from bssearch.workloads.given import is_of_main

OWN = "own"
"""Stands for the precision and the compile mode of a program, which are its own business."""

STOOD_ON = ("bssearch", "numpy", "optuna", "sqlalchemy")
"""Libraries of bssearch itself whose versions are told; torch has a field of its own."""

OF_WORKLOADS = ("accelerate", "lightning", "pytorch_lightning", "timm", "torchvision", "transformers")
"""Libraries whose versions are told where a workload imports them: they decide what is trained."""

GIT_SECONDS = 5.0
"""What git does not say within this time is left unsaid."""


def describe_environment(
    computation: Computation, workload: object | None = None, *, memory_limit_bytes: int | None = None
) -> Environment:
    """Return the environment in which a computation runs; with a workload also the versions of its source file.

    ``memory_limit_bytes`` is a limit that was set below what the device has, None for no limit.
    """
    return describe_device(
        computation.device,
        precision=computation.precision,
        compile_mode=computation.compile_mode,
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
    """Return the environment of what computes on a device in a precision, with the versions of its code.

    ``source`` is the file of that code, whose repository is asked for its revision.
    """
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
        driver_version=_driver_version() if is_cuda else None,
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
    notice: str | None = None,
    source: Path | None = None,
) -> WorkloadDescription:
    """Return what is known of a program of the user's own: its ``metrics``, and some of them before its first step.

    ``notice`` is what there is to say of it, ``source`` the file whose repository is asked for its revision.
    """
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
            batch_norm_layers=0,
            initial_metrics={name: value if is_metric(value) else None for name, value in untrained.items()},
        ),
        notice=notice,
    )


def workload_revision(workload: object) -> str | None:
    """Return 12 hex digits of the SHA-256 of the file that defines the workload; None where there is none.

    Of a class that no other process can load, as in a notebook, it is that of the source of the class and of those
    beside it that it inherits from: the rest of a notebook may change.
    """
    source = _source_file(workload)
    in_file = None if source is None else source.read_bytes()
    code = _own_source(type(workload)) if is_of_main(workload) else in_file
    return None if code is None else hashlib.sha256(code).hexdigest()[:12]


def _own_source(kind: type) -> bytes | None:
    """Return the source of a class and of those of its module that it inherits from, None where Python has none."""
    parts = [_source(one) for one in kind.__mro__ if one.__module__ == kind.__module__]
    known = [part for part in parts if part is not None]
    return "\n".join(known).encode() if len(known) == len(parts) else None


def _source(kind: type) -> str | None:
    """Return the source of a class; of a notebook's, whose file Python does not know, that of its functions."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        functions = [one for one in vars(kind).values() if inspect.isfunction(one)]
    try:
        return "\n".join(map(inspect.getsource, functions)) if functions else None
    except (OSError, TypeError):
        return None


def git_state(source: Path) -> tuple[str | None, bool | None]:
    """Return the commit, 12 hex digits, that the repository of a file is at, and whether what lies there differs.

    A ``+`` follows the commit where the file itself is not as it is there; whether that or any file that the repository
    tracks differs is the second value, None where git takes too long to say. None and None without git, outside of a
    repository, and for a file that the repository ignores, such as one of an installed package.
    """
    commit = _git(source.parent, "rev-parse", "--verify", "HEAD")
    state = _git(source.parent, "status", "--porcelain", "--ignored", "--", source.name)
    if commit is None or state is None or state.startswith("!!"):
        return None, None
    changed = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return commit[:12] + ("+" if state else ""), None if changed is None else bool(state or changed)


def library_versions() -> tuple[str, ...]:
    """Return the versions of the libraries that decide what is trained here, each ``name version``, by name.

    Those that bssearch stands on, and of those that a workload may import what this process has imported.
    """
    names = {*STOOD_ON, *(name for name in OF_WORKLOADS if name in sys.modules)}
    return tuple(f"{name} {version}" for name in sorted(names) if (version := _version(name)) is not None)


def _version(name: str) -> str | None:
    """Return the version of a library; None where Python does not know it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says in a folder, None where it fails or takes too long; the repository's index is left alone."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return said.stdout.strip()


def _source_file(workload: object) -> Path | None:
    try:
        source = inspect.getsourcefile(workload if isinstance(workload, ModuleType) else type(workload))
    except (OSError, TypeError):  # the former in a notebook, which is no file
        return None
    return None if source is None or not Path(source).is_file() else Path(source).resolve()


def cudnn_version() -> str | None:
    """Return the version that cuDNN numbers as 90100 (9.1.0) or, before version 9, 8902 (8.9.2)."""
    number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def device_name(device: torch.device) -> str:
    """Return of which kind a device is: the name of a GPU's model, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()


def _processor_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model name where Linux tells it, else its architecture."""
    if cpu_info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def _driver_version(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    if not version_file.is_file():
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", version_file.read_text())
    return found[1] if found else None
