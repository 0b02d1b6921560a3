"""A workload for bssearch: a language model that predicts the next byte of a text.

The file runs as it is; change the places marked YOURS. bssearch does the other work: batches, optimizer, learning rate,
clock, stopping at the target.
"""

import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import bssearch

LENGTH = 64  # YOURS: tokens of a sample, which the model sees at once
TOKENS = 256  # YOURS: the vocabulary


class Text:
    """YOURS: the data and the model; this example has Python's standard library and a transformer."""

    # YOURS: the metrics of evaluate(), with bounds and the value of guessing; the spec's target is one of them.
    metrics: Mapping[str, bssearch.MetricInfo] = {"bits_per_byte": bssearch.MetricInfo(low=0.0, chance=8.0)}

    tokens_per_sample = LENGTH  # without this member, trials count samples only

    def __init__(self, folder: str = sysconfig.get_path("stdlib"), pattern: str = "*.py") -> None:
        """Take the spec's workload_settings; omit this method if the spec has no workload_settings."""
        self.folder = Path(folder).expanduser()
        self.pattern = pattern

    def load(self, device: torch.device) -> bssearch.Data:
        """Return three parts that never change, on the device."""
        # YOURS: a sequence of tokens as int64; if documents resemble each other, split between them.
        text = b"\n".join(path.read_bytes() for path in sorted(self.folder.glob(self.pattern)))
        if not text:
            raise FileNotFoundError(
                f"no file {self.pattern} in {self.folder}; set folder and pattern in workload_settings"
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

        samples = (len(tokens) - 1) // LENGTH
        inputs = tokens[: samples * LENGTH].view(samples, LENGTH)
        targets = tokens[1 : samples * LENGTH + 1].view(samples, LENGTH)
        train, held_out = torch.arange(samples * 4 // 5), torch.arange(samples * 4 // 5, samples)
        held_out = held_out[:: max(1, len(held_out) // 256)]  # few samples, because evaluations are frequent

        def part(rows: torch.Tensor) -> bssearch.Part:
            return bssearch.Part(inputs[rows].to(device), targets[rows].to(device))

        return bssearch.Data(train=part(train), validation=part(held_out[::2]), test=part(held_out[1::2]))

    def build_model(self, *, dropout: float) -> nn.Module:
        """Return a new model, on the CPU; ignore dropout if the model has no dropout."""
        return _Transformer(width=64, heads=4, layers=1, dropout=dropout)  # YOURS

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        """Return the mean loss of one batch."""
        scores = model(inputs).flatten(0, 1)  # YOURS
        return functional.cross_entropy(scores, targets.flatten(), label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: bssearch.Part) -> Mapping[str, float]:
        """Return every metric over a whole part; the model is in eval mode, without gradients."""
        nats = 0.0  # YOURS
        for inputs, targets in part.chunks(64):
            nats += functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item()
        return {"bits_per_byte": nats / part.targets.numel() / math.log(2)}


class _Transformer(nn.Module):
    """A causal transformer from tokens (samples, length) to scores (samples, length, TOKENS)."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(inputs) + self.places
        scores: torch.Tensor = self.scores(self.layers(hidden, mask=self.mask, is_causal=True))
        return scores
