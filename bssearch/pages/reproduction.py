"""Where a study ran, and how to run it again: the end of its page."""

from __future__ import annotations

import shlex
from typing import Any

from bssearch.analysis.numbers import number
from bssearch.records import Environment, StudyRecord
from bssearch.spec import StudySpec

SHORT_SPEC = 25
"""Lines of the longest spec that is shown unfolded: a choice."""


def reproduction_of(study: StudyRecord, spec: StudySpec) -> dict[str, Any]:
    """Return where the study ran, what to type, and its spec."""
    import yaml

    name = study.name
    text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    imported = spec.is_imported
    how = (
        "Its runs were made elsewhere and imported; the spec below says what is known of them."
        if imported
        else f"Save the spec below as {name}.yaml beside the workload. Figures compare only on the same kind of device."
    )
    file = shlex.quote(f"./{name}.yaml")
    commands = [] if imported else [f"bssearch run {file}"]
    commands.append(f"bssearch report {shlex.quote(name)} --html report.html")
    return {
        "facts": _facts(study.environment),
        "how": how,
        "commands": "\n".join(commands),
        "spec": text,
        "spec_is_short": text.count("\n") <= SHORT_SPEC,
    }


def _facts(environment: Environment | None) -> list[tuple[str, str]]:
    if environment is None:
        return []
    memory = environment.device_memory_bytes
    known = {
        "Device": environment.device_name,
        "Device memory": None if memory is None else f"{number(memory / 2**30)} GiB",
        "Precision": environment.precision,
        "Compile mode": environment.compile_mode,
        "torch": environment.torch_version,
        "CUDA": environment.cuda_version,
        "cuDNN": environment.cudnn_version,
        "Driver": environment.driver_version,
        "Python": environment.python_version,
        "Host": environment.host,
        "Workload’s digest": environment.workload_revision,
        "Git revision": environment.git_revision,
        "Libraries": ", ".join(environment.libraries),
    }
    return [(name, str(value)) for name, value in known.items() if value]
