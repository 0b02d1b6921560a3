"""Trust in stored workloads.

Whoever can write to a database can name any code. So stored names run only if this user has run that code on this
machine, by a local record.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from bssearch.errors import UsageError
from bssearch.files import make_private_folder
from bssearch.records import MAKE_TRAINER, StudyRecord
from bssearch.settings import state_folder
from bssearch.spec import StudySpec
from bssearch.spec.model import GIVEN_IN_PYTHON, OBJECTIVE, OF_PROGRAMS
from bssearch.workloads.base import SHIPPED, lies_in_no_file

TEXTS = "texts"


def remember(spec: StudySpec, study: StudyRecord, folder: Path) -> None:
    """Record that this user runs this workload and cluster; files by content."""
    if spec.workload in SHIPPED and spec.executor.address is None:
        return
    file = _file(study)
    text = _text(spec, folder)
    with suppress(OSError):
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            make_private_folder(file.parent)
            file.write_text(text, encoding="utf-8")


def refuse_unknown(spec: StudySpec, study: StudyRecord, folder: Path) -> None:
    """Raise `UsageError` if a stored study names code that this user never ran here.

    Code is identified by name, settings, executor, file content, and the texts that the space and default pass on,
    because a command puts them into shell words. Files outside ``folder`` are refused, too.
    """
    if spec.workload in SHIPPED:
        return
    refuse_where_in_no_file(spec)
    path = PurePath(_location(spec))
    named = f"the stored study {study.name!r} names the workload {spec.workload!r}"
    if path.suffix == ".py" and not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{named}, a file outside of this folder: code is not run on a database's word alone",
            hint="--workload PATH.py:ATTRIBUTE names the code that you mean",
        )
    if not _is_known(spec, study, folder):
        raise UsageError(
            f"{named}, which you have not run for it on this machine as it is now: code is not run on a database's "
            "word alone",
            hint=f"if you trust it, add --workload {shlex.quote(spec.workload)}{_what_runs(spec)}",
        )


def refuse_unknown_address(spec: StudySpec, study: StudyRecord) -> None:
    """Raise `UsageError` for a cluster that this user never used from here.

    Its messages become Python objects, so its owner can run code here.
    """
    address = spec.executor.address
    if address is None:
        return
    try:
        is_known = json.loads(_file(study).read_text(encoding="utf-8")).get("address") == address
    except (OSError, ValueError):
        is_known = False
    if not is_known:
        raise UsageError(
            f"the stored study {study.name!r} names the cluster executor.address = {address!r}, on which you have not "
            "run it from this machine: nothing is connected to on a database's word alone",
            hint="`bssearch run` of your spec with this address makes it known",
        )


def refuse_where_in_no_file(spec: StudySpec) -> None:
    """Raise `UsageError` for a workload that is in no file or module."""
    if spec.workload == GIVEN_IN_PYTHON:
        raise UsageError(
            f"workload: the spec of study {spec.name!r} names no workload",
            hint="write `workload: my_task.py:MyTask` in the spec, or in Python "
            "bssearch.run_study(spec, bssearch.Launch(workload=MyTask))",
        )
    if spec.workload == OBJECTIVE or lies_in_no_file(spec.workload):
        raise UsageError(
            f"the workload {spec.workload!r} of study {spec.name!r} is not in a file: it was given from a notebook, or "
            "from the script that ran",
            hint="give it again from there, as in bssearch.confirm_study(spec, bssearch.Launch(workload=MyTask)), or "
            "as the objective of bssearch.Study(spec, objective=train)",
        )


def _location(spec: StudySpec) -> str:
    return spec.workload.removesuffix(MAKE_TRAINER) if spec.is_program else spec.workload.rpartition(":")[0]


def _file(study: StudyRecord) -> Path:
    return state_folder() / "workloads" / f"{study.mark}.json"


def _is_known(spec: StudySpec, study: StudyRecord, folder: Path) -> bool:
    try:
        known = json.loads(_file(study).read_text(encoding="utf-8"))
        known_texts = set(known.pop(TEXTS, ()))
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    asked = json.loads(_text(spec, folder))
    return known_texts.issuperset(asked.pop(TEXTS)) and known == asked


def _text(spec: StudySpec, folder: Path) -> str:
    told: dict[str, Any] = {
        "workload": spec.workload,
        "workload_settings": spec.workload_settings,
        "executor": spec.executor.name,
        "sha256": _digest(folder / _location(spec)),
        TEXTS: sorted(_texts(spec)),
    }
    if spec.executor.address is not None:
        told["address"] = spec.executor.address
    if spec.is_program:
        from bssearch.executors.programs.command import digest_of, files_of

        told |= {name: getattr(spec, name) for name in OF_PROGRAMS}
        told["files"] = {name: digest_of(file) for name, file in files_of(spec.command, folder).items()}
    return json.dumps(told, sort_keys=True) + "\n"


def _what_runs(spec: StudySpec) -> str:
    if not spec.command:
        return ""
    texts = ", ".join(map(repr, sorted(_texts(spec))))
    return f", which runs {shlex.join(spec.command)}" + (f" with the texts {texts}" if texts else "")


def _texts(spec: StudySpec) -> set[str]:
    found: set[str] = set()
    for name, domain in spec.space.own_domains.items():
        values = [spec.default_configuration.parameters[name], *(domain if isinstance(domain, tuple) else [domain])]
        found |= {one for one in values if isinstance(one, str)}
    return found


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix and file.is_file() else None
