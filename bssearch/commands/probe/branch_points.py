"""The checkpoints of a run from which it branches, in the order of training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bssearch.errors import NotFoundError, UsageError
from bssearch.spec import StudySpec

MOST_SAMPLES = 2**63 - 1
"""The largest number that a database keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """A checkpoint: its file, the digest of its content, and the samples that the run had seen there.

    ``samples`` is None where nobody says; ``has_optimizer`` is None where only the user's own program reads the file.
    ``learning_rate`` is the run's when it was saved, None where it does not say.
    """

    path: Path
    digest: str
    samples: int | None
    step: int | None
    has_optimizer: bool | None = None
    learning_rate: float | None = None

    @property
    def where(self) -> str:
        """Return the place in the run, in words."""
        return self.path.name if self.samples is None else f"after {self.samples} samples ({self.path.name})"


def branch_points(spec: StudySpec, paths: Sequence[Path], at: Sequence[int] | None) -> list[BranchPoint]:
    """Return the checkpoints in the order of training.

    ``at`` says the samples at each, in the order of ``paths``, in the place of what the files say. Raises what
    `bssearch.training.branch.read_checkpoint` does, and `UsageError` where the position is needed and not
    known, or is that of another checkpoint too.
    """
    if at and len(at) != len(paths):
        raise UsageError(f"--at is given {len(at)} times; it must be once for each of the {len(paths)} --checkpoint")
    points = [_point(spec, path, at[index] if at else None) for index, path in enumerate(paths)]
    for point in points:
        _check_known(spec, point, several=len(points) > 1)
    ordered = sorted(points, key=lambda point: point.samples or 0)
    for before, after in itertools.pairwise(ordered):
        if before.samples == after.samples:
            raise UsageError(f"checkpoints {before.path} and {after.path} are both after {after.samples} samples")
    return ordered


def check_room(spec: StudySpec, points: Sequence[BranchPoint], samples: int) -> None:
    """Raise `UsageError` where a branch of so many samples would go beyond the horizon of the spec's schedule."""
    horizon = _horizon(spec)
    for point in points:
        if horizon is not None and point.samples is not None and point.samples + samples > horizon:
            raise UsageError(
                f"checkpoint {point.path}: {point.samples} samples and {samples} of a branch must be <= {horizon:g}, "
                "schedule.horizon_samples, where the learning rate ends"
            )


def _point(spec: StudySpec, path: Path, at: int | None) -> BranchPoint:
    batch_size = spec.default.batch_size
    if not path.exists():
        raise NotFoundError(f"checkpoint {path}: there is no such file")
    if spec.is_program:
        step = None if at is None else at // batch_size
        return BranchPoint(path=path, digest=_digest(path), samples=at, step=step)
    from bssearch.training.branch import read_checkpoint

    saved = read_checkpoint(path)
    samples = saved.samples_at(batch_size) if at is None else at
    step = saved.step if saved.step is not None or samples is None else samples // batch_size
    return BranchPoint(
        path=path,
        digest=_digest(path),
        samples=samples,
        step=step,
        has_optimizer=saved.optimizer is not None,
        learning_rate=saved.learning_rate,
    )


def _check_known(spec: StudySpec, point: BranchPoint, *, several: bool) -> None:
    if point.samples is not None and point.samples > MOST_SAMPLES:
        raise UsageError(f"checkpoint {point.path}: {point.samples} samples must be <= {MOST_SAMPLES}")
    if point.samples is None and (several or _horizon(spec) is not None):
        why = "several checkpoints are told apart by them" if several else "the learning rate's schedule goes by them"
        raise UsageError(
            f"checkpoint {point.path} says neither step nor samples: {why}",
            hint="--at says the samples before each checkpoint, or save them beside the model",
        )


def _horizon(spec: StudySpec) -> float | None:
    """Return the samples at which the schedule of bssearch ends; a program's own is its own."""
    horizon = spec.default_configuration.parameters.get("horizon_samples")
    return None if horizon is None or spec.is_program else float(horizon)


def _digest(path: Path) -> str:
    """Return a digest of a file's content; of a folder, of the names, sizes and times of its files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    told = [
        (str(one.relative_to(path)), one.stat().st_size, one.stat().st_mtime_ns)
        for one in sorted(path.rglob("*"))
        if one.is_file()
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()
