"""Fashion-MNIST: 70,000 images (28 × 28) of clothes in ten classes.

Source: Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747. bssearch looks for the four files in this order:

1. if ``BSSEARCH_DATA_DIR`` is set, only in this folder and its ``fashion-mnist`` and ``FashionMNIST/raw``
2. in Debian's package ``dataset-fashion-mnist``
3. as an earlier download in ``$XDG_CACHE_HOME/bssearch``, by default ``~/.cache/bssearch``
4. as a new download into the cache folder with torchvision
"""

import gzip
import importlib
import importlib.util
import itertools
import math
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import WorkloadError, require
from bssearch.records.text import plural
from bssearch.settings import DATA_DIR_VARIABLE, cache_folder
from bssearch.workloads.base import check_whole
from bssearch.workloads.data import Data, Part, evenly, stratified_order
from bssearch.workloads.ten_classes import CLASSES, TenClasses

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
WAYS = f"""get the images in one of these ways:
  apt-get install dataset-fashion-mnist    (Debian, Ubuntu)
  pip install torchvision                  (downloads 30 MB at the first use)
  bssearch run ... --data-dir DIR          (or {DATA_DIR_VARIABLE}=DIR: with {FILES[0]}.gz and the other files)"""


def find_fashion_mnist(debian_folder: Path = DEBIAN_FOLDER) -> Mapping[str, Path]:
    """Find or download the four files, plain or ``.gz``."""
    given = os.environ.get(DATA_DIR_VARIABLE)
    if given:
        root = Path(given).expanduser()
        folders = [root, root / "fashion-mnist", root / "FashionMNIST" / "raw"]
        found = _first(folders)
        require(
            found,
            f"the folder of --data-dir or {DATA_DIR_VARIABLE} has no {FILES[0]}, with or without .gz, in "
            f"{', '.join(map(str, folders))}; without --data-dir and {DATA_DIR_VARIABLE}, bssearch searches "
            f"{debian_folder}; {WAYS}",
            error=WorkloadError,
        )
        return found
    cache = cache_folder() / "fashion-mnist"
    return _first([debian_folder, cache]) or _downloaded(cache)


def _first(folders: list[Path]) -> dict[str, Path]:
    for folder in folders:
        places = [(name, folder / f"{name}{ending}") for name in FILES for ending in (".gz", "")]
        found = {name: path for name, path in places if path.is_file()}
        if found:
            missing = [name for name in FILES if name not in found]
            require(
                not missing, f"{folder} lacks {' and '.join(missing)}, with or without .gz; {WAYS}", error=WorkloadError
            )
            return found
    return {}


def _downloaded(folder: Path) -> dict[str, Path]:
    # download beside the folder, then rename, so that no process sees half a download
    require(
        importlib.util.find_spec("torchvision"),
        f"the images of Fashion-MNIST are not on this machine; {WAYS}",
        error=WorkloadError,
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as temporary:
            importlib.import_module("torchvision.datasets").FashionMNIST(temporary, download=True)
            try:
                Path(temporary, "FashionMNIST", "raw").rename(folder)
            except OSError:
                if not folder.is_dir():  # if the folder exists, another process was faster
                    raise
    except Exception as error:  # torchvision and the network may raise anything
        raise WorkloadError(
            f"the images of Fashion-MNIST are not on this machine, and torchvision could not download them into "
            f"{folder}: {type(error).__name__}: {error}; {WAYS}"
        ) from error
    return _first([folder])


# idx files (MNIST's format): two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension
# as four big-endian bytes, then the values in C order (LeCun, Cortes, Burges, "The MNIST database", 1998).


REPLACE = "replace the file with the original of Fashion-MNIST, or delete the whole folder if bssearch downloaded it"


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return an idx file's read-only uint8 values."""
    content = _content(path)
    magic = bytes([0, 0, 8, dimensions])
    require(
        content[:4] == magic,
        f"{path} starts with the bytes {content[:4].hex(' ') or '(none)'}; "
        f"an idx file of bytes in {plural(dimensions, 'dimension')} starts with {magic.hex(' ')}",
        hint=REPLACE,
        error=WorkloadError,
    )
    header_bytes = len(magic) + 4 * dimensions
    require(
        len(content) >= header_bytes,
        f"{path} has {len(content)} bytes; the header alone has {header_bytes}",
        hint=REPLACE,
        error=WorkloadError,
    )
    shape = tuple(np.frombuffer(content, dtype=">u4", count=dimensions, offset=len(magic)).tolist())
    found, expected = len(content) - header_bytes, math.prod(shape)
    require(
        found == expected,
        f"{path} has {found} bytes after the header; the header requires {' × '.join(map(str, shape))} = {expected}",
        hint=REPLACE,
        error=WorkloadError,
    )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except EOFError as error:
        raise WorkloadError(
            f"{path} ends early, after {len(content)} bytes: the gzip stream is not complete", hint=REPLACE
        ) from error
    except (OSError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}", hint=REPLACE) from error


SIDE = 28
HELD_OUT = 5000  # number of images outside training, even if fewer images validate

MODELS = ("resnet", "mlp")
NORMS = ("group", "batch")

SHIFT = 2  # `augment` moves an image by at most this number of pixels

_STAGES = (32, 64, 96)
_GROUPS = 8
_HIDDEN = 256
_LABELS_CRC32 = {"train": 0x2ED6E46A, "t10k": 0x242BC73F}


class FashionMnist(TenClasses):
    """Classify the images; 55,000 train, up to 5,000 validate, and 10,000 test, in a fixed stratified split.

    ``model`` is ``resnet`` or ``mlp``. ``norm`` of the resnet is ``group`` (default) or ``batch``; with ``batch``,
    accumulation changes the result. ``augment`` moves training images by up to two pixels and mirrors half of them.
    """

    def __init__(
        self,
        model: str = "resnet",
        norm: str | None = None,
        validation_samples: int = HELD_OUT,
        augment: bool = False,
    ) -> None:
        if model not in MODELS:
            raise ValueError(f"model = {model!r} must be one of {', '.join(MODELS)}")
        if norm is not None and norm not in NORMS:
            raise ValueError(f"norm = {norm!r} must be one of {', '.join(NORMS)}")
        if norm is not None and model == "mlp":
            raise ValueError(f"norm = {norm!r} has no effect on model = 'mlp', which has no normalisation; omit norm")
        if type(augment) is not bool:
            raise ValueError(f"augment = {augment!r} must be true or false")
        self.model = model
        self.norm = norm or "group"
        self.validation_samples = validation_samples
        check_whole(self, "validation_samples", high=HELD_OUT)
        self._augments = augment

    def load(self, device: torch.device) -> Data:
        """Return float32 images (samples, 1, 28, 28), standardised over the training part, and int64 classes."""
        files = find_fashion_mnist()
        images, labels = read_images(files, "train")
        test_images, test_labels = read_images(files, "t10k")
        train, validation = split(labels, self.validation_samples)
        mean, deviation = _moments(images[train])

        def part(images: np.ndarray, labels: np.ndarray) -> Part:
            pixels = torch.from_numpy(images).to(device).to(torch.float32).sub_(mean).div_(deviation)
            return Part(pixels.unsqueeze(1), torch.from_numpy(labels.astype(np.int64)).to(device))

        return Data(
            train=part(images[train], labels[train]),
            validation=part(images[validation], labels[validation]),
            test=part(test_images, test_labels),
        )

    def build_model(self, *, dropout: float, norm_momentum: float = 0.1) -> nn.Module:
        """Build a fresh model; ``norm_momentum`` is batch normalisation's momentum."""
        model = perceptron(dropout) if self.model == "mlp" else residual_network(dropout, self.norm)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = norm_momentum
        return model

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return [module for module in model.modules() if isinstance(module, ResidualBlock)]

    def augment(self, inputs: torch.Tensor, *, strength: float | None = None) -> torch.Tensor:
        """Apply `moved_and_mirrored` to a share ``strength`` of the images (default: 1 if ``augment``, else 0)."""
        share = float(self._augments) if strength is None else strength
        if share in (0.0, 1.0):
            return moved_and_mirrored(inputs) if share else inputs
        changed = torch.rand(len(inputs), 1, 1, 1, device=inputs.device) < share
        return torch.where(changed, moved_and_mirrored(inputs), inputs)


def read_images(files: Mapping[str, Path], part: Literal["train", "t10k"]) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 images (samples, 28, 28) and classes (samples,)."""
    images_file, labels_file = files[f"{part}-images-idx3-ubyte"], files[f"{part}-labels-idx1-ubyte"]
    labels = read_idx(labels_file, dimensions=1)
    if len(labels) and labels.max() >= CLASSES:
        row = int(np.argmax(labels >= CLASSES))
        raise WorkloadError(f"{labels_file}: label {row} is {labels[row]}; labels must be < {CLASSES}", hint=REPLACE)
    images = read_idx(images_file, dimensions=3)
    count, height, width = images.shape
    require(
        height == width == SIDE,
        f"{images_file} has images of {height} × {width} pixels; expected {SIDE} × {SIDE}",
        hint=REPLACE,
        error=WorkloadError,
    )
    require(
        count == len(labels),
        f"{images_file} has {count} images, but {labels_file} has {len(labels)} labels",
        hint=REPLACE,
        error=WorkloadError,
    )
    checksum = zlib.crc32(labels.tobytes())
    require(
        checksum == _LABELS_CRC32[part],
        f"{labels_file} does not have Fashion-MNIST's labels: CRC-32 {checksum:08x}, expected "
        f"{_LABELS_CRC32[part]:08x}; the file may be MNIST's, whose files have the same names",
        hint=REPLACE,
        error=WorkloadError,
    )
    return images.copy(), labels


def split(labels: np.ndarray, validation_samples: int) -> tuple[np.ndarray, np.ndarray]:
    held_out = evenly(stratified_order(labels), HELD_OUT)
    return np.setdiff1d(np.arange(len(labels)), held_out), evenly(held_out, validation_samples)


def _moments(images: np.ndarray) -> tuple[float, float]:
    # sums of whole numbers are exact in float64, so that the moments are equal on every machine
    mean = float(images.mean(dtype=np.float64))
    return mean, math.sqrt(np.square(images, dtype=np.uint16).mean(dtype=np.float64) - mean**2)


def moved_and_mirrored(images: torch.Tensor) -> torch.Tensor:
    """Move images (samples, 1, height, width) by up to `SHIFT` pixels; mirror half of the images.

    The augmentation follows He et al. 2016 (arXiv 1512.03385, § 4.2), but repeats the border pixels.
    """
    samples, _, height, width = images.shape
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2, samples, 1), device=images.device)
    mirrored = torch.rand(samples, 1, device=images.device) < 0.5
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored, width - 1 - columns, columns)
    rows = (torch.arange(height, device=images.device) + down).clamp(0, height - 1)
    columns = (columns + right).clamp(0, width - 1)
    sample = torch.arange(samples, device=images.device)[:, None, None]
    return images[:, 0][sample, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def perceptron(dropout: float) -> nn.Module:
    """Build two hidden layers of 256 units with dropout: 0.27 million parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, _HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(_HIDDEN, CLASSES),
    )


def residual_network(dropout: float, norm: str) -> nn.Module:
    """Build three residual blocks of 32, 64 and 96 channels: 0.22 million parameters."""
    first, last = _STAGES[0], _STAGES[-1]
    stem = [_convolution(1, first), _norm(norm, first), nn.ReLU()]
    blocks = [
        ResidualBlock(before, after, stride=1 if before == after else 2, norm=norm)
        for before, after in itertools.pairwise((first, *_STAGES))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(last, CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


class ResidualBlock(nn.Module):
    """Two normalised convolutions with a residual (He et al., arXiv 1512.03385, figure 2, option B)."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _convolution(channels_in, channels_out, stride=stride),
            _norm(norm, channels_out),
            nn.ReLU(),
            _convolution(channels_out, channels_out),
            _norm(norm, channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                _convolution(channels_in, channels_out, size=1, stride=stride), _norm(norm, channels_out)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.branch(inputs) + self.shortcut(inputs))


def _convolution(channels_in: int, channels_out: int, *, size: int = 3, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)


def _norm(norm: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(_GROUPS, channels)
