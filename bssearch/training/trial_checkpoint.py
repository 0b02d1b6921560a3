"""A paused trial as a file.

A zip archive, with a checksum for each part and no executable content: ``trial.json`` (identity), ``training.pt``
(tensors and plain values), and ``measured.json`` (ledgers, with the time of writing). State outside parameters, buffers
and ``get_extra_state`` is not saved.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import torch

from bssearch.errors import CheckpointError
from bssearch.files import new_guarded_file
from bssearch.records import TrialRequest
from bssearch.training.clock import Clock
from bssearch.training.computation import Computation
from bssearch.training.course import first_line
from bssearch.training.environment import workload_revision
from bssearch.workloads.base import Workload

CHUNK_BYTES = 16 * 2**20  # bytes per read or write; progress is reported after each

FORMAT = 1

IDENTITY, TRAINING, _MEASURED = "trial.json", "training.pt", "measured.json"

_SETTINGS = ("compile", "channels_last", "fused", "activation_checkpointing", "deterministic", "ghost_batch_size")

State = dict[str, Any]  # tensors, numbers, strings, None, and containers of them

Identity = Mapping[str, str]  # the values that decide a trial's steps, by name, as JSON


def identity_of(
    request: TrialRequest, workload: Workload, train_samples: int, computation: Computation
) -> dict[str, str]:
    """Values that must be equal to resume a trial."""
    fields = {
        "format": FORMAT,
        "configuration": asdict(request.plan.configuration),
        "seed": request.plan.seed,
        "target": asdict(request.target),
        "eval_every_steps": request.plan.eval_every_steps,
        "threads": request.plan.threads,
        "workload": [type(workload).__qualname__, workload_revision(workload)],
        "train_samples": train_samples,
        "device": computation.device.type,
        "precision": computation.precision,
        **{name: getattr(computation.settings, name) for name in _SETTINGS},
    }
    return {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}


class Saved(Protocol):
    """Has a state to save and restore."""

    def state(self) -> State:
        """The state."""

    def restore(self, state: State, /) -> None:
        """Restore the state."""


@dataclass(frozen=True, slots=True)
class Part:
    """A `Saved` made of two functions."""

    state: Callable[[], State]
    restore: Callable[[State], None]


class Checkpoint:
    """A trial's file; calls ``on_progress`` per chunk."""

    def __init__(self, path: Path, identity: Identity, clock: Clock, on_progress: Callable[[], None]) -> None:
        self._path = path
        self._identity = identity
        self._clock = clock
        self._on_progress = on_progress

    def save(self, training: Mapping[str, Saved], measured: Mapping[str, Saved]) -> None:
        """Replace the file or, on failure, leave it; ``measured`` states are JSON."""
        part = self._path.with_name(self._path.name + ".part")
        file = new_guarded_file(part)
        archive = zipfile.ZipFile(file, "w")
        try:
            with self._clock.ledger("other"):
                archive.writestr(IDENTITY, json.dumps(self._identity))
                self._write(archive, {name: one.state() for name, one in training.items()})
            with self._clock.ledger("other"):
                states = {name: one.state() for name, one in measured.items()}
                archive.writestr(_MEASURED, json.dumps(states, allow_nan=False))
                archive.close()
                file.close()
                part.replace(self._path)
        finally:
            for opened in (archive, file):
                with suppress(OSError, ValueError):  # a full disk raises again on close
                    opened.close()
            part.unlink(missing_ok=True)

    def _write(self, archive: zipfile.ZipFile, state: State) -> None:
        with archive.open(TRAINING, "w", force_zip64=True) as member:
            file = _InChunks(member, self._on_progress)
            try:
                torch.save(state, cast("IO[bytes]", file))
            except Exception as error:
                raise file.error or error from None

    def restore(self, training: Mapping[str, Saved], measured: Mapping[str, Saved]) -> None:
        """Restore the parts in order; `CheckpointError` if missing, damaged, or another trial's."""
        with self._clock.ledger("other"):
            states = _read(self._path, self._identity, self._on_progress)
            try:
                for parts, saved in zip((training, measured), states, strict=True):
                    for name in (name for name in parts if name in saved):
                        parts[name].restore(saved[name])
            except Exception as error:
                raise _cannot_go_on(self._path, error) from error
        self._on_progress()


class RandomState:
    """States of all global generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self) -> State:
        """The states."""
        version, values, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, list(values), gauss],
            "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }

    def restore(self, state: State) -> None:
        """Restore the states."""
        version, values, gauss = state["python"]
        random.setstate((version, tuple(values), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)


def _read(path: Path, identity: Identity, on_progress: Callable[[], None]) -> tuple[State, State]:
    try:
        with zipfile.ZipFile(path) as archive:
            saved = json.loads(archive.read(IDENTITY))
            measured = json.loads(archive.read(_MEASURED))
            _check(path, saved, identity)
            with archive.open(TRAINING) as member:
                content = _whole(member, on_progress)
        return torch.load(content, map_location="cpu", weights_only=True), measured
    except CheckpointError:
        raise
    except Exception as error:
        raise _cannot_go_on(path, error) from error


def _cannot_go_on(path: Path, error: Exception) -> CheckpointError:
    what = "it is not there" if isinstance(error, FileNotFoundError) else first_line(error)
    return CheckpointError(f"the trial cannot go on from its checkpoint {path}: {what}")


def _check(path: Path, saved: Mapping[str, str], wanted: Identity) -> None:
    for name in {**wanted, **saved}:
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"the checkpoint {path} is that of another trial: "
                f"its {name} is {saved.get(name)}, this trial's is {wanted.get(name)}"
            )


def _whole(member: IO[bytes], on_progress: Callable[[], None]) -> io.BytesIO:
    content = io.BytesIO()
    while chunk := member.read(CHUNK_BYTES):
        content.write(chunk)
        on_progress()
    content.seek(0)
    return content


class _InChunks:
    """Reports progress; ``error`` keeps the OSError that PyTorch hides."""

    def __init__(self, file: IO[bytes], on_progress: Callable[[], None]) -> None:
        self._file = file
        self._on_progress = on_progress
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                self._file.write(view[start : start + CHUNK_BYTES])
                self._on_progress()
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def flush(self) -> None:
        self._file.flush()
