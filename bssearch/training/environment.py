"""Where trials run: the device, the versions and the workload's own code."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
from pathlib import Path
from types import ModuleType

import psutil
import torch

from bssearch.records import Environment

PRECISION = "float32"
COMPILE_MODE = "off"


def describe_environment(device: torch.device, workload: object | None = None) -> Environment:
    """Return the environment of a device; with a workload also the digest of its source file."""
    is_cuda = device.type == "cuda"
    return Environment(
        device_name=torch.cuda.get_device_name(device) if is_cuda else _processor_name(),
        device_type=device.type,
        device_memory_bytes=(
            torch.cuda.get_device_properties(device).total_memory if is_cuda else psutil.virtual_memory().total
        ),
        precision=PRECISION,
        compile_mode=COMPILE_MODE,
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        driver_version=_driver_version() if is_cuda else None,
        python_version=platform.python_version(),
        host=platform.node(),
        workload_revision=None if workload is None else workload_revision(workload),
    )


def workload_revision(workload: object) -> str | None:
    """Return 12 hex digits of the SHA-256 of the file that defines the workload; None where there is no file."""
    try:
        source = inspect.getsourcefile(workload if isinstance(workload, ModuleType) else type(workload))
    except TypeError:
        return None
    if source is None or not Path(source).is_file():
        return None
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]


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
