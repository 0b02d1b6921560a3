"""Weights that a workload makes before its study begins, kept in the user's cache so that they are made once.

A file is named after its recipe, the digest of all that makes the weights: another version of PyTorch, another kind of
CPU or a changed line of code is another recipe. What is not the file of its recipe, whole, is made anew.
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
_DIGITS = 16
"""Digits of the recipe's digest in the name of its file."""


def pretrained(name: str, made_of: Sequence[bytes], make: Callable[[], Weights]) -> Weights:
    """Return the weights that ``make`` makes, from the file of a workload's ``name`` where it has been kept.

    ``made_of`` is all that decides the weights besides PyTorch and the kind of CPU: the code, and digests of the data.
    ``make`` runs in one thread and from a seed of its own, and leaves both as they were. Processes that make the same
    weights at once do so each for itself, and keep the same. Where nothing can be kept that is said on stderr, which is
    the log of a worker.
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
        print(f"{name}: {error}; each process trains them anew", file=sys.stderr)
    return weights


def _recipe(made_of: Sequence[bytes]) -> str:
    """Return the digest of all that makes the weights: the same training differs in its bits elsewhere."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for part in (Path(__file__).read_bytes(), *made_of):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _read(path: Path, recipe: str) -> Weights | None:
    """Return the weights of a file; None where it is not there, damaged, or that of another recipe."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        weights: Weights = found["weights"]
        is_whole = (found["recipe"], found["digest"]) == (recipe, _digest(weights))
    except Exception:  # whatever reading a file raises that may hold anything
        return None
    return weights if is_whole else None


def _digest(weights: Weights) -> str:
    """Return the digest of weights: their names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _alone() -> Iterator[None]:
    """Compute in one thread and from a seed of its own, whatever the process has been set to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(_SEED)
            yield
    finally:
        torch.set_num_threads(threads)
