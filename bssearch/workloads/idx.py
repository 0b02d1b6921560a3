"""Reads idx files of bytes, the format of MNIST and its kin, plain or compressed by gzip.

Two zero bytes, the type (8: unsigned byte), the number of dimensions; each dimension as four bytes, the most
significant first; then the values, the last dimension running fastest (Y. LeCun, C. Cortes, C. Burges, "The MNIST
database of handwritten digits", 1998).
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from bssearch.errors import WorkloadError

_UNSIGNED_BYTE = 8


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the values of an idx file of ``dimensions`` dimensions, a read-only array of uint8.

    Raises `WorkloadError`, naming the file and what is wrong with it, where it cannot be read or is something else.
    """
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
