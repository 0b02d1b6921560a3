"""A driver that loses the lease of a trial, and what it may still store."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.executors.base import Event
from bssearch.records import (
    Phase,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.search.driver import TIMING, Listener
from bssearch.search.history import History
from bssearch.storage.repository import open_store
from tests.factories import make_environment, make_spec
from tests.search.law import LawExecutor

SPEC = make_spec(budget={"trials": 6, "trial_train_seconds": 100.0}, confirm={"runs": 0}, pruner={"checkpoint_gib": 0})
LOST = 3


@dataclass
class Slow(LawExecutor):
    """Gives one event of a trial at a time; after the second evaluation of trial 3, another driver marks it lost."""

    url: str = ""
    waiting: deque[Event] = field(default_factory=deque)
    observed: int = 0

    def events(self, timeout: float) -> list[Event]:
        if not self.waiting:
            self.waiting.extend(super().events(timeout))
        if not self.waiting:
            return []
        event = self.waiting.popleft()
        if isinstance(event, TrialObserved) and event.number == LOST:
            self.observed += 1
            if self.observed == 3:
                self.lose()
        if isinstance(event, TrialEnded):
            self.waiting.clear()
        return [event]

    def lose(self) -> None:
        with open_store(self.url) as other:
            assert other.leases.mark_lost(SPEC.name, is_alive=lambda owner: False) == [LOST]


class Ended(Listener):
    """Keeps the numbers of ended trials, and counts the observations of each trial."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.observations: Counter[int] = Counter()

    def observed(self, observed: TrialObserved) -> None:
        self.observations[observed.number] += 1

    def ended(self, trial: TrialRecord, history: History) -> None:
        self.numbers.append(trial.number)


@pytest.mark.parametrize(("looks_after", "observed"), [(60.0, 3), (-1.0, 2)], ids=["by a write", "by a look before it"])
def test_a_driver_drops_a_trial_whose_lease_it_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_after: float, observed: int
) -> None:
    monkeypatch.setattr("bssearch.search.driver.FLUSH_SECONDS", -1.0)
    monkeypatch.setattr("bssearch.search.driver.HEARTBEAT_SECONDS", looks_after)
    url = f"sqlite:///{tmp_path}/study.db"
    executor, listener = Slow(url=url), Ended()
    run_study(SPEC, Launch(db=url, make_executor=lambda *_: executor, listener=listener))
    with open_store(url, write=False) as store:
        trials = store.trials.of(SPEC.name)
        curves = store.trials.curves(SPEC.name, [trial.number for trial in trials])
    assert sorted(listener.numbers) == [trial.number for trial in trials]
    assert listener.observations[LOST] == observed
    lost = trials[LOST - 1]
    assert lost.outcome is not None
    assert (lost.state, lost.outcome.steps) == (TrialState.LOST, 25)
    assert [one.step for one in curves[LOST]] == [0, 25]
    assert {number: len(curve) for number, curve in curves.items() if number != LOST} == {
        trial.number: 5 for trial in trials if trial.number != LOST
    }
    assert executor.stopped[LOST] == (TrialState.CANCELLED, "its lease was lost")
    assert [trial.retry_of for trial in trials if trial.retry_of] == [LOST]
    assert sum(not trial.state.is_missing for trial in trials if trial.phase is Phase.SEARCH) == SPEC.budget.trials


CONFIRMED = make_spec(budget={"trials": 5, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 2})
CONFIRMING = f"confirm on {make_environment().host}"


def test_a_driver_writes_nothing_under_a_claim_that_it_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bssearch.search.driver.LOOK_SECONDS", 0.01)
    url = f"sqlite:///{tmp_path}/study.db"
    found = dict[str, object]()

    class Suspended(LawExecutor):
        def measure_step_time(self, request: StepTimeRequest) -> StepTime:
            self.lose(TIMING)
            return super().measure_step_time(request)

        def submit(self, request: TrialRequest) -> None:
            if request.plan.phase is Phase.CONFIRM:
                self.lose(CONFIRMING)
            super().submit(request)

        def lose(self, claim: str) -> None:
            if claim not in found:
                found[claim] = "lost"
                with open_store(url) as other:
                    assert other.leases.claim(
                        "toy", claim, owner="other", lease_seconds=60.0, is_alive=lambda owner: False
                    )

    class Waits(Listener):
        def note(self, message: str) -> None:
            for claim in (TIMING, CONFIRMING):
                if message == f"waiting for another driver ({claim})":
                    with open_store(url) as other:
                        confirmed = other.trials.of("toy", phase=Phase.CONFIRM)
                        found[claim] = len(other.probes.visits("toy")), [trial.state for trial in confirmed]
                        other.leases.release("toy", claim, owner="other")

    run_study(CONFIRMED, Launch(db=url, make_executor=lambda *_: Suspended(), listener=Waits()))
    assert found[TIMING] == (0, [])
    with open_store(url) as store:
        compared = {one.configuration.batch_size for one in store.trials.of("toy", phase=Phase.CONFIRM)}
    assert 1 < len(compared) < len(CONFIRMED.batch_sizes)
    visits = len(CONFIRMED.batch_sizes) + (COMPARING_VISITS - FIRST_VISITS) * len(compared)
    assert found[CONFIRMING] == (visits, [TrialState.REACHED])
