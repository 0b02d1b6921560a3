"""Learning rates that are usual from scratch and for fine-tuning, by optimizer."""

from __future__ import annotations

FINE_TUNING = "fine_tuning"
"""The preset of a training that begins with a pretrained model."""

SCRATCH_RATES = {
    "sgd": 0.1,
    "adam": 1e-3,
    "adamw": 1e-3,
    "adamax": 2e-3,
    "nadam": 2e-3,
    "radam": 1e-3,
    "rmsprop": 1e-2,
    "adagrad": 1e-2,
    "adafactor": 1e-2,
    "muon": 1e-3,
    "lamb": 1e-3,
    "lars": 1.0,
}
"""Learning rates usual from scratch: with SGD and momentum 0.1 at batch 256 (Goyal et al. 2017, arXiv 1706.02677), with
Adam 0.001 and Adamax 0.002 (Kingma & Ba 2015, arXiv 1412.6980, algorithms 1 and 2), with the others the defaults of
PyTorch and of timm."""

FINE_TUNING_FACTOR = 10
"""Fine-tuning takes learning rates 10 to 100 times smaller, as the preset has them: at least so many times. A choice;
BERT is fine-tuned at 2e-5 to 5e-5 with Adam (Devlin et al. 2019, arXiv 1810.04805, A.3), 20 to 50 times smaller."""
