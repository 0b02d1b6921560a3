"""Trials whose checkpoints lie in a store elsewhere, one slow transfer at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from bssearch.errors import CheckpointError
from bssearch.executors.base import Ended, Event, Executor, Observed
from bssearch.pruners import transfer
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.records import Observation, TrialOutcome, TrialRequest, TrialState
from bssearch.search.carrier import Carrier
from tests.executors.line_workload import request_endless_trial
from tests.factories import make_study_record, not_none
from tests.pruners.stores import Troubled, troubled


@dataclass
class Noting:
    """An executor that notes what it is asked for and says what it is given to say."""

    to_say: list[Event] = field(default_factory=list)
    submitted: list[TrialRequest] = field(default_factory=list)
    stopped: list[tuple[int, TrialState, str]] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        self.submitted.append(request)

    def stop(self, number: int, state: TrialState, reason: str) -> None:
        self.stopped.append((number, state, reason))

    def events(self, timeout: float) -> list[Event]:
        said, self.to_say = self.to_say, []
        return said


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Troubled]]:
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", f"troubled://{tmp_path}/store")
    with troubled() as found:
        yield found


def paused(number: int) -> Ended:
    return Ended(number, TrialOutcome(state=TrialState.PAUSED, reason="later", steps=7))


def until_ended(carrier: Carrier) -> Ended:
    """Return the next end that a carrier tells, however long that takes."""
    while True:
        for event in carrier.events(0.05):
            if isinstance(event, Ended):
                return event


def save(checkpoints: Checkpoints, number: int, content: bytes = b"saved") -> Path:
    file = not_none(checkpoints.file_for(number))
    file.write_bytes(content)
    return file


def resuming(number: int, file: Path) -> TrialRequest:
    return replace(request_endless_trial(number), checkpoint=str(file), resumes=True)


def with_a_trial_in_the_store() -> tuple[Checkpoints, Noting, Carrier, Path]:
    """Return a carrier that has sent trial 1, with its checkpoints, its executor, and the trial's file here."""
    checkpoints, executor = Checkpoints(make_study_record()), Noting()
    carrier = Carrier(cast(Executor, executor), checkpoints)
    file = save(checkpoints, 1)
    executor.to_say = [paused(1)]
    assert until_ended(carrier) == paused(1)
    return checkpoints, executor, carrier, file


def test_while_a_file_is_on_its_way_the_others_are_heard_and_its_trial_ends_once_it_is_there(
    store: type[Troubled],
) -> None:
    checkpoints, executor = Checkpoints(make_study_record()), Noting()
    carrier = Carrier(cast(Executor, executor), checkpoints)
    file = save(checkpoints, 1)
    seen = Observed(2, Observation(step=1, samples=8, train_seconds=1.0, metric=0.5, loss=None, learning_rate=0.1))
    store.holds = True
    executor.to_say = [paused(1)]
    assert carrier.events(0.0) == []
    assert store.is_held.wait(60)
    executor.to_say = [seen]
    assert carrier.events(0.0) == [seen]
    assert not checkpoints.has(1)
    store.goes_on.set()
    assert until_ended(carrier) == paused(1)
    assert checkpoints.has(1)
    assert not file.exists()


def test_a_trial_goes_on_once_its_file_is_here_and_ends_then_where_that_was_asked_for(store: type[Troubled]) -> None:
    _, executor, carrier, file = with_a_trial_in_the_store()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"of before")
    store.holds = True
    carrier.submit(resuming(1, file), paused(1).outcome)
    assert store.is_held.wait(60)
    carrier.stop(1, TrialState.CANCELLED, "not wanted")
    assert carrier.events(0.0) == [] and not executor.submitted and not executor.stopped
    store.goes_on.set()
    while not executor.stopped:
        assert carrier.events(0.05) == []
    assert [one.number for one in executor.submitted] == [1]
    assert executor.stopped == [(1, TrialState.CANCELLED, "not wanted")]
    assert file.read_bytes() == b"saved"


def test_a_trial_that_is_to_be_paused_before_it_has_gone_on_is_so_at_once_and_as_far_as_it_was(
    store: type[Troubled],
) -> None:
    checkpoints, executor, carrier, file = with_a_trial_in_the_store()
    store.holds = True
    carrier.submit(resuming(1, file), paused(1).outcome)
    assert store.is_held.wait(60)
    carrier.stop(1, TrialState.PAUSED, "stopped by the user")
    ended = until_ended(carrier)
    assert ended.outcome == replace(paused(1).outcome, reason="stopped by the user")
    store.goes_on.set()
    assert checkpoints.has(1) and not executor.submitted


def test_a_file_that_is_not_wanted_any_more_is_in_the_way_of_no_later_one(store: type[Troubled]) -> None:
    _, executor, carrier, file = with_a_trial_in_the_store()
    store.holds = True
    carrier.submit(resuming(1, file), paused(1).outcome)
    assert store.is_held.wait(60)
    first = carrier._arriving[1].transfer
    carrier.stop(1, TrialState.PAUSED, "stopped by the user")
    assert until_ended(carrier).outcome.state is TrialState.PAUSED
    carrier.submit(resuming(1, file), paused(1).outcome)
    store.goes_on.set()
    while not executor.submitted:
        assert carrier.events(0.05) == []
    first.wait()
    with pytest.raises(CheckpointError, match="not wanted any more"):
        first.result()
    assert [one.name for one in file.parent.iterdir()] == [file.name] and file.read_bytes() == b"saved"


def test_of_a_trial_that_is_paused_again_once_its_file_has_come_nothing_stays_here(store: type[Troubled]) -> None:
    checkpoints, executor, carrier, file = with_a_trial_in_the_store()
    carrier.submit(resuming(1, file), paused(1).outcome)
    while not file.exists():
        assert not executor.submitted
    carrier.stop(1, TrialState.PAUSED, "stopped by the user")
    assert until_ended(carrier).outcome.state is TrialState.PAUSED
    assert not file.exists() and checkpoints.has(1)


def test_a_store_with_which_nothing_happens_is_given_up(store: type[Troubled], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_SECONDS", 0.2)
    checkpoints, executor = Checkpoints(make_study_record()), Noting()
    carrier = Carrier(cast(Executor, executor), checkpoints)
    file = save(checkpoints, 1)
    store.holds = True
    executor.to_say = [paused(1)]
    outcome = until_ended(carrier).outcome
    assert (outcome.state, outcome.steps) == (TrialState.PRUNED, 7)
    assert "later; could not be paused: " in outcome.reason
    assert "nothing happened for 0.2 s" in outcome.reason
    assert not file.exists()
    carrier.submit(resuming(2, file))
    outcome = until_ended(carrier).outcome
    assert (outcome.state, executor.submitted) == (TrialState.FAILED, [])


def test_what_lies_in_a_folder_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / uuid.uuid4().hex))
    checkpoints, executor = Checkpoints(make_study_record()), Noting()
    carrier = Carrier(cast(Executor, executor), checkpoints)
    file = save(checkpoints, 1)
    executor.to_say = [paused(1)]
    assert carrier.events(0.0) == [paused(1)]
    carrier.submit(resuming(1, file))
    assert [one.number for one in executor.submitted] == [1]
    assert file.exists()
