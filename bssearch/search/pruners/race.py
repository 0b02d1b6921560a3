"""Racing against the incumbent's curve (de Souza et al. 2022)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bssearch.search.pruners.base import Action, Cap, Standings

FROM = 0.1
"""Share of the cap; early evaluations say little."""


class Race(Cap):
    """Cap, and stop trials worse at t than the incumbent at t / ``lag``, from a tenth of the cap on."""

    def __init__(self, lag: Annotated[float, Field(gt=1)] = 3.0) -> None:
        self.lag = lag

    def judge(self, number: int, standings: Standings) -> Action:
        """Stop a lagging trial."""
        curve = standings.curves[number]
        if not standings.winners or curve.now < FROM * standings.cap:
            return Action.GO_ON
        expected = standings.winners[0][0].at(curve.now / self.lag)
        return Action.STOP if expected is not None and curve.gain < expected else Action.GO_ON
