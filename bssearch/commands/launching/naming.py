"""Which workload a spec names: its own, or one that is given in its place."""

from __future__ import annotations

import shlex
from typing import Any

from bssearch.commands.known_workloads import refuse_where_in_no_file
from bssearch.errors import UsageError
from bssearch.spec import StudySpec
from bssearch.spec.model import COMMAND, GIVEN_IN_PYTHON
from bssearch.workloads.given import GivenWorkload

INLINE = "inline"
"""The executor that runs trials in this process."""


def with_workload(spec: StudySpec, given: GivenWorkload) -> StudySpec:
    """Return a spec of the workload that is given, run in this process where no other one can load it."""
    changed: dict[str, Any] = {"workload": given.name}
    if given.settings is not None:
        changed["workload_settings"] = given.settings
    if given.in_process is not None:
        changed["executor"] = spec.executor.model_copy(update={"name": INLINE, "address": None})
    return spec.model_copy(update=changed)


def in_this_process(given: GivenWorkload) -> str:
    """Return what to know of trials whose code no other process can load."""
    return (
        f"{given.label} lies in no file that a worker process could load: its trials run in this process, one at a "
        "time, and a crash or a hang is one of this process"
    )


def named(spec: StudySpec, given: GivenWorkload | None, *, keeps_name: bool, in_a_file: bool) -> StudySpec:
    """Return a spec that names its workload: the one given, or with ``keeps_name`` its own where it has one.

    ``in_a_file`` says that the executor loads it from where the spec says. Raises `UsageError` where there is none,
    where an object has other settings than the spec says, and where one is given for a command.
    """
    if given is None:
        if in_a_file:
            refuse_where_in_no_file(spec)
        return spec
    if spec.command and given.name != COMMAND:
        raise UsageError(
            f"the training of study {spec.name!r} is a command: no workload takes its place",
            hint=f"--workload {COMMAND} runs the command, {shlex.join(spec.command)}",
        )
    keeps_name = keeps_name and spec.workload != GIVEN_IN_PYTHON
    said = spec.workload_settings
    if given.settings is not None and given.settings != said and (said or keeps_name):
        raise UsageError(
            f"workload_settings = {said} of study {spec.name!r} are not those of the workload given: {given.settings}",
            hint="give the class, which is called with them, or another object",
        )
    return spec if keeps_name else with_workload(spec, given)
