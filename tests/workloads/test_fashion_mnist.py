import gzip
import hashlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from bssearch import Data, Part, WorkloadError
from bssearch.settings import DATA_DIR_VARIABLE
from bssearch.workloads import fashion_mnist
from bssearch.workloads.fashion_mnist import (
    FILES,
    SHIFT,
    FashionMnist,
    find_fashion_mnist,
    moved_and_mirrored,
    read_images,
    split,
)
from bssearch.workloads.ten_classes import CLASSES

CPU = torch.device("cpu")
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_files(folder: Path, suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        content = idx(np.arange(3 * 28 * 28).reshape(3, 28, 28) if "images" in name else np.array([9, 0, 3]))
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the machine's data: a separate cache, and no data folder in the environment."""
    monkeypatch.delenv(DATA_DIR_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


# Finding the files.


@pytest.mark.parametrize("place", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_files_are_found_in_the_folder_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, place: str, suffix: str
) -> None:
    write_files(home / "data" / place, suffix)
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(home / "data"))
    assert find_fashion_mnist() == {name: home / "data" / place / f"{name}{suffix}" for name in FILES}


def test_a_folder_asked_for_without_the_files_is_an_error_though_they_are_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debian = write_files(home / "debian", ".gz")
    assert find_fashion_mnist(debian)[LABELS].parent == debian
    (home / "nothing").mkdir()
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(home / "nothing"))
    with pytest.raises(WorkloadError, match=rf"{DATA_DIR_VARIABLE} has no ") as error:
        find_fashion_mnist(debian)
    folders = ("", "/fashion-mnist", "/FashionMNIST/raw")
    assert all(f"{home}/nothing{folder}" in str(error.value) for folder in folders)
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(home / "nowhere"))
    with pytest.raises(WorkloadError, match=rf"{DATA_DIR_VARIABLE} has no .*{home}/nowhere"):
        find_fashion_mnist(debian)


def test_a_missing_file_is_named_without_a_download(home: Path, downloads: list[Path]) -> None:
    debian = write_files(home / "debian", ".gz")
    (debian / f"{LABELS}.gz").unlink()
    with pytest.raises(WorkloadError, match=f"{debian} lacks {LABELS}, with or without .gz"):
        find_fashion_mnist(debian)
    assert not downloads


def test_without_files_and_torchvision_the_error_names_three_ways(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(WorkloadError) as error:
        find_fashion_mnist(home / "nothing")
    assert [
        way
        for way in ("apt-get install dataset-fashion-mnist", "pip install torchvision", "--data-dir DIR")
        if way not in str(error.value)
    ] == []


@pytest.fixture
def downloads(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Replace torchvision by a fake that writes small files into the real places, and lists its folders."""
    calls: list[Path] = []

    def download(root: str, *, download: bool) -> None:
        assert download
        calls.append(Path(root))
        write_files(Path(root, "FashionMNIST", "raw"))
        if (home / "fail").exists():
            Path(root, "FashionMNIST", "raw", FILES[3]).unlink()
            raise RuntimeError("Error downloading t10k-labels-idx1-ubyte.gz")

    datasets = ModuleType("torchvision.datasets")
    datasets.FashionMNIST = download  # type: ignore[attr-defined]
    package = ModuleType("torchvision")
    package.__spec__ = datasets.__spec__ = __spec__
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    yield calls


def test_files_that_are_nowhere_are_downloaded_once(home: Path, downloads: list[Path]) -> None:
    cache = home / "cache" / "bssearch" / "fashion-mnist"
    assert find_fashion_mnist(home / "nothing") == {name: cache / name for name in FILES}
    assert find_fashion_mnist(home / "nothing")[LABELS] == cache / LABELS
    assert len(downloads) == 1
    assert [path.name for path in cache.parent.iterdir()] == ["fashion-mnist"]
    debian = write_files(home / "debian")
    assert find_fashion_mnist(debian)[LABELS] == debian / LABELS


def test_a_failed_download_leaves_no_file_and_is_retried(home: Path, downloads: list[Path]) -> None:
    (home / "fail").touch()
    with pytest.raises(WorkloadError, match=r"RuntimeError: Error downloading t10k-labels.*one of these ways"):
        find_fashion_mnist(home / "nothing")
    assert list((home / "cache" / "bssearch").iterdir()) == []
    (home / "fail").unlink()
    assert len(find_fashion_mnist(home / "nothing")) == len(FILES)


def test_two_downloads_at_once_do_not_disturb_each_other(home: Path, downloads: list[Path]) -> None:
    first = find_fashion_mnist(home / "nothing")
    assert fashion_mnist._downloaded(home / "cache" / "bssearch" / "fashion-mnist") == first
    assert len(downloads) == 2


# Reading them.


def damaged(folder: Path, name: str, content: bytes) -> str:
    """Replace a file among four good files; return the message, which starts with the file's path."""
    files = {file: write_files(folder) / file for file in FILES}
    plain = files[name.removesuffix(".gz")]
    files[name.removesuffix(".gz")] = plain.with_name(name)
    plain.with_name(name).write_bytes(content)
    with pytest.raises(WorkloadError) as error:
        read_images(files, "train")
    assert str(error.value).startswith((f"{plain.with_name(name)} ", f"{plain}: ", f"{folder / LABELS} "))
    return str(error.value)


GOOD_LABELS, GOOD_IMAGES = idx(np.array([9, 0, 3])), idx(np.zeros((3, 28, 28)))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (LABELS, GOOD_IMAGES, "starts with the bytes 00 00 08 03; an idx file of bytes in 1 dimension starts"),
        (IMAGES, GOOD_LABELS, "an idx file of bytes in 3 dimensions starts with 00 00 08 03"),
        (LABELS, b"", "starts with the bytes (none)"),
        (IMAGES, GOOD_IMAGES[:9], "has 9 bytes; the header alone has 16"),
        (IMAGES, GOOD_IMAGES[:-1], "has 2351 bytes after the header; the header requires 3 × 28 × 28 = 2352"),
        (LABELS, GOOD_LABELS + b"\0", "has 4 bytes after the header; the header requires 3 = 3"),
        (f"{IMAGES}.gz", gzip.compress(GOOD_IMAGES, mtime=0)[:-9], "ends early, after"),
        (f"{IMAGES}.gz", GOOD_IMAGES, "cannot be read: Not a gzipped file"),
        (f"{LABELS}.gz", gzip.compress(GOOD_LABELS, mtime=0)[:-8] + bytes(8), "cannot be read: CRC check failed"),
        (f"{LABELS}.gz", gzip.compress(GOOD_LABELS, mtime=0)[:10] + b"\xff" * 20, "cannot be read: Error -3"),
        (LABELS, idx(np.array([9, 10, 3])), "label 1 is 10; labels must be < 10"),
        (IMAGES, idx(np.zeros((3, 32, 30))), "has images of 32 × 30 pixels; expected 28 × 28"),
        (IMAGES, idx(np.zeros((4, 28, 28))), "has 4 images, but"),
        (IMAGES, GOOD_IMAGES, "CRC-32 6999b327, expected 2ed6e46a"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_with_its_fault(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    assert said in damaged(tmp_path, name, content)


# The split.


def test_the_split_is_the_same_on_every_machine_and_keeps_the_classes_in_proportion() -> None:
    labels = np.arange(60_000) % CLASSES
    train, validation = split(labels, 5000)
    assert (len(train), len(validation)) == (55_000, 5000)
    assert len(np.union1d(train, validation)) == 60_000
    assert np.bincount(labels[validation]).tolist() == [500] * CLASSES
    assert hashlib.sha256(validation.astype("<i8").tobytes()).hexdigest()[:16] == "64dd42328ed40c0d"


def test_fewer_validation_samples_leave_the_training_part_as_it_is() -> None:
    labels = np.arange(60_000) % CLASSES
    train, validation = split(labels, 5000)
    same, fewer = split(labels, 1000)
    assert np.array_equal(train, same)
    assert len(fewer) == 1000 and set(fewer) < set(validation)
    assert np.bincount(labels[fewer]).tolist() == [100] * CLASSES


@pytest.fixture(scope="module")
def real(real_images: None) -> Data:
    return FashionMnist(validation_samples=2000).load(CPU)


def test_the_real_images_have_the_sizes_and_the_scale_they_say(real: Data) -> None:
    assert [len(part) for part in (real.train, real.validation, real.test)] == [55_000, 2000, 10_000]
    for part in (real.train, real.validation, real.test):
        assert part.inputs.shape[1:] == (1, 28, 28)
        assert (part.inputs.dtype, part.targets.dtype) == (torch.float32, torch.int64)
        assert part.targets.bincount().tolist() == [len(part) // CLASSES] * CLASSES
    assert real.train.inputs.mean().item() == pytest.approx(0, abs=1e-4)
    assert real.train.inputs.std().item() == pytest.approx(1, abs=1e-4)


def test_the_real_split_is_the_same_on_every_machine(real: Data) -> None:
    pixels = (real.validation.inputs * 90.02 + 72.94).round().to(torch.uint8)  # the files' own bytes again
    assert hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:16] == "6fe21099063f4c6a"
    assert real.test.targets[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"model": "resnet"}, {"model": "mlp"}])
def test_the_models_learn_the_real_images(real: Data, settings: dict[str, str]) -> None:
    workload = FashionMnist(**settings)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = workload.build_model(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for rows in torch.randperm(len(real.train))[: 40 * 32].view(40, 32):
        optimizer.zero_grad()
        workload.loss(model, real.train.inputs[rows], real.train.targets[rows], label_smoothing=0.0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    some = Part(real.validation.inputs[::10], real.validation.targets[::10])
    with torch.no_grad():
        assert workload.evaluate(model.eval(), some)["accuracy"] > 3 / CLASSES


# The models.


def build(settings: dict[str, str], dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return FashionMnist(**settings).build_model(dropout=dropout)  # type: ignore[arg-type]


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_norm_decides_whether_the_other_images_of_a_batch_matter() -> None:
    group, batch = build({"norm": "group"}), build({"norm": "batch"})
    both, alone = images(4), images(4)[:2]
    torch.testing.assert_close(group(both)[:2], group(alone))
    assert not torch.allclose(batch(both)[:2], batch(alone), atol=0.01)
    assert torch.equal(build({})(both), group(both))


def test_augmentation_moves_and_mirrors_each_image_in_every_way_alike() -> None:
    image = torch.arange(28.0 * 28).reshape(28, 28)
    padded = nn.functional.pad(image[None, None], (SHIFT,) * 4, mode="replicate")[0, 0]
    ways = {
        tuple(crop.flatten().tolist()): 0
        for down in range(2 * SHIFT + 1)
        for right in range(2 * SHIFT + 1)
        for crop in (lambda one: (one, one.flip(1)))(padded[down : down + 28, right : right + 28])
    }
    assert len(ways) == 50
    torch.manual_seed(0)
    for augmented in moved_and_mirrored(image.expand(5000, 1, 28, 28))[:, 0]:
        ways[tuple(augmented.flatten().tolist())] += 1
    assert len(ways) == 50
    assert min(ways.values()) > 60 and max(ways.values()) < 145


def test_augmentation_is_asked_for() -> None:
    images = torch.randn(64, 1, 28, 28)
    assert FashionMnist().augment(images) is images
    augmented = FashionMnist(augment=True).augment(images)
    assert augmented.shape == images.shape and not torch.equal(augmented, images)


def test_the_momentum_of_batch_normalisation_can_be_searched() -> None:
    model = FashionMnist(norm="batch").build_model(dropout=0.0, norm_momentum=0.02)
    assert {one.momentum for one in model.modules() if isinstance(one, nn.BatchNorm2d)} == {0.02}


def test_a_share_of_the_images_is_augmented() -> None:
    images = torch.randn(4000, 1, 28, 28)
    assert FashionMnist(augment=True).augment(images, strength=0.0) is images
    changed = (FashionMnist().augment(images, strength=0.25) != images).flatten(1).any(dim=1).float().mean().item()
    assert changed == pytest.approx(0.25 * (1 - 1 / (2 * 81)), abs=0.04)


def test_metrics_and_label_smoothing_follow_from_the_scores() -> None:
    class Fixed(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.eye(CLASSES)[[0, 1, 2, 3]] * math.log(3)

    workload, targets = FashionMnist(), torch.tensor([0, 1, 2, 4])
    hit, miss = math.log(12) - math.log(3), math.log(12)
    metrics = workload.evaluate(Fixed(), Part(images(4), targets))
    assert metrics == {"accuracy": 0.75, "loss": pytest.approx((3 * hit + miss) / 4)}
    smoothed = workload.loss(Fixed(), images(4), targets, label_smoothing=0.1)
    even = (hit + 9 * miss) / 10
    assert smoothed.item() == pytest.approx(0.9 * (3 * hit + miss) / 4 + 0.1 * even)
