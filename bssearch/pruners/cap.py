"""Capping: no trial runs past `Standings.cap`."""

from __future__ import annotations

from bssearch.pruners.base import Pruner


class Cap(Pruner):
    """Nothing is stopped but at the cap. Lossless for single runs with a slack of 1."""

    caps = True
