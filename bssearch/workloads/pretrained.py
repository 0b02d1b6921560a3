"""Pre-trained weights, cached per user.

A file is named by the digest of code, data, PyTorch version and kind of CPU. Other or damaged files are made again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bssearch.errors import UsageError
from bssearch.files import naming, replacing
from bssearch.settings import cache_folder

Weights = Mapping[str, torch.Tensor]

_SEED = 0
_DIGITS = 16  # of the recipe's digest in the file name


def pretrained(name: str, made_of: Sequence[bytes], make: Callable[[], Weights]) -> Weights:
    """Return the weights from ``make``, or from the cache.

    ``made_of``: code, and digests of data, that decide the weights. ``make`` runs in one thread with a fixed seed, so
    that all processes make the same weights.
    """
    recipe = _recipe(made_of)
    path = cache_folder() / "pretrained" / f"{name}-{recipe[:_DIGITS]}.pt"
    found = _read(path, recipe)
    if found is not None:
        return found
    print(f"{name}: trains the weights that its trials begin with, to be kept as {path}", file=sys.stderr)
    with _alone():
        weights = {key: tensor.detach().clone() for key, tensor in make().items()}
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing([path], binary=True) as (file,):
            torch.save({"recipe": recipe, "digest": _digest(weights), "weights": weights}, file)
    except (UsageError, OSError, RuntimeError) as error:  # PyTorch tells a full disk by a RuntimeError
        print(f"{name}: {error}; each process trains the weights again", file=sys.stderr)
    return weights


def _recipe(made_of: Sequence[bytes]) -> str:
    # include PyTorch and the CPU, because the same training differs in its bits elsewhere
    digest = hashlib.sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for part in (Path(__file__).read_bytes(), *made_of):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _read(path: Path, recipe: str) -> Weights | None:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        weights: Weights = found["weights"]
        is_whole = (found["recipe"], found["digest"]) == (recipe, _digest(weights))
    except Exception:  # whatever reading a file raises that may hold anything
        return None
    return weights if is_whole else None


def _digest(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(_SEED)
            yield
    finally:
        torch.set_num_threads(threads)
