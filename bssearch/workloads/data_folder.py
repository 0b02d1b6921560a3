"""Where the four files of Fashion-MNIST lie. In this order:

1. the folder that ``BSSEARCH_DATA_DIR`` names: itself, its ``fashion-mnist`` or its ``FashionMNIST/raw``
   (torchvision's layout); where it is set, nothing else is looked at
2. the folder of Debian's package ``dataset-fashion-mnist``
3. what was downloaded before into ``$XDG_CACHE_HOME/bssearch``, by default ``~/.cache/bssearch``
4. a download into it by torchvision, where that is installed
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

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
    """Return the path of each of the four files, plain or ending in ``.gz``; download them where they are nowhere.

    Raises `WorkloadError` where the folder asked for holds none of them, where a folder lacks one, and where they are
    nowhere and cannot be downloaded.
    """
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
                f"or without .gz, in {', '.join(map(str, folders))}; where none is named, {debian_folder} is looked "
                f"at; {WAYS}"
            )
        return found
    cache = cache_folder() / "fashion-mnist"
    return _first([debian_folder, cache]) or _downloaded(cache)


def _first(folders: list[Path]) -> dict[str, Path] | None:
    """Return the files of the first folder that holds any; raise `WorkloadError` where it does not hold all."""
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
    """Download into a temporary folder beside, then rename: nobody ever finds half a download."""
    if importlib.util.find_spec("torchvision") is None:
        raise WorkloadError(f"the images of Fashion-MNIST are not on this machine; {WAYS}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as temporary:
            importlib.import_module("torchvision.datasets").FashionMNIST(temporary, download=True)
            try:
                Path(temporary, "FashionMNIST", "raw").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
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
