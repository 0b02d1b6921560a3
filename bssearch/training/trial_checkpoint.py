"""Saves a paused trial to a file, and starts branches from a longer run's checkpoint.

The file is a zip archive with checksums and no executable content. ``trial.json`` has the trial's identity,
``training.pt`` has tensors and plain values, and ``measured.json`` has measurements.
"""

import io
import json
import pickle
import pickletools
import random
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from bssearch.errors import CheckpointError, NotFoundError, UsageError, require
from bssearch.files import new_guarded_file
from bssearch.records import Branch, TrialRequest
from bssearch.training.clock import Clock
from bssearch.training.computation import Computation
from bssearch.training.course import first_line
from bssearch.training.environment import workload_revision
from bssearch.training.schedule import BranchSchedule, OwnSchedule, RateSchedule
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Workload

CHUNK_BYTES = 16 * 2**20  # bytes per read or write; `on_progress` is called after each chunk

FORMAT = 1

IDENTITY, TRAINING, _MEASURED = "trial.json", "training.pt", "measured.json"

LARGEST_JSON = 64 * 2**20  # bytes of a ledger; a million steps take half of these bytes

LARGEST_PICKLE = 16 * 2**20  # bytes: a tensor takes about 100 bytes

MOST_OPERATIONS = 1_000_000  # operations of a pickle: a tensor takes about 32, and PyTorch reads a million in 1 to 3 s

_ARCHIVE = b"PK\x03\x04"  # start of torch.save's files since PyTorch 1.6

_SETTINGS = (
    *("compile", "channels_last", "fused", "activation_checkpointing", "deterministic"),
    *("ghost_batch_size", "sync_batch_norm"),
)

State = dict[str, Any]  # tensors, numbers, strings, None, and containers of them

Identity = Mapping[str, str]  # the values that decide a trial's steps, by name, as JSON


def identity_of(request: TrialRequest, **others: object) -> dict[str, str]:
    """Return the values that must be equal to resume a trial, from the request and ``others``."""
    fields = {
        "configuration": asdict(request.plan.configuration),
        "seed": request.plan.seed,
        "target": asdict(request.target),
        "eval_every_steps": request.plan.eval_every_steps,
        "threads": request.plan.threads,
        **others,
    }
    return {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}


def identity_with_workload(
    request: TrialRequest, workload: Workload, train_samples: int, computation: Computation
) -> dict[str, str]:
    return identity_of(
        request,
        format=FORMAT,
        workload=[type(workload).__qualname__, workload_revision(workload)],
        train_samples=train_samples,
        device=computation.device.type,
        precision=computation.precision,
        **{name: getattr(computation.settings, name) for name in _SETTINGS},
    )


class Saved(Protocol):
    """A part of a trial with a state to save and restore."""

    def state(self) -> State: ...

    def restore(self, state: State, /) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A `Saved` made of two functions."""

    state: Callable[[], State]
    restore: Callable[[State], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A paused trial's file. Each chunk of a read or write calls ``on_progress``."""

    path: Path
    identity: Identity
    clock: Clock
    on_progress: Callable[[], None]

    def save(self, training: Mapping[str, Saved], measured: Mapping[str, Saved]) -> None:
        """Replace the file, or keep the old file if an error occurs.

        The states of ``measured`` are JSON values.
        """
        part = self.path.with_name(self.path.name + ".part")
        file = new_guarded_file(part)
        archive = zipfile.ZipFile(file, "w")
        try:
            with self.clock.ledger("other"):
                _write_text(archive, IDENTITY, self.identity)
                state = {name: one.state() for name, one in training.items()}
                with archive.open(TRAINING, "w", force_zip64=True) as member:
                    chunks = _InChunks(member, self.on_progress)
                    try:
                        torch.save(state, cast("IO[bytes]", chunks), pickle_module=_BoundedPickle)
                    except Exception as error:
                        raise chunks.error or error from None
            with self.clock.ledger("other"):
                _write_text(archive, _MEASURED, {name: one.state() for name, one in measured.items()})
                archive.close()
                file.close()
                part.replace(self.path)
        finally:
            for opened in (archive, file):
                with suppress(OSError, ValueError):  # a full disk raises again on close
                    opened.close()
            part.unlink(missing_ok=True)

    def restore(self, training: Mapping[str, Saved], measured: Mapping[str, Saved]) -> None:
        """Restore the parts in order.

        Raises `CheckpointError` if the file is missing, damaged, or of another trial.
        """
        with self.clock.ledger("other"):
            states = _read(self.path, self.identity, self.on_progress)
            try:
                for parts, saved in zip((training, measured), states, strict=True):
                    for name in (name for name in parts if name in saved):
                        parts[name].restore(saved[name])
            except Exception as error:
                raise _cannot_resume(self.path, error) from error
        self.on_progress()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of the global random generators on the CPU and on ``device``."""

    device: torch.device

    def state(self) -> State:
        version, values, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, list(values), gauss],
            "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def restore(self, state: State) -> None:
        version, values, gauss = state["python"]
        random.setstate((version, tuple(values), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)


def _read(path: Path, identity: Identity, on_progress: Callable[[], None]) -> tuple[State, State]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_archive(archive)
            texts = (_part(archive, archive.getinfo(name), LARGEST_JSON) for name in (IDENTITY, _MEASURED))
            saved, measured = map(json.loads, texts)
            _check(path, saved, identity)
            content = io.BytesIO()
            with archive.open(TRAINING) as member:
                while chunk := member.read(CHUNK_BYTES):
                    content.write(chunk)
                    on_progress()
        content.seek(0)
        _check_pickle(content)
        return torch.load(content, map_location="cpu", weights_only=True), measured
    except CheckpointError:
        raise
    except Exception as error:
        raise _cannot_resume(path, error) from error


def _part(archive: zipfile.ZipFile, part: zipfile.ZipInfo, most: int) -> bytes:
    _check_size(part.filename, part.file_size, most)
    return archive.read(part)


def _write_text(archive: zipfile.ZipFile, name: str, value: object) -> None:
    text = json.dumps(value, allow_nan=False)
    _check_size(name, len(text), LARGEST_JSON)
    archive.writestr(name, text)


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"{name} has {size:,} bytes; save fewer lists and numbers, at most {most:,} bytes")


def _check_archive(archive: zipfile.ZipFile) -> None:
    # Refuse compressed or overlapping parts, and files whose parts PyTorch would find in another place.
    parts = archive.infolist()
    if sum(one.file_size for one in parts) > archive.start_dir:
        raise ValueError("the parts unpack to more bytes than the file has")
    if not parts or min(one.header_offset for one in parts) > 0:
        raise ValueError("the first part is not at the start of the file")


def _check_pickle(file: IO[bytes]) -> None:
    # Refuse a file of `torch.save` that takes minutes to read; rewind the file.
    if file.read(len(_ARCHIVE)) != _ARCHIVE:  # PyTorch would read the file in its older format
        raise ValueError("torch.save of PyTorch 1.6 or later did not write this file")
    with zipfile.ZipFile(file) as archive:
        _check_archive(archive)
        for one in archive.infolist():
            if one.filename.lower().endswith("data.pkl"):
                _check_program(_part(archive, one, LARGEST_PICKLE))
    file.seek(0)


def _check_program(program: bytes) -> None:
    _check_size("data.pkl", len(program), LARGEST_PICKLE)
    operations = islice(pickletools.genops(program), MOST_OPERATIONS + 1)
    if sum(1 for _ in operations) > MOST_OPERATIONS:
        raise ValueError(f"data.pkl has more than {MOST_OPERATIONS:,} operations; save fewer lists and numbers")


class _BoundedPickle:
    # Replaces the module `pickle` in `torch.save`; refuses states that `_check_pickle` would refuse.

    class Pickler(pickle.Pickler):
        def __init__(self, file: io.BytesIO, protocol: int) -> None:
            super().__init__(file, protocol)
            self._file = file

        def dump(self, state: object) -> None:
            super().dump(state)
            _check_program(self._file.getvalue())


def _cannot_resume(path: Path, error: Exception) -> CheckpointError:
    what = "the file does not exist" if isinstance(error, FileNotFoundError) else first_line(error)
    return CheckpointError(f"the trial cannot resume from the checkpoint {path}: {what}")


def _check(path: Path, saved: Mapping[str, str], wanted: Identity) -> None:
    for name in {**wanted, **saved}:
        require(
            saved.get(name) == wanted.get(name),
            f"the checkpoint {path} belongs to another trial: "
            f"{name} is {saved.get(name)} in the checkpoint, {wanted.get(name)} in the trial",
            error=CheckpointError,
        )


@dataclass(slots=True)
class _InChunks:
    # A file written in chunks, with progress; ``error`` keeps the OSError that PyTorch hides.

    file: IO[bytes]
    on_progress: Callable[[], None]
    error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                self.file.write(view[start : start + CHUNK_BYTES])
                self.on_progress()
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def flush(self) -> None:
        self.file.flush()


FORMAT_HINT = (
    'write a checkpoint with torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), '
    '"step": step, "samples": samples}, path)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A checkpoint's content, on the CPU. Missing parts are None.

    ``model`` maps names to tensors. ``optimizer`` is a state_dict or a list of state_dicts. ``average`` has the
    averaged weights of a bssearch trial.
    """

    model: Mapping[str, Any]
    optimizer: Any = None
    average: list[torch.Tensor] | None = None
    step: int | None = None
    samples: int | None = None

    @property
    def learning_rate(self) -> float | None:
        """The largest saved learning rate, if any."""
        states = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        groups = [group for one in states if isinstance(one, Mapping) for group in one.get("param_groups") or ()]
        rates = [group.get("lr") for group in groups if isinstance(group, Mapping)]
        return max((float(rate) for rate in rates if isinstance(rate, int | float | torch.Tensor)), default=None)

    def samples_at(self, batch_size: int) -> int | None:
        return self.samples if self.samples is not None or self.step is None else self.step * batch_size


def read_checkpoint(path: Path) -> SavedRun:
    """Read a checkpoint. Raises `NotFoundError` if the file is missing, and `UsageError` if the file is unusable."""
    require(path.exists(), f"checkpoint {path} does not exist; check the path", error=NotFoundError)
    saved = _of_trial(path) or _of_run(path, _load(path))
    for name, value in saved.model.items():
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not bool((value.float() if value.element_size() == 1 else value).isfinite().all())
        ):
            raise UsageError(f"checkpoint {path}: {name} has values that are not finite; choose an earlier checkpoint")
    return saved


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            _check_pickle(file)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise UsageError(
            f"checkpoint {path} cannot be read as tensors and plain values: {first_line(error)}", hint=FORMAT_HINT
        ) from error


def _of_run(path: Path, content: Any) -> SavedRun:
    require(
        isinstance(content, Mapping),
        f"checkpoint {path} is a {type(content).__name__}; expected a dict",
        hint=FORMAT_HINT,
    )
    model = content.get("model")
    if isinstance(model, Mapping):
        return SavedRun(
            model=model,
            optimizer=content.get("optimizer"),
            step=_count(path, content, "step"),
            samples=_count(path, content, "samples"),
        )
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return SavedRun(model=content)
    found = ", ".join(sorted(str(name) for name in content)[:8]) or "no entries"
    raise UsageError(
        f"checkpoint {path} has {found}; expected 'model' with a state_dict, or a state_dict", hint=FORMAT_HINT
    )


def _of_trial(path: Path) -> SavedRun | None:
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if not {IDENTITY, TRAINING} <= set(archive.namelist()):
                return None
            _check_archive(archive)
            with archive.open(TRAINING) as member:
                _check_pickle(member)
                training = torch.load(member, map_location="cpu", weights_only=True)
        trainer = training["trainer"]
        return SavedRun(
            model={**trainer["model"], **trainer["extra"]},
            optimizer=trainer["optimizer"],
            average=trainer["average"],
            step=trainer["steps"],
            samples=trainer["growth"]["samples"],
        )
    except Exception as error:
        raise UsageError(
            f"the trial checkpoint {path} cannot be read: {first_line(error)}", hint="choose another checkpoint"
        ) from error


def _count(path: Path, content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if value is None or (type(value) is int and value >= 0):
        return value
    raise UsageError(f"checkpoint {path}: {name} = {value!r} must be a whole number >= 0")


def continue_from(trainer: Trainer, branch: Branch, batch_size: int) -> None:
    """Load a branch's checkpoint and schedule, but keep the trainer's data order and optimizer options."""
    path = Path(branch.checkpoint)
    saved = read_checkpoint(path)
    load_weights(trainer.model, saved.model, path)
    try:
        trainer.updates.take_over(saved.optimizer, saved.average)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the optimizer state of checkpoint {path} does not fit the study's optimizer: {error}",
            hint="omit 'optimizer' from the file to restart the optimizer, or name the run's optimizer in the spec",
        ) from error
    trainer.schedule = branch_schedule(trainer.schedule, branch, batch_size)


def branch_schedule(run: RateSchedule, branch: Branch, batch_size: int) -> BranchSchedule:
    """Return a branch's part of the run's schedule.

    If the checkpoint's position is unknown, a constant schedule without a horizon starts after the warmup. Other
    schedules then raise `UsageError`.
    """
    if branch.start_samples is None:
        if isinstance(run, OwnSchedule) or run.horizon_steps is not None:
            raise UsageError(
                f"checkpoint {branch.checkpoint} has neither step nor samples, but the learning rate depends on the "
                "position",
                hint="pass the number of samples before each checkpoint with --at",
            )
        offset = run.warmup_steps
    else:
        offset = round(branch.start_samples / batch_size)
    return BranchSchedule(
        run=run,
        offset=offset,
        horizon_steps=branch.samples // batch_size,
        rise=round(branch.rise_samples / batch_size),
    )


MODEL_HINT = "choose a checkpoint of the study's model, or let build_model() build the checkpoint's model"


@torch.no_grad()
def load_weights(model: nn.Module, saved: Mapping[str, Any], path: Path) -> None:
    """Copy saved weights into a model. ``saved`` may have buffers that the model's state_dict lacks."""
    own = model.state_dict()
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            continue
        found = saved.get(name)
        if not isinstance(found, torch.Tensor) or found.shape != value.shape:
            there = f"of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else "missing"
            raise UsageError(
                f"checkpoint {path} belongs to another model: {name} is {there}; expected shape {tuple(value.shape)}",
                hint=MODEL_HINT,
            )
    buffers = dict(model.named_buffers())
    if unknown := [name for name in saved if name not in own and name not in buffers]:
        raise UsageError(
            f"checkpoint {path} belongs to another model: the study's model lacks {unknown[0]}", hint=MODEL_HINT
        )
    model.load_state_dict({name: value for name, value in saved.items() if name in own})
