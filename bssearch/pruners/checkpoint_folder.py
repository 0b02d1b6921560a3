"""A folder of files, one a paused trial, of one study: of this host alone, or shared by several."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bssearch.files import make_guarded_folder

_NAME = re.compile(r"trial-(\d+)\.pt(\..*)?")


@dataclass(frozen=True, slots=True)
class Held:
    """The trials that wait somewhere, and the bytes that each takes there, those that are not whole too."""

    saved: frozenset[int] = frozenset()
    sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return how many bytes all take."""
        return sum(self.sizes.values())

    def without(self, numbers: Collection[int]) -> Held:
        """Return what is held without some trials."""
        left = {number: size for number, size in self.sizes.items() if number not in numbers}
        return Held(self.saved.difference(numbers), left)

    def beside(self, number: int, size: int) -> Held:
        """Return what is held with a trial that is saved."""
        return Held(self.saved | {number}, {**self.sizes, number: size})


def held_of(files: Iterable[tuple[str, int]]) -> Held:
    """Return what files, by name and size, hold; those of other names are no trials."""
    saved, sizes = set[int](), Counter[int]()
    for name, size in files:
        if match := _NAME.fullmatch(name):
            sizes[int(match[1])] += size
            if match[2] is None:
                saved.add(int(match[1]))
    return Held(frozenset(saved), sizes)


class CheckpointFolder:
    """The files of one study. The folder is this user's alone, or a group's (`bssearch.files.make_guarded_folder`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make it; raise `OSError` where it cannot be, or is not to be trusted."""
        make_guarded_folder(self.path)

    def try_out(self) -> None:
        """Write a file and delete it again; raise `OSError` where that cannot be."""
        self.make()
        with tempfile.NamedTemporaryFile(dir=self.path) as file:
            file.write(bytes(2**20))

    def place(self, number: int) -> Path:
        """Return where a trial's file lies."""
        return self.path / f"trial-{number}.pt"

    def look(self) -> Held:
        """Return what lies there now; what others delete meanwhile is not there."""
        found = []
        for file in self._files("trial-*"):
            with suppress(OSError):
                found.append((file.name, file.stat().st_size))
        return held_of(found)

    def remove(self, number: int) -> None:
        """Delete what is kept of a trial, a part of one that was being written, too."""
        for file in self._files(f"{self.place(number).name}*"):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        """Return the files of a pattern; none if another driver deletes the folder meanwhile."""
        with suppress(OSError):
            return [*self.path.glob(pattern)]
        return []

    def close(self) -> None:
        """Delete the folder, where nothing is left in it."""
        with suppress(OSError):
            self.path.rmdir()

    def clear(self) -> None:
        """Delete what is kept of every trial."""
        shutil.rmtree(self.path, ignore_errors=True)
