"""An example of one pruner, as a package of your own may have it."""

from typing import Annotated

from pydantic import Field

from bssearch.search.pruners.base import Action, Cap, Standings


class Patient(Cap):
    """Stop a trial that gained less in half of the fastest trial's time than the fastest gained in 1/lag of it."""

    def __init__(self, lag: Annotated[float, Field(gt=1)] = 2.0) -> None:
        self.lag = lag

    def judge(self, number: int, standings: Standings) -> Action:
        """Stop a trial that is far behind the fastest one."""
        curve = standings.curves[number]
        if not standings.winners or curve.now < standings.winners[0][1] / 2:
            return Action.GO_ON
        fastest, seconds = standings.winners[0]
        expected = fastest.at(seconds / 2 / self.lag)
        return Action.STOP if expected is not None and curve.gain < expected else Action.GO_ON
