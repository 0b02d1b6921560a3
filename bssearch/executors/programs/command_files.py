"""The files that a command names: the code by whose content it is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from bssearch.executors.base import Program

LARGEST_FILE = 2**26
"""Bytes of a file whose content counts as code: a choice; of a larger one, of data, the size does."""

LONGEST_NAME = 1000
"""Characters of what may be a file's name: a choice."""


def revision_of(program: Program, folder: Path) -> str:
    """Return 12 hex digits of the SHA-256 of a command, how it is read, and the files in the folder that it names."""
    told = hashlib.sha256("\0".join(program.command).encode())
    told.update(repr(sorted(program.report.items())).encode())
    for path in files_of(program.command, folder).values():
        if path.resolve().is_relative_to(folder.resolve()):  # elsewhere are interpreters, which differ by machine
            told.update(digest_of(path).encode())
    return told.hexdigest()[:12]


def files_of(command: Sequence[str], folder: Path) -> dict[str, Path]:
    """Return the files that a command names, as arguments or behind the = of one, by what it names them."""
    names = [
        name for token in command for name in (token, token.partition("=")[2]) if name and len(name) <= LONGEST_NAME
    ]
    return {name: folder / name for name in names if _is_file(folder / name)}


def digest_of(path: Path) -> str:
    """Return the digest of a file's content; of a file larger than `LARGEST_FILE` of its size."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        return hashlib.sha256(f"{size} bytes".encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
