"""The optimizers that a configuration can name: PyTorch's own, Muon together with AdamW, and two of timm's."""

from bssearch.training.optimizers.by_name import build_optimizer

__all__ = ["build_optimizer"]
