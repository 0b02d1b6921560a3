"""Fine-tuning on Fashion-MNIST: a network trained on five classes learns five other classes from few images.

All layers learn, with a fresh head (Howard & Ruder 2018, arXiv 1801.06146). The frozen old head measures forgetting
(French 1999, "Catastrophic forgetting in connectionist networks").
"""

import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import UsageError, WorkloadError
from bssearch.files import naming, replacing
from bssearch.records import MetricInfo
from bssearch.settings import cache_folder
from bssearch.workloads import fashion_mnist
from bssearch.workloads.base import check_whole
from bssearch.workloads.data import Data, Part, evenly, stratified_order
from bssearch.workloads.fashion_mnist import HELD_OUT, FashionMnist
from bssearch.workloads.ten_classes import CLASSES, EVALUATION_CHUNK

Weights = Mapping[str, torch.Tensor]


def pretrained(name: str, made_of: Iterable[Any], make: Callable[[], Weights]) -> Weights:
    """Return weights from the cache; else call ``make`` and fill the cache.

    ``made_of`` is the code and data that decide the weights, as bytes or arrays. ``make`` runs in one thread, from seed
    0.
    """
    # include PyTorch and the CPU, because training gives other bits with another PyTorch or CPU
    digest = hashlib.sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for part in (Path(__file__).read_bytes(), *made_of):
        digest.update(hashlib.sha256(part).digest())
    path = cache_folder() / "pretrained" / f"{name}-{digest.hexdigest()[:16]}.pt"
    with suppress(Exception):  # the file may be missing or hold anything
        found: Weights = torch.load(path, map_location="cpu", weights_only=True)["weights"]
        return found
    print(f"{name}: training the trials' initial weights, which the cache keeps in {path}", file=sys.stderr)
    with _alone():
        weights = {key: tensor.detach().clone() for key, tensor in make().items()}
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing([path], binary=True) as (file,):
            torch.save({"weights": weights}, file)
    except (UsageError, OSError, RuntimeError) as error:  # PyTorch raises a RuntimeError if the disk is full
        print(f"{name}: {error}; each process trains the weights again until the cache is writable", file=sys.stderr)
    return weights


@contextmanager
def _alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


OLD_CLASSES = 5  # pre-training, classes 0 to 4: T-shirts, trousers, pullovers, dresses, coats

NEW_CLASSES = CLASSES - OLD_CLASSES  # fine-tuning, classes 5 to 9: sandals, shirts, sneakers, bags, ankle boots

MOST_TRAINED = 27_500  # training images of the new classes

_CHANNELS = (16, 32, 64)
_GROUPS = 8
_FEATURES = 64

_PRETRAINING_EPOCHS = 2
_PRETRAINING_BATCH = 64
_PRETRAINING_RATE = 3e-3  # AdamW's learning rate, which decays linearly to zero; found by trials


@dataclass(eq=False)
class FineTune:
    """Classify five new classes with a network that knows five old classes.

    New classes share ``train_samples`` equally. ``accuracy`` and ``loss`` are over new classes, ``old_accuracy`` over
    old classes. ``forgetting`` is the fall of ``old_accuracy`` since pre-training.
    """

    train_samples: int = 2500
    validation_samples: int = 2000
    metrics: Mapping[str, MetricInfo] = field(
        default_factory=lambda: {
            "accuracy": MetricInfo(low=0.0, high=1.0, chance=1 / NEW_CLASSES),
            "loss": MetricInfo(low=0.0, chance=math.log(NEW_CLASSES)),
            "old_accuracy": MetricInfo(low=0.0, high=1.0, reported=True),
            "forgetting": MetricInfo(low=-1.0, high=1.0, reported=True),
        },
        init=False,
    )

    def __post_init__(self) -> None:
        self._weights: Weights | None = None
        check_whole(self, "train_samples", low=NEW_CLASSES, high=MOST_TRAINED)
        check_whole(self, "validation_samples", low=CLASSES, high=HELD_OUT)

    def load(self, device: torch.device) -> Data:
        """Return float32 images (samples, 1, 28, 28) and int64 targets (samples, 2); ``train`` has only new classes.

        A target is the class, then 1 if the pre-trained network was right, else 0.
        """
        data = FashionMnist(validation_samples=self.validation_samples).load(torch.device("cpu"))
        train = data.train
        old = Part(*train.gather(train.targets < OLD_CLASSES))
        made_of = [Path(fashion_mnist.__file__).read_bytes(), old.inputs.numpy(), old.targets.numpy()]
        self._weights = pretrained("finetune", made_of, lambda: pretrained_weights(old))
        new = Part(*train.gather(train.targets >= OLD_CLASSES))
        new = Part(*new.gather(torch.from_numpy(evenly(stratified_order(new.targets.numpy()), self.train_samples))))
        before = self.build_model(dropout=0.0).eval()
        return Data(
            train=_marked(new, before).to(device),
            validation=_marked(data.validation, before).to(device),
            test=_marked(data.test, before).to(device),
        )

    def build_model(self, *, dropout: float) -> nn.Module:
        if self._weights is None:
            raise WorkloadError("finetune builds the model from pre-trained weights: call load() first")
        model = TwoHeaded(dropout)
        model.load_state_dict(self._weights, strict=False)
        return model

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        return functional.cross_entropy(model(inputs), targets[:, 0] - OLD_CLASSES, label_smoothing=label_smoothing)

    def evaluate(self, model: Any, part: Part) -> Mapping[str, float]:
        features = torch.cat([model.trunk(inputs) for inputs, _ in part.chunks(EVALUATION_CHUNK)])
        classes, were_right = part.targets.unbind(1)
        is_old = classes < OLD_CLASSES
        scores, targets = model.head(features[~is_old]), classes[~is_old] - OLD_CLASSES
        right_before = were_right[is_old].sum().item()
        right = (model.old_head(features[is_old]).argmax(1) == classes[is_old]).sum().item()
        old = is_old.sum().item()
        return {
            "accuracy": (scores.argmax(1) == targets).sum().item() / len(targets),
            "loss": functional.cross_entropy(scores, targets).item(),
            "old_accuracy": right / old,
            "forgetting": (right_before - right) / old,
        }


class TwoHeaded(nn.Module):
    """Three convolutions, a linear layer, dropout and a head: 0.09 million parameters; ``old_head`` is frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.trunk = trunk()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(_FEATURES, NEW_CLASSES)
        self.old_head = nn.Linear(_FEATURES, OLD_CLASSES).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.dropout(self.trunk(inputs))))


def trunk() -> nn.Sequential:
    """Build the network from images (samples, 1, 28, 28) to features (samples, 64)."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((1, *_CHANNELS)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(_GROUPS, after), nn.ReLU()]
    side = 4  # 28 → 14 → 7 → 4 pixels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(_CHANNELS[-1] * side * side, _FEATURES), nn.ReLU())


def pretrained_weights(old: Part) -> Weights:
    features, head = trunk(), nn.Linear(_FEATURES, OLD_CLASSES)
    optimizer = torch.optim.AdamW([*features.parameters(), *head.parameters()], lr=_PRETRAINING_RATE, foreach=True)
    steps_per_epoch = len(old) // _PRETRAINING_BATCH
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps_per_epoch * _PRETRAINING_EPOCHS)
    for _ in range(_PRETRAINING_EPOCHS):
        order = torch.randperm(len(old))[: steps_per_epoch * _PRETRAINING_BATCH]
        for rows in order.view(steps_per_epoch, _PRETRAINING_BATCH):
            inputs, targets = old.gather(rows)
            optimizer.zero_grad()
            functional.cross_entropy(head(features(inputs)), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    trained = {"trunk": features.state_dict(), "old_head": head.state_dict()}
    return {f"{part}.{name}": tensor for part, state in trained.items() for name, tensor in state.items()}


def _marked(part: Part, before: Any) -> Part:
    with torch.no_grad():
        named = torch.cat([before.old_head(before.trunk(x)).argmax(1) for x, _ in part.chunks(EVALUATION_CHUNK)])
    return Part(part.inputs, torch.stack([part.targets, (named == part.targets).long()], 1))
