"""Standings for pruner tests, changed step by step."""

from bssearch.records import Progress, TrialState
from bssearch.search.pruners.base import Action, Pruner, Standings


def progress(*points: tuple[float, float]) -> Progress:
    """A curve of (train seconds, gain) points."""
    found = Progress()
    for train_seconds, gain in points:
        found.add(train_seconds, gain)
    return found


class Field:
    """Asks a pruner at each evaluation and carries out its decision."""

    def __init__(self, pruner: Pruner, limit: float = 100.0, *, slack: float = 1.0, can_wait: bool = True) -> None:
        self.pruner = pruner
        self.curves: dict[int, Progress] = {}
        self.standings = Standings(limit, slack, can_wait, curves=self.curves)

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Evaluate a running trial; return the pruner's action."""
        self.told(number, (train_seconds, gain))
        action = self.pruner.judge(number, self.standings)
        if action is not Action.GO_ON:
            state = TrialState.PAUSED if action is Action.WAIT else TrialState.PRUNED
            self.ended(number, state)
        return action

    def told(self, number: int, *points: tuple[float, float]) -> None:
        """Evaluate a running trial without asking the pruner."""
        curve = self.curves.setdefault(number, Progress())
        for train_seconds, gain in points:
            curve.add(train_seconds, gain)
        self.standings.running.add(number)
        self.standings.waiting.pop(number, None)
        self.standings.states[number] = TrialState.RUNNING

    def ended(self, number: int, state: TrialState) -> None:
        """End a trial in a state, or pause it."""
        self.standings.running.discard(number)
        self.standings.waiting.pop(number, None)
        self.standings.states[number] = state
        if state is TrialState.PAUSED:
            self.standings.waiting[number] = self.curves[number]

    def reached(self, number: int, seconds: float) -> None:
        """Let a trial reach a gain of 1."""
        self.told(number, (seconds, 1.0))
        self.ended(number, TrialState.REACHED)
        winners = self.standings.winners
        if not winners or seconds < winners[0][1]:
            winners.insert(0, (self.curves[number], seconds))

    def winner(self, number: int = 0, seconds: float = 10.0) -> None:
        """Let a trial reach a gain of 1 on a straight line."""
        self.told(number, *((seconds * tenth / 10, tenth / 10) for tenth in range(1, 10)))
        self.reached(number, seconds)

    def goes_on(self, *, fresh: bool) -> int | None:
        """Resume the next paused trial; return its number."""
        number = self.pruner.next_waiting(self.standings, fresh=fresh)
        if number is not None:
            self.told(number)
        return number

    def given_up(self) -> int | None:
        """End the least promising paused trial; return its number."""
        number = self.pruner.least_promising(self.standings)
        if number is not None:
            self.ended(number, TrialState.PRUNED)
        return number
