"""A worker as a systemd unit, and as a script for Slurm's sbatch, with the options that it was given.

The database's address stands in neither: everybody may read a unit, and a script's words stand in the list of
processes. Both name a file that holds it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bssearch.errors import UsageError
from bssearch.queue.templates import load_templates
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_FILE_VARIABLE, is_url, user_name
from bssearch.storage.connection.urls import masked

URL_FILE = "/etc/bssearch/database"
"""The file with the database's URL, where the environment names none."""

STOP_SECONDS = 30
"""Seconds that systemd gives a worker to give its trials back: what it takes at most, and a little more."""

NOTICE_SECONDS = 60
"""Seconds before a job's end at which Slurm tells: twice what a worker needs. It may tell a minute earlier."""

UNIT = """\
# /etc/systemd/system/bssearch-worker.service
[Unit]
Description=bssearch worker: serves the queue of studies
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User={user}
WorkingDirectory={folder}
{environment}
ExecStart={command}
# The worker alone is told to stop: it has its trials saved and gives them back.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop}
Restart=on-failure
RestartSec=30

[Install]
WantedBy=multi-user.target
"""

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=bssearch-worker
#SBATCH --ntasks=1
{gpus}#SBATCH --time=24:00:00
#SBATCH --output=bssearch-worker-%j.log
# Before the job's time is over the worker is told to stop: it has its trials saved and gives them back.
#SBATCH --signal=B:TERM@{notice}
set -euo pipefail
{environment}
cd {folder}
# In the place of the shell, so that the signal reaches it.
exec {command}
"""


def systemd_unit(templates: Path, options: Sequence[str]) -> str:
    """Return a unit that runs a worker with these options; raise what `load_templates` raises."""
    words = _command(templates, options)
    environment = "\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in _environment().items())
    return UNIT.format(
        user=user_name(),
        folder=_path(templates.resolve().parent),
        environment=environment,
        command=" ".join(map(_argument, words)),
        stop=STOP_SECONDS,
    )


def sbatch_script(templates: Path, options: Sequence[str], *, has_gpu: bool = True) -> str:
    """Return a script for sbatch that runs a worker with these options; raise what `load_templates` raises."""
    words = _command(templates, options)
    return SCRIPT.format(
        gpus="#SBATCH --gpus=1\n" if has_gpu else "",
        notice=NOTICE_SECONDS,
        environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in _environment().items()),
        folder=shlex.quote(str(templates.resolve().parent)),
        command=shlex.join(words),
    )


def _command(templates: Path, options: Sequence[str]) -> list[str]:
    load_templates(templates)
    words = [sys.executable, "-m", "bssearch", "worker", "--templates", str(templates.resolve()), *options]
    if odd := next((word for word in words if not word.isprintable()), None):
        raise UsageError(f"{odd!r} cannot stand in a unit or a script")
    return words


def _environment() -> dict[str, str]:
    """Return what the worker needs of this environment: where the URL stands, and where paused trials are kept.

    It runs in another folder: paths are whole.
    """
    kept = {DATABASE_URL_FILE_VARIABLE: _whole(os.environ.get(DATABASE_URL_FILE_VARIABLE) or URL_FILE)}
    if place := os.environ.get(CHECKPOINT_DIR_VARIABLE):
        if is_url(place) and ("@" in place or masked(place) != place):
            raise UsageError(
                f"{CHECKPOINT_DIR_VARIABLE} is a URL with a login, which would stand in what is printed",
                hint="leave the login to a file of the store's own library",
            )
        kept[CHECKPOINT_DIR_VARIABLE] = place if is_url(place) else _whole(place)
    return kept


def _whole(path: str) -> str:
    return str(Path(path).absolute())


def _quoted(word: str) -> str:
    """Return a word as systemd reads it, in which % begins a specifier (systemd.syntax(7))."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return text if word and all(one.isalnum() or one in "/._-=:,+@" for one in word) else f'"{text}"'


def _argument(word: str) -> str:
    """Return a word of a command line, in which $ begins a variable, too (systemd.service(5))."""
    return _quoted(word).replace("$", "$$")


def _path(folder: Path) -> str:
    """Return a folder as a setting takes it: to its end, without quotes."""
    return str(folder).replace("%", "%%")
