"""Named models as links: what the fields of the model are for each."""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, Mapping[str, str]] = {
    "BERT-base": {
        "parameters": "110M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "layers": "12",
        "hidden": "768",
        "heads": "12",
        "sequence": "512",
        "vocabulary": "30522",
    },
    "GPT-2": {
        "parameters": "124M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "layers": "12",
        "hidden": "768",
        "heads": "12",
        "sequence": "1024",
        "vocabulary": "50257",
        "mlp": "gelu_new",
        "fused_attention": "yes",
    },
    "ViT-B/16": {
        "parameters": "86M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "layers": "12",
        "hidden": "768",
        "heads": "12",
        "sequence": "197",
        "fused_attention": "yes",
    },
    "Llama-like 8B": {
        "parameters": "8.03B",
        "device": "b200",
        "precision": "bf16",
        "optimizer": "adamw",
        "checkpointing": "on",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "kv_heads": "8",
        "sequence": "4096",
        "vocabulary": "128256",
        "intermediate": "14336",
        "mlp": "swiglu",
        "fused_attention": "yes",
        "dropout": "no",
    },
    "ResNet-50": {
        "parameters": "25.6M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "momentum",
    },
}
"""Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019 (the small model); Dosovitskiy et al. 2020, arXiv
2010.11929; Dubey et al. 2024, arXiv 2407.21783; He et al. 2015, arXiv 1512.03385 (parameters alone: the activations of
convolutions follow from no few numbers)."""
