"""A two-class problem in every form of a workload's data, and with its own training steps."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from bssearch import Configuration, MetricInfo, TrainingStep, WeightedLoss
from bssearch.workloads.data import Data, Part, check_data

TOKENS = 12


class Classifier(nn.Module):
    """Scores the mean of the tokens' embeddings."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(8, 2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.unsqueeze(2)
        scores: torch.Tensor = self.head((self.embedding(ids) * kept).sum(1) / kept.sum(1))
        return scores


def texts(samples: int, seed: int, longest: int = 6) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    found = [[rng.randrange(1, TOKENS) for _ in range(rng.randint(2, longest))] for _ in range(samples)]
    return [(ids, int(sum(ids) > 6 * len(ids))) for ids in found]


def padded(samples: list[Any], longest: int | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    """Return {"text": {"ids", "mask"}}, padded to the longest sample, and the labels."""
    longest = longest or max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in samples])
    return {"text": {"ids": ids, "mask": ids != 0}}, torch.tensor([label for _, label in samples])


class Texts:
    """Nested dicts of tensors; subclasses have other forms."""

    metrics: Mapping[str, MetricInfo] = {"accuracy": MetricInfo(low=0.0, high=1.0), "loss": MetricInfo(low=0.0)}

    def load(self, device: torch.device) -> Data:
        return Data(*(self.part(texts(samples, seed)) for samples, seed in ((100, 1), (40, 2), (40, 3))))

    def part(self, samples: list[Any]) -> Any:
        return Part(*padded(samples, 6))

    def build_model(self, *, dropout: float) -> nn.Module:
        return Classifier(dropout)

    def loss(self, model: nn.Module, inputs: Any, targets: Any, *, label_smoothing: float) -> Any:
        return functional.cross_entropy(model(**inputs["text"]), targets, label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        pairs = [(model(**inputs["text"]), targets) for inputs, targets in part.chunks(16)]
        scores, targets = (torch.cat(column) for column in zip(*pairs, strict=True))
        return {
            "accuracy": (scores.argmax(1) == targets).float().mean().item(),
            "loss": functional.cross_entropy(scores, targets).item(),
        }


class Listed(Texts):
    """Lists of samples of unequal lengths."""

    def part(self, samples: list[Any]) -> Any:
        return samples

    def collate(self, samples: list[Any]) -> Any:
        return padded(samples, 6)


@dataclass(eq=False)
class Rows(Dataset[Any]):
    """A Dataset whose samples are augmented at random: a token is left out."""

    samples: list[Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        ids, label = self.samples[row]
        left_out = int(torch.randint(len(ids), ())) if random.random() < 0.5 else None
        return [one for place, one in enumerate(ids) if place != left_out], label


class Datasets(Listed):
    """A Subset of a Dataset, which draws random numbers."""

    def part(self, samples: list[Any]) -> Any:
        return Subset(Rows(samples), range(len(samples)))


@dataclass(eq=False)
class Stream(IterableDataset[Any]):
    """Samples in an order that the global generator draws."""

    samples: list[Any]

    def __iter__(self) -> Iterator[Any]:
        yield from random.sample(self.samples, len(self.samples))


class Streams(Listed):
    """Training batches of the workload's DataLoader; the last batch is shorter."""

    train_samples = 100

    def load(self, device: torch.device) -> Data:
        data = super().load(device)
        return Data(None, data.validation, data.test)

    def train_batches(self, batch_size: int, seed: int) -> Iterable[Any]:
        return DataLoader(Stream(texts(100, 1)), batch_size=batch_size, collate_fn=self.collate)


class TwoOptimizers(Texts):
    """An own training step: two optimizers, and a penalty as a second loss."""

    def build_optimizer(self, model: nn.Module, configuration: Configuration) -> Any:
        assert isinstance(model, Classifier)
        rate = configuration.learning_rate
        return {
            "embedding": torch.optim.Adam(model.embedding.parameters(), lr=rate),
            "head": torch.optim.SGD(model.head.parameters(), lr=10 * rate, momentum=0.9),
        }

    def training_step(self, step: TrainingStep) -> Any:
        total = torch.zeros(())
        for inputs, targets in step.micro_batches:
            loss = functional.cross_entropy(step.model(**inputs["text"]), targets) / step.accumulation_steps
            step.backward(loss)
            total = total + loss.detach()
        step.backward(1e-3 * torch.stack([one.square().sum() for one in step.model.parameters()]).sum())
        for optimizer in step.optimizers.values():
            step.update(optimizer)
        return total


class Weighed(Listed):
    """A loss per token; micro-batches have unequal numbers of tokens."""

    def loss(self, model: nn.Module, inputs: Any, targets: Any, *, label_smoothing: float) -> Any:
        weights = inputs["text"]["mask"].sum(1)
        losses = functional.cross_entropy(model(**inputs["text"]), targets, reduction="none")
        return WeightedLoss((losses * weights).sum(), weights.sum())


FORMS: list[type[Texts]] = [Texts, Listed, Datasets, Streams, TwoOptimizers, Weighed]


def loaded(workload: Texts) -> Data:
    """Return the data as a worker loads them."""
    return check_data(workload.load(torch.device("cpu")), workload)
