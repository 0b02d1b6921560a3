"""What it takes to run a stored trial again: one command, and what must be the same beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from bssearch.commands.rerun import Stored, stored_trial
from bssearch.storage.repository import Store
from bssearch.workloads.base import SHIPPED


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The ``command`` that runs a trial again, and lines on what must be the same where it runs."""

    command: str
    notes: tuple[str, ...]


def reproduction(store: Store, study: str, trial: int, *, names_database: bool = False) -> Reproduction:
    """Return how to run a stored trial again, by a command that names the store's database where asked.

    A URL with a password is named in the notes, masked, and not in the command. Raises `UsageError` for a trial that
    cannot be run again.
    """
    stored = stored_trial(store, study, trial)
    words = ["bssearch", "rerun", study, str(trial)]
    notes = list(_notes(stored))
    if names_database and store.has_secret:
        notes.append(f"BSSEARCH_DB_URL must name {store.masked_url}")
    elif names_database:
        words += ["--db", store.masked_url]
    return Reproduction(shlex.join(words), tuple(notes))


def _notes(stored: Stored) -> Iterator[str]:
    """Yield what must be the same for the same steps, and on what device the seconds compare."""
    trial, environment = stored.trial, stored.environment
    started = f", started by {trial.started_by}" if trial.started_by else ""
    yield f"trial {trial.number} of {stored.study.name}: {trial.state}, seed {trial.seed}{started}"
    code = f"workload {stored.spec.workload}"
    if environment.workload_revision is not None:
        code += f", its file of digest {environment.workload_revision}"
    if environment.git_revision is not None:
        code += f", git revision {environment.git_revision}"
    if environment.git_dirty:
        code += " with changes that are not committed"
    yield f"code: {code}" + (
        ""
        if stored.spec.workload in SHIPPED
        else "; its file is looked up from this folder; one that has changed since is run with --workload"
    )
    device = environment.device_name + (f" ({uuid})" if (uuid := stored.outcome.device_uuid) else "")
    yield (
        f"device: {device}, precision {environment.precision}, compile {environment.compile_mode}, "
        f"threads {trial.threads}, host {environment.host}"
    )
    known = {
        "Python": environment.python_version,
        "torch": environment.torch_version,
        "CUDA": environment.cuda_version,
        "cuDNN": environment.cudnn_version,
        "driver": environment.driver_version,
        **environment.library_versions,
    }
    yield f"versions: {', '.join(f'{name} {version}' for name, version in known.items() if version)}"
