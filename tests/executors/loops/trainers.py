"""Trainers of a tiny classifier with random weights: ragged texts as dicts, a collator, and a trial to train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer

from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.transformers import TrialCallback, training_arguments
from tests.training.toys import FakeTime

TOKENS = 20


class Texts(Dataset[dict[str, Any]]):
    """Ragged texts, labelled by the mean of their tokens; each takes ``seconds`` of a fake time to fetch."""

    def __init__(self, rows: int = 50, time: FakeTime | None = None, seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 9, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(1, TOKENS, (length,), generator=generator) for length in lengths]
        self.time, self.seconds = time, seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.time is not None:
            self.time.pass_by(self.seconds)
        ids = self.rows[row]
        return {"input_ids": ids, "labels": int(ids.float().mean() > TOKENS / 2), "row": row}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad texts to the longest."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    columns = {name: torch.tensor([row[name] for row in rows]) for name in ("labels", "row")}
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **columns}


def classifier(dropout: float = 0.1, *, takes_items: bool = False) -> BertForSequenceClassification:
    """Return a classifier whose loss is a mean; with ``takes_items`` the Trainer counts on it to count items."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
    )
    model = BertForSequenceClassification(config)
    if not takes_items:
        model.accepts_loss_kwargs = False
    return model


class Scored(torch.nn.Module):
    """A module of tensors as a Trainer's model, which returns its loss and its scores."""

    def __init__(self, inner: torch.nn.Module, loss: Callable[..., torch.Tensor] = cross_entropy) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.inner(inputs)
        return {"loss": self.loss(scores, labels), "logits": scores}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@dataclass
class Seen:
    """The rows of each micro-batch of a training, and the step of each micro-batch."""

    rows: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


class Watched(Trainer):  # type: ignore[misc]
    """A user's subclass, which takes a column off each batch."""

    seen: Seen
    after: Callable[[], None] = staticmethod(lambda: None)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen.rows.append(inputs.pop("row").tolist())
        self.seen.steps.append(self.state.global_step + 1)
        self.after()
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        return super().compute_loss(model, {key: inputs[key] for key in inputs if key != "row"}, *given, **named)


def trainer_of(
    trial: Trial,
    folder: Path,
    *,
    arguments: Any = None,
    metric: str | None = None,
    kind: type[Watched] = Watched,
    own: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Watched:
    """Return a Trainer of a trial as a script has it; ``own`` are arguments, ``changes`` are the Trainer's."""
    given = {"output_dir": str(folder), "remove_unused_columns": False, "disable_tqdm": True, **(own or {})}
    parts: dict[str, Any] = {
        "model": classifier(),
        "args": arguments or training_arguments(trial, **given),
        "data_collator": collate,
        "train_dataset": Texts(),
        "eval_dataset": Texts(12),
        "compute_metrics": accuracy,
        "callbacks": [TrialCallback(trial, metric)],
        **changes,
    }
    made = kind(**parts)
    made.seen = Seen()
    return made


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]
