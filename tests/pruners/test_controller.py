"""What a driver knows of its study's curves: its own trials', other drivers', earlier runs'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bssearch.history import History
from bssearch.pruners.base import Cap, Policy, Race
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.pruners.controller import Watch, policy_for
from bssearch.pruners.pace import Pace
from bssearch.pruners.seed_noise import PRIOR, PRIOR_FREEDOM, seed_noise
from bssearch.records import Observation, Phase, TrialRecord, TrialState
from bssearch.spec import StudySpec
from tests.factories import EPOCH, make_curve, make_probe, make_spec, make_trial
from tests.pruners.watched import make_watch, study_record

PAUSED, REACHED, RUNNING = TrialState.PAUSED, TrialState.REACHED, TrialState.RUNNING
TARGET = 0.9
LIMIT = 160.0
RUNG = 10.0
"""A sixteenth of the limit."""


@pytest.fixture(autouse=True)
def _own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path))


def spec(**pruner: Any) -> StudySpec:
    return make_spec(pruner={"name": "balanced", **pruner}, budget={"trials": 50, "trial_train_seconds": LIMIT})


def history(of: StudySpec, *trials: TrialRecord) -> History:
    return History(of, trials, {32: make_probe(32)})


def winner(number: int, seconds: float = 10.0) -> tuple[TrialRecord, list[Observation]]:
    """Return a trial that came evenly from 0 to the target, evaluated ten times before it, and its curve."""
    points = [(seconds * tenth / 10, TARGET * tenth / 10) for tenth in range(10)]
    return make_trial(number, seconds=seconds), make_curve(*points, (seconds * 1.02, 0.905))


def saved(watch: Watch, *numbers: int, size: int = 8) -> None:
    for number in numbers:
        file = watch.checkpoints.file_for(number)
        assert file is not None
        file.write_bytes(bytes(size))


def seen(watch: Watch, number: int, *points: tuple[float, float], may_stop: bool = True) -> TrialState | None:
    """Show a watch the evaluations of one of its own trials; return the state it is to be stopped in, if any."""
    watch.started(number)
    stop = None
    for observation in make_curve(*points):
        stop = stop or watch.observe(number, observation, may_stop=may_stop)
    return None if stop is None else stop[0]


def test_a_trial_of_its_own_is_told_as_it_runs_and_its_end_says_when_it_got_there() -> None:
    of = spec()
    watch = make_watch(of, {})
    assert seen(watch, 0, (0.0, 0.1), (4.0, 0.5), (8.0, 0.95), may_stop=False) is None
    assert watch.curves[0].train_seconds == [0.0, 4.0]
    watch.update(history(of, make_trial(0, seconds=7.5)))
    assert watch.curves[0].train_seconds == [0.0, 4.0, 7.5]
    assert watch.curves[0].gain == TARGET


@pytest.mark.parametrize("first", [RUNNING, None])
def test_trials_of_other_drivers_and_of_earlier_runs_are_taken_from_the_store_once_they_have_ended(
    first: TrialState | None,
) -> None:
    of = spec()
    trial, curve = winner(0)
    watch = make_watch(of, {0: curve, 1: make_curve((0.0, 0.1), (5.0, math.nan), (6.0, 0.3))})
    if first is RUNNING:
        watch.update(history(of, replace(trial, state=RUNNING, outcome=None)))
        assert watch.curves == {}
    pruned = make_trial(1, state=TrialState.PRUNED, seconds=6.0)
    for _ in range(2):
        watch.update(history(of, trial, pruned))
        assert watch.curves[0].train_seconds[-2:] == [9.0, 10.0]
        assert watch.curves[1].gains == [0.1, 0.1, 0.3]
    assert isinstance(watch.policy, Cap)
    assert [seconds for _, seconds in watch.policy.winners] == [10.0]


def test_confirmation_runs_are_no_part_of_the_race() -> None:
    of = spec()
    watch = make_watch(of, {})
    watch.update(history(of, make_trial(0, phase=Phase.CONFIRM, seconds=1.0)))
    assert watch.curves == {}
    assert watch.policy.cap == math.inf


def test_what_is_past_the_cap_is_capped_and_what_is_hopeless_pauses_and_says_why() -> None:
    of = spec(slack=1.5)
    trial, curve = winner(0)
    watch = make_watch(of, {0: curve})
    watch.update(history(of, trial))
    assert seen(watch, 1, (0.0, 0.0), (2.0, 0.4), (14.0, 0.85)) is None
    watch.started(2)
    (late,) = make_curve((15.1, 0.85))
    assert watch.observe(2, late, may_stop=True) == (TrialState.CAPPED, "past 1.5 × the 10 s of the fastest trial")
    watch.started(3)
    (slow,) = make_curve((7.0, 0.05))
    assert watch.observe(3, slow, may_stop=True) == (
        PAUSED,
        "at 7 s too far behind the fastest trial, which took 10 s",
    )
    assert watch.observe(3, slow, may_stop=False) is None, "evidence runs on"


def test_before_the_first_hit_trials_pause_at_their_rung() -> None:
    of = spec()
    watch = make_watch(of, {})
    watch.started(0)
    (first,) = make_curve((RUNG, 0.3))
    assert watch.observe(0, first, may_stop=True) == (
        PAUSED,
        "at 10 s others were ahead, and none had reached the target yet",
    )


def test_of_three_that_paused_the_best_goes_on_and_one_alone_does_where_there_is_nothing_else() -> None:
    of = spec()
    watch = make_watch(of, {})
    trials = []
    for number, gain in enumerate((0.2, 0.4, 0.3)):
        assert seen(watch, number, (RUNG, gain)) is PAUSED
        saved(watch, number)
        trials.append(make_trial(number, state=PAUSED, seconds=RUNG))
        watch.update(history(of, *trials))
        due = watch.next_waiting(history(of, *trials), fresh=True)
        assert (due and due.number) == (1 if number == 2 else None)
    last = watch.next_waiting(history(of, *trials), fresh=False)
    assert last is not None
    assert last.number == 2


def test_a_better_winner_gives_what_waits_hope_and_it_goes_on_before_another_begins() -> None:
    of = spec(slack=1.0)
    trial, curve = winner(0)
    late = make_curve((0.0, 0.0), (8.0, 0.1), (8.8, 0.8))
    watch = make_watch(of, {0: curve, 2: late})
    watch.update(history(of, trial))
    assert seen(watch, 1, (5.0, 0.1)) is PAUSED
    saved(watch, 1)
    waiting = make_trial(1, state=PAUSED, seconds=5.0)
    assert watch.next_waiting(history(of, trial, waiting), fresh=True) is None
    after = history(of, trial, waiting, make_trial(2, seconds=9.0))
    watch.update(after)
    assert watch.next_waiting(after, fresh=True) is waiting
    assert watch.next_waiting(after, fresh=True) is None, "once"


def test_a_trial_without_a_checkpoint_or_that_goes_on_elsewhere_is_passed_over() -> None:
    of = spec()
    watch = make_watch(of, {})
    trials = [make_trial(number, state=PAUSED, seconds=RUNG) for number in range(3)]
    for number in range(3):
        seen(watch, number, (RUNG, 0.1 * number))
    saved(watch, 0, 1)
    elsewhere = history(of, trials[0], replace(trials[1], state=RUNNING, outcome=None), trials[2])
    watch.update(elsewhere)
    found = watch.next_waiting(elsewhere, fresh=False)
    assert found is not None
    assert found.number == 0, "2 has no file, 1 runs"
    assert watch.next_waiting(elsewhere, fresh=False) is None


def test_a_trial_whose_checkpoint_goes_while_it_waits_is_passed_over() -> None:
    of = spec()
    watch = make_watch(of, {})
    trials = [make_trial(number, state=PAUSED, seconds=RUNG) for number in range(2)]
    for number in range(2):
        seen(watch, number, (RUNG, 0.1 * number))
        saved(watch, number)
    watch.update(history(of, *trials))
    watch.checkpoints.forget(1)
    assert watch.next_waiting(history(of, *trials), fresh=False) is trials[0]
    assert watch.next_waiting(history(of, *trials), fresh=False) is None


def test_a_trial_that_paused_in_an_earlier_run_goes_on_in_this_one() -> None:
    of = spec()
    curve = {0: make_curve((5.0, 0.2), (RUNG, 0.3))}
    paused = make_trial(0, state=PAUSED, seconds=RUNG)
    saved(make_watch(of, {}), 0)
    watch = make_watch(of, curve)
    watch.update(history(of, paused))
    assert watch.next_waiting(history(of, paused), fresh=False) is paused
    watch.started(0)
    (further,) = make_curve((12.0, 0.5))
    watch.observe(0, further, may_stop=True)
    assert watch.curves[0].gains == [0.2, 0.3, 0.5]
    watch.update(history(of, make_trial(0, seconds=15.0)))
    assert watch.curves[0].train_seconds == [5.0, RUNG, 12.0, 15.0]
    assert not watch.checkpoints.has(0)


def test_a_trial_that_paused_again_elsewhere_waits_with_all_of_its_curve() -> None:
    of = spec()
    curves = {0: make_curve((RUNG, 0.3))}
    watch = make_watch(of, curves)
    paused = make_trial(0, state=PAUSED, seconds=RUNG)
    saved(watch, 0)
    watch.update(history(of, paused))
    running = history(of, replace(paused, state=RUNNING, outcome=None, ended_at=None))
    assert watch.next_waiting(running, fresh=False) is None
    watch.forget(0)
    curves[0] = make_curve((RUNG, 0.3), (2 * RUNG, 0.4))
    again = replace(paused, ended_at=EPOCH + timedelta(hours=1))
    watch.update(history(of, again))
    assert watch.curves[0].gains == [0.3, 0.4]
    assert watch.next_waiting(history(of, again), fresh=False) is again


def test_what_takes_too_much_disk_is_given_up_the_least_promising_first() -> None:
    of = spec(checkpoint_gib=1000 / 2**30)
    watch = make_watch(of, {})
    for number, gain in enumerate((0.2, 0.1, 0.3)):
        seen(watch, number, (RUNG, gain))
        saved(watch, number, size=400)
    given_up = []
    while (excess := watch.excess()) is not None:
        given_up.append(excess)
        watch.checkpoints.forget(excess)
    assert given_up == [1]
    assert watch.checkpoints.bytes == 800


def test_where_trials_cannot_be_saved_that_is_news_once_and_the_hopeless_stop_for_good() -> None:
    of = spec()
    trial, curve = winner(0)
    watch = make_watch(of, {0: curve})
    assert watch.cannot_wait()
    assert not watch.cannot_wait()
    assert seen(watch, 5, (RUNG, 0.1)) is None, "before the first hit nothing is stopped"
    watch.update(history(of, trial))
    assert seen(watch, 1, (8.0, 0.05)) is TrialState.PRUNED
    assert not make_watch(spec(checkpoint_gib=0.0), {}).cannot_wait(), "nothing was to be saved"
    assert not make_watch(make_spec(), {}).cannot_wait(), "nothing pauses"


@pytest.mark.parametrize(
    ("name", "kind"), [("none", Policy), ("cap", Cap), ("race", Race), ("safe", Pace), ("fast", Pace)]
)
def test_a_spec_has_its_policy(name: str, kind: type[Policy]) -> None:
    policy = policy_for(make_spec(pruner={"name": name, "slack": 1.7, "lag": 2.5}))
    assert type(policy) is kind
    assert policy.limit == 10.0
    if isinstance(policy, Cap):
        assert policy.slack == 1.7
    if isinstance(policy, Race):
        assert policy.lag == 2.5


def test_objectives_that_do_not_grow_with_the_seconds_alone_have_no_race() -> None:
    assert type(policy_for(make_spec(objective="samples_to_target"))) is Policy
    assert type(policy_for(make_spec(objective="cost_to_target", price_per_device_hour=2.0))) is Race


def slack_after(*trials: TrialRecord, **pruner: Any) -> float:
    of = spec(**pruner)
    watch = make_watch(of, {})
    watch.update(history(of, *trials))
    assert isinstance(watch.policy, Cap)
    return watch.policy.slack


def test_the_slack_follows_from_repeats_but_not_where_a_run_of_them_was_stopped() -> None:
    first = 1 + 2 * PRIOR
    repeats = [make_trial(number, seconds=seconds) for number, seconds in enumerate((1.0, 2.0, 4.0))]
    alone = [
        make_trial(number, seconds=seconds, learning_rate=seconds) for number, seconds in enumerate((1.0, 2.0, 4.0))
    ]
    stopped = make_trial(3, state=TrialState.CAPPED, seconds=5.0)
    squares = 2 * math.log(2) ** 2
    assert slack_after() == pytest.approx(first)
    assert slack_after(*alone) == pytest.approx(first)
    wide = 1 + 2 * math.sqrt((PRIOR_FREEDOM * PRIOR**2 + squares) / (PRIOR_FREEDOM + 2))
    assert slack_after(*repeats) == pytest.approx(wide)
    assert slack_after(*repeats, stopped) == pytest.approx(first), "of these only the lucky ones have a time"
    assert slack_after(*repeats, slack=1.2) == 1.2, "as the spec says"
    micro = replace(repeats[1], configuration=repeats[1].configuration.in_micro_batches(8))
    assert slack_after(repeats[0], micro, repeats[2]) == pytest.approx(wide), "micro-batches make no difference"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({}, PRIOR),
        ({"a": [3.0], "b": [5.0]}, PRIOR),
        ({"a": [1.0, 1.0, 1.0, 1.0, 1.0]}, PRIOR / math.sqrt(2)),
        ({"a": [1.0, math.e**2], "b": [1.0, math.e**2]}, math.sqrt((PRIOR_FREEDOM * PRIOR**2 + 4) / 6)),
    ],
)
def test_the_noise_of_seeds_is_pooled_over_configurations(
    times: Mapping[str, Sequence[float]], expected: float
) -> None:
    told = [(name, seconds) for name, all_seconds in times.items() for seconds in all_seconds]
    assert seed_noise(told) == pytest.approx(expected)


def test_checkpoints_of_two_studies_are_kept_apart_and_stay_where_one_is_renamed(tmp_path: Path) -> None:
    one = study_record(spec())
    kept = Checkpoints(one)
    others = [
        Checkpoints(replace(one, created_by="other")),
        Checkpoints(replace(one, created_at=EPOCH + timedelta(seconds=1))),
    ]
    assert kept.bytes == 0
    assert not kept.folder.exists()
    file = kept.file_for(3)
    assert file is not None
    assert file.is_relative_to(tmp_path)
    file.write_bytes(b"abc")
    assert kept.has(3)
    assert not kept.has(4)
    assert kept.bytes == 3
    assert not any(other.has(3) for other in others)
    assert Checkpoints(replace(one, name="renamed")).has(3)
    file.with_name(f"{file.name}.part").touch()
    kept.forget(4)
    kept.close()
    assert kept.has(3)
    kept.forget(3)
    assert not list(kept.folder.iterdir())
    kept.close()
    assert not kept.folder.exists()
    kept.clear()
    kept.clear()
    assert not kept.folder.exists()


def test_where_nothing_can_be_written_there_are_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(blocked))
    kept = Checkpoints(study_record(spec()))
    assert kept.file_for(0) is None
    assert not kept.has(0)
    assert kept.bytes == 0
    kept.forget(0)
    kept.clear()
