"""A character-level language model: a small GPT-style transformer.

Losses differ between Python versions, whose sources are the default text.
"""

import hashlib
import math
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import WorkloadError, require
from bssearch.records import MetricInfo
from bssearch.workloads.base import WeightedLoss
from bssearch.workloads.data import Data, Part, evenly
from bssearch.workloads.transformer import Block, blocks_of, check_sizes

_HELD_OUT_SHARE = 20  # 1/20 of the characters validate, 1/20 test

_EVALUATION_CHARACTERS = 8192
_PADDING = -100  # target that PyTorch's cross-entropy ignores
_SIZES = ("max_characters", "context", "layers", "heads", "width", "validation_sequences")


@dataclass(eq=False)
class CharLM:
    """Predict the next character: 90 % of the text train, the next 5 % validate, the last 5 % test.

    ``text`` is a UTF-8 file, a folder (without hidden files or subfolders) or a glob, relative to the current folder.
    The default text is the standard library's top-level modules. The text joins the files in the order of their paths,
    up to ``max_characters``. Windows have ``context`` + 1 characters; if ``lines``, windows also end at line ends.
    At most ``validation_sequences`` windows validate.
    """

    text: str | None = None
    max_characters: int = 1_000_000
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    validation_sequences: int = 128
    lines: bool = False
    vocabulary: str = field(default="", init=False)  # characters of the training part; one more token means any other
    # mean cross-entropy in nats per character; chance is ln(tokens)
    metrics: Mapping[str, MetricInfo] = field(default_factory=lambda: {"loss": MetricInfo(low=0.0)}, init=False)

    def __post_init__(self) -> None:
        check_sizes(self, _SIZES)
        if not (self.text is None or isinstance(self.text, str)):
            raise ValueError(f"text = {self.text!r} must be a path or a glob")

    @property
    def tokens_per_sample(self) -> int | None:
        """Predicted characters per sample; None if ``lines``."""
        return None if self.lines else self.context

    def load(self, device: torch.device) -> Data:
        """Set the vocabulary; return int64 tokens (sequences, context) or, if ``lines``, a list of lines."""
        text = _read(_files(self.text), self.max_characters)
        held_out = len(text) // _HELD_OUT_SHARE
        require(
            held_out > self.context,
            f"the text has {len(text)} characters (max_characters = {self.max_characters}); one validation window "
            f"needs {_HELD_OUT_SHARE} × (context + 1) = {_HELD_OUT_SHARE * (self.context + 1)}",
            hint="give a longer text, or raise max_characters",
            error=WorkloadError,
        )
        # A worker's stderr is the log of the worker's slot.
        print(f"char_lm: {len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}", file=sys.stderr)
        train, validation, test = text[: -2 * held_out], text[-2 * held_out : -held_out], text[-held_out:]
        self.vocabulary = "".join(sorted(set(train)))
        self.metrics = {"loss": MetricInfo(low=0.0, chance=math.log(len(self.vocabulary) + 1))}
        if self.lines:
            lines = self._lines(train)
            self.sample_tokens = [len(one) - 1 for one in lines]
            return Data(lines, self._lines(validation, self.validation_sequences), self._lines(test))
        return Data(
            train=self._part(train, device),
            validation=self._part(validation, device, self.validation_sequences),
            test=self._part(test, device),
        )

    def build_model(self, *, dropout: float) -> nn.Module:
        require(
            self.vocabulary,
            "char_lm builds the model over the text's characters; call load() first",
            error=WorkloadError,
        )
        return CharTransformer(
            tokens=len(self.vocabulary) + 1,
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
            dropout=dropout,
        )

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(model)

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor | WeightedLoss:
        """Return the mean cross-entropy in nats per character or, if ``lines``, a `WeightedLoss`."""
        scores, wanted = model(inputs).flatten(0, 1), targets.flatten()
        if not self.lines:
            return functional.cross_entropy(scores, wanted, label_smoothing=label_smoothing)
        total = functional.cross_entropy(scores, wanted, label_smoothing=label_smoothing, reduction="sum")
        return WeightedLoss(total, _predicted(targets))

    def collate(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad lines (characters,) to (lines, characters); the loss ignores padded targets."""
        inputs = nn.utils.rnn.pad_sequence([one[:-1] for one in samples], batch_first=True)
        targets = [one[1:] for one in samples]
        return inputs, nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=_PADDING)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        total, characters = 0.0, 0
        for inputs, targets in part.chunks(max(1, _EVALUATION_CHARACTERS // self.context)):
            total += functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item()
            characters += int(_predicted(targets))
        return {"loss": total / characters}

    def _tokens(self, text: str) -> torch.Tensor:
        token_of = {character: token for token, character in enumerate(self.vocabulary)}
        return torch.tensor([token_of.get(character, len(token_of)) for character in text], dtype=torch.int64)

    def _lines(self, text: str, most: int | None = None) -> list[torch.Tensor]:
        window = self.context + 1
        found = [
            self._tokens(line[start : start + window])
            for line in text.splitlines(keepends=True)
            for start in range(0, len(line) - 1, window)
        ]
        found = [one for one in found if len(one) > 1]
        return found if most is None else [found[row] for row in evenly(np.arange(len(found)), min(most, len(found)))]

    def _part(self, text: str, device: torch.device, most: int | None = None) -> Part:
        tokens, window = self._tokens(text), self.context + 1
        windows = tokens[: len(tokens) // window * window].view(-1, window).to(device)
        if most is not None:
            windows = windows[evenly(np.arange(len(windows)), min(most, len(windows)))]
        return Part(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


class CharTransformer(nn.Module):
    """A decoder-only pre-norm transformer with learned positions (Radford et al. 2019, GPT-2).

    The output layer and the token embedding share weights. Dropout acts on embeddings and on each block's outputs.
    """

    def __init__(self, *, tokens: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, hidden_dropout=0.0, is_causal=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        deviation = 0.5 / math.sqrt(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                writes = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=deviation / math.sqrt(2 * layers) if writes else deviation)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores (sequences, characters, tokens) of each next character."""
        stream = self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        for block in self.blocks:
            stream = block(stream)
        return functional.linear(self.norm(stream), self.tokens.weight)


def _predicted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != _PADDING).sum()


def _files(text: str | None) -> list[Path]:
    path = Path(text or sysconfig.get_path("stdlib"))
    if path.is_dir():
        found = list(path.glob("[!.]*" if text else "*.py"))
    else:
        found = [path] if path.is_file() else [Path(one) for one in glob(str(path), recursive=True)]  # noqa: PTH207
    files = sorted(one for one in found if one.is_file())
    require(
        files,
        f"text = {str(path)!r} matches no file in {Path.cwd()}; name a file, a folder with files, or a glob",
        error=WorkloadError,
    )
    return files


def _read(files: list[Path], max_characters: int) -> str:
    text = ""
    for file in files:
        try:
            text += file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkloadError(f"text {file} cannot be read as UTF-8: {error}; choose another file") from error
        if len(text) >= max_characters:
            break
    return text[:max_characters]
