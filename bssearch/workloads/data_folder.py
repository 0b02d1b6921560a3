"""Finds the four files of Fashion-MNIST, in this order:

1. only the folder in ``BSSEARCH_DATA_DIR``, if set: itself, its ``fashion-mnist`` or ``FashionMNIST/raw`` (torchvision)
2. Debian's package ``dataset-fashion-mnist``
3. an earlier download in ``$XDG_CACHE_HOME/bssearch``, by default ``~/.cache/bssearch``
4. a download into it with torchvision
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import math
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bssearch.errors import WorkloadError
from bssearch.settings import DATA_DIR_VARIABLE, cache_folder

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
WAYS = f"""any of these brings them:
  apt-get install dataset-fashion-mnist    (Debian, Ubuntu)
  pip install torchvision                  (downloads 30 MB at the first use)
  bssearch run ... --data-dir DIR          (or {DATA_DIR_VARIABLE}=DIR: a folder with {FILES[0]}.gz and the others)"""


def find_fashion_mnist(debian_folder: Path = DEBIAN_FOLDER) -> Mapping[str, Path]:
    """Find the four files, plain or ``.gz``, or download them; `WorkloadError` if a file is missing."""
    given = os.environ.get(DATA_DIR_VARIABLE)
    if given:
        root = Path(given).expanduser()
        if not root.is_dir():
            raise WorkloadError(f"there is no folder {given}, which --data-dir or {DATA_DIR_VARIABLE} names; {WAYS}")
        folders = [root, root / "fashion-mnist", root / "FashionMNIST" / "raw"]
        found = _first(folders)
        if found is None:
            raise WorkloadError(
                f"the folder that --data-dir or {DATA_DIR_VARIABLE} names holds no Fashion-MNIST: no {FILES[0]}, with "
                f"or without .gz, in {', '.join(map(str, folders))}; without that folder, {debian_folder} is "
                f"searched; {WAYS}"
            )
        return found
    cache = cache_folder() / "fashion-mnist"
    return _first([debian_folder, cache]) or _downloaded(cache)


def _first(folders: list[Path]) -> dict[str, Path] | None:
    for folder in folders:
        found = {name: path for name in FILES if (path := _plain_or_compressed(folder / name))}
        if found:
            missing = [name for name in FILES if name not in found]
            if missing:
                raise WorkloadError(f"{folder} lacks {' and '.join(missing)}, with or without .gz; {WAYS}")
            return found
    return None


def _plain_or_compressed(plain: Path) -> Path | None:
    return next((path for path in (plain, plain.with_name(f"{plain.name}.gz")) if path.is_file()), None)


def _downloaded(folder: Path) -> dict[str, Path]:
    # download beside the folder, then rename, so that no process sees half a download
    if importlib.util.find_spec("torchvision") is None:
        raise WorkloadError(f"the images of Fashion-MNIST are not on this machine; {WAYS}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as temporary:
            importlib.import_module("torchvision.datasets").FashionMNIST(temporary, download=True)
            try:
                Path(temporary, "FashionMNIST", "raw").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
    except Exception as error:  # whatever torchvision and the network raise
        raise WorkloadError(
            f"the images of Fashion-MNIST are not on this machine, and torchvision could not download them into "
            f"{folder}: {type(error).__name__}: {error}; {WAYS}"
        ) from error
    found = _first([folder])
    if found is None:
        raise WorkloadError(f"torchvision downloaded no file named {FILES[0]} into {folder}; {WAYS}")
    return found


# idx files (MNIST's format): two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension
# as four big-endian bytes, then the values in C order (LeCun, Cortes, Burges, "The MNIST database", 1998).

_UNSIGNED_BYTE = 8


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file's read-only uint8 values; `WorkloadError` for another format."""
    content = _content(path)
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if content[:4] != magic:
        raise WorkloadError(
            f"{path} starts with the bytes {content[:4].hex(' ') or '(none)'}; "
            f"an idx file of bytes in {dimensions} dimension{'s' * (dimensions > 1)} starts with {magic.hex(' ')}"
        )
    header_bytes = len(magic) + 4 * dimensions
    if len(content) < header_bytes:
        raise WorkloadError(f"{path} is {len(content)} bytes long; its header alone takes {header_bytes}")
    shape = tuple(np.frombuffer(content, dtype=">u4", count=dimensions, offset=len(magic)).tolist())
    found, expected = len(content) - header_bytes, math.prod(shape)
    if found != expected:
        raise WorkloadError(
            f"{path} holds {found} bytes after its header, which says {' × '.join(map(str, shape))} = {expected}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except EOFError as error:
        raise WorkloadError(
            f"{path} ends early, after {len(content)} bytes: the gzip stream is not complete"
        ) from error
    except (OSError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
