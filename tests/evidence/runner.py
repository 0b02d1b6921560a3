"""Runs each section of a call in a new process, and keeps the findings in one file.

``evidence.json`` has the calls by name, each with its device and its sections. The file is rewritten after every
section; other calls stay unchanged. Later sections may use the time that a section leaves.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.evidence.task import ROOT, Found, Section, Task, write_json

CALL_SECONDS = 600.0
"""Seconds that a machine grants a call."""

START_SECONDS = 60.0
"""Seconds of the call for the start of the machine."""

LEAST_SECONDS = 5.0
"""A section starts only if at least these seconds are left."""

LAST_WORDS = 60
"""Last lines to keep of a failed section's output."""


class EvidenceFile:
    """``evidence.json`` of a folder, as one call writes it.

    Sections of another device or size are discarded. Raises `ValueError` if the file has another format.
    """

    def __init__(self, folder: Path, call: str, device: str, quick: bool) -> None:
        self._path = folder / "evidence.json"
        self._call = call
        self._head = {"device": device, "quick": quick}
        self.sections()

    def sections(self) -> dict[str, Found]:
        """Return the findings of the call's sections so far."""
        known = self._calls().get(self._call, {})
        same = all(known.get(name) == value for name, value in self._head.items())
        return dict(known["sections"]) if same else {}

    def save(self, name: str, found: Found) -> None:
        """Add or replace a section."""
        sections = {**self.sections(), name: found}
        call = {**self._head, "sections": sections}
        write_json(self._path, {"calls": {**self._calls(), self._call: call}})

    def _calls(self) -> dict[str, Found]:
        if not self._path.exists():
            return {}
        try:
            calls: dict[str, Found] = json.loads(self._path.read_text())["calls"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._path} is not the evidence of another call; move the file away") from None
        return calls


def section_of(task: Task, call: str, name: str) -> Found:
    """Return the findings of a section on this device; empty if the section has not run."""
    return EvidenceFile(task.out, call, task.device, task.quick).sections().get(name, {})


def run_call(call: str, sections: Sequence[Section], task: Task, only: Sequence[str]) -> bool:
    """Run the named sections of a call in their order; return True if no section failed."""
    evidence = EvidenceFile(task.out, call, task.device, task.quick)
    chosen = [section for section in sections if section.name in only]
    is_whole = True
    for index, section in enumerate(chosen):
        seconds = allowance(chosen[index:], task.seconds_left)
        if seconds < LEAST_SECONDS:
            found: Found = {"failed": ["no time was left"], "passes": False}
        else:
            found = run_section(call, section.name, task, seconds)
        evidence.save(section.name, found)
        is_whole &= "failed" not in found
        print(f"{call} {section.name}: {verdict(found)}", flush=True)
    for name in ("words.txt", "section.json"):
        (task.out / name).unlink(missing_ok=True)
    return is_whole


def verdict(found: Found) -> str:
    """Return the result of a section in words."""
    if "failed" in found:
        result = "FAILED"
    elif "refused" in found:
        result = f"refused: {found['refused']}"
    else:
        passes = found.get("passes")
        result = "done" if passes is None else "passes" if passes else "misses its bar"
    return f"{result} ({found.get('seconds', 0):.0f} s)"


def allowance(waiting: Sequence[Section], seconds_left: float) -> float:
    """Return the seconds of the first waiting section.

    The section gets its own seconds and all spare seconds. If time is short, the sections that must run keep theirs.
    """
    first, *later = waiting
    spare = seconds_left - sum(one.seconds for one in waiting)
    if spare >= 0:
        return first.seconds + spare
    if first.must:
        return min(first.seconds, seconds_left)
    return min(first.seconds, seconds_left - sum(one.seconds for one in later if one.must))


def run_section(call: str, name: str, task: Task, seconds: float) -> Found:
    """Run a section in a new process; return its findings, and its last lines if it failed."""
    words, answer = task.out / "words.txt", task.out / "section.json"
    answer.unlink(missing_ok=True)
    started = time.monotonic()
    with words.open("w") as file:
        process = subprocess.Popen(
            command_of(call, name, task, seconds),
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=environment_of(os.environ),
        )
        try:
            with interrupted_by_sigterm():
                process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_group(process)
            file.write(f"\nstopped after {seconds:.0f} s\n")
        except BaseException:  # Ctrl-C does not reach the section's own session
            end_group(process)
            raise
    found: Found = json.loads(answer.read_text()) if answer.exists() else {}
    found |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "limit": round(seconds, 1),
    }
    if process.returncode != 0 or not answer.exists():
        lines = words.read_text(errors="replace").splitlines()
        found |= {"failed": lines[-LAST_WORDS:] or [f"exit code {process.returncode}"], "passes": False}
    return found


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Context: SIGTERM raises `KeyboardInterrupt`."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command_of(call: str, name: str, task: Task, seconds: float) -> list[str]:
    """Return the command that runs one section."""
    script = ROOT / "tests" / "gpu_evidence.py"
    where = ["--device", task.device, "--out", str(task.out), *(["--quick"] if task.quick else [])]
    return [sys.executable, str(script), "--call", call, "--section", name, "--seconds", str(seconds), *where]


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a section's environment variables, with this checkout on the import path."""
    path = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}
