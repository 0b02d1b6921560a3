"""Splits of data into parts: fixed and stratified, the same on every machine and for every seed."""

from __future__ import annotations

import numpy as np


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """Return all row numbers sorted by label, shuffled within each label by a generator whose stream is frozen."""
    shuffled = np.random.RandomState(0).permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` of the rows at even distances: of rows in stratified order, each label's share of them."""
    return rows[np.arange(count) * len(rows) // count]
