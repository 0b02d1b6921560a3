"""A trial as its program reports it, on a clock that the test sets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bssearch.errors import UsageError
from bssearch.executors.programs import command
from bssearch.executors.programs.command import ReportedTrial
from bssearch.executors.programs.reports import Report
from bssearch.records import COULD_NOT_PAUSE, Goal, Observation, SecondsBasis, Target, TrialRequest, TrialState
from tests.executors.line_workload import request_trial
from tests.factories import changed

REQUEST = replace(request_trial(1, seconds=10.0), target=Target(metric="accuracy", value=0.9))


class Told:
    """A trial with its observations; reports come after its start at 100 s."""

    def __init__(self, request: TrialRequest = REQUEST, *, needs_samples: bool = False) -> None:
        self.observed: list[Observation] = []
        self.trial = ReportedTrial(request, self.observed.append, 100.0, needs_samples=needs_samples)

    def takes(self, at: float, step: int, seconds: float | None = None, **values: float) -> Told:
        self.trial.take(Report(step, values, seconds), 100.0 + at)
        return self

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        return [(one.step, one.train_seconds, one.metric) for one in self.observed]

    @property
    def state(self) -> TrialState | None:
        return None if self.trial.ending is None else self.trial.ending.state


def test_seconds_of_the_program_are_those_that_count() -> None:
    told = Told().takes(5.0, 10, 1.0, accuracy=0.5).takes(50.0, 20, 2.0, accuracy=0.95, loss=0.25)
    assert told.curve == [(10, 1.0, 0.5), (20, 2.0, 0.95)] and told.observed[1].loss == 0.25
    outcome = told.trial.outcome()
    assert (outcome.state, outcome.seconds_basis) == (TrialState.REACHED, SecondsBasis.REPORTED)
    assert outcome.time_to_target_s == pytest.approx(1.0 + 0.4 / 0.45)
    assert outcome.samples == 20 * REQUEST.plan.configuration.batch_size


def test_samples_of_the_program_are_those_that_count_and_others_are_assumed() -> None:
    size = REQUEST.plan.configuration.batch_size
    told = Told().takes(5.0, 10, samples=7.0, accuracy=0.5).takes(6.0, 20, accuracy=0.6).takes(7.0, 30, accuracy=0.7)
    assert [one.samples for one in told.observed] == [7, 7 + 10 * size, 7 + 20 * size]
    for samples in (6.0, math.nan, 7 + 20 * size + 0.5):
        with pytest.raises(UsageError, match="samples at step 40"):
            told.takes(8.0, 40, samples=samples, accuracy=0.5)
    assert told.trial.failed(TrialState.FAILED, "as the test has it").samples == 7 + 20 * size


@pytest.mark.parametrize(("needs", "warnings"), [({}, 1), ({"samples": 30.0}, 0)])
def test_a_study_about_samples_warns_of_a_program_that_does_not_report_them(
    needs: dict[str, float], warnings: int
) -> None:
    told = Told(needs_samples=True).takes(5.0, 10, 1.0, accuracy=0.95, **needs)
    assert len([one for one in told.trial.outcome().warnings if "samples_to_target" in one]) == warnings
    assert not Told().takes(5.0, 10, 1.0, accuracy=0.95).trial.outcome().warnings


@pytest.mark.parametrize("micro_batch_size", [8, 32])
def test_gradient_norms_in_reports_near_the_target_tell_the_noise_scale(micro_batch_size: int) -> None:
    split = replace(
        REQUEST.plan.configuration,
        batch_size=32,
        micro_batch_size=micro_batch_size,
        accumulation_steps=32 // micro_batch_size,
    )
    told = Told(changed(REQUEST, configuration=split, train_seconds_limit=99.0))
    norms = {"micro_gradient_norm": (1 + 40 / 8) ** 0.5, "gradient_norm": (1 + 40 / 32) ** 0.5}
    for step in range(20):
        told.takes(step, step, float(step), accuracy=0.89 if step else 0.1, **norms)
    told.trial.left(0)
    noise = told.trial.outcome().noise
    if micro_batch_size == 8:
        assert noise.passes == 19 and noise.scale == pytest.approx(40)
    else:
        assert noise.passes is None


def test_the_wall_clock_begins_with_step_0() -> None:
    told = Told().takes(5.0, 0, accuracy=0.1).takes(6.5, 10, accuracy=0.5)
    assert told.curve == [(0, 0.0, 0.1), (10, 1.5, 0.5)]
    states = []
    for now in (110.0, 115.5):
        told.trial.look(None, now)
        states.append(told.state)
    assert states == [None, TrialState.EXHAUSTED]
    assert told.trial.outcome().seconds_basis is SecondsBasis.WALL


def test_steps_before_the_first_report_count_at_the_pace_of_those_after_it() -> None:
    told = Told().takes(5.0, 10, accuracy=0.5)
    assert told.curve == []
    told.takes(7.0, 30, accuracy=0.6)
    assert [one.step for one in told.observed] == [10, 30]
    assert [one.train_seconds for one in told.observed] == pytest.approx([1.0, 3.0])


def test_a_lone_report_counts_by_the_time_since_the_start() -> None:
    told = Told().takes(5.0, 10, accuracy=0.95)
    told.trial.left(1)
    assert told.curve == [(10, 5.0, 0.95)]
    assert told.state is TrialState.REACHED, "whatever the program did after it"


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([(1, 10, None), (2, 10, None)], "step 10 after step 10: steps must rise"),
        ([(1, 10, 1.0), (2, 5, 2.0)], "step 5 after step 10"),
        ([(1, 0, None), (2, 10, 1.0)], "seconds only sometimes: step 10"),
        ([(1, 0, 0.0), (2, 10, None)], "seconds only sometimes: step 10"),
        ([(1, 10, 2.0), (2, 20, 1.5)], "1.5 seconds after 2"),
    ],
)
def test_what_runs_backwards_or_comes_at_times_is_refused(
    reports: list[tuple[float, int, float | None]], said: str
) -> None:
    told = Told().takes(*reports[0], accuracy=0.1)
    with pytest.raises(UsageError, match=said) as caught:
        told.takes(*reports[1], accuracy=0.2)
    outcome = told.trial.failed(TrialState.FAILED, caught.value.message)
    assert (outcome.state, outcome.steps, outcome.final_metric) == (TrialState.FAILED, reports[0][1], 0.1)
    assert outcome.last_miss_step == reports[0][1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"accuracy": math.nan}, "accuracy is not finite"),
        ({"accuracy": 1e200}, "accuracy = 1e+200 is beyond 1e+100"),
        ({"accuracy": 0.99, "loss": math.inf}, "the loss is not finite"),
        ({"loss": math.nan}, "the loss is not finite"),
    ],
)
def test_what_is_no_number_diverges(values: dict[str, float], said: str) -> None:
    told = Told().takes(1.0, 0, accuracy=0.1).takes(2.0, 10, **values)
    assert told.trial.ending is not None and told.state is TrialState.DIVERGED
    assert told.trial.ending.reason.startswith(f"{said}: batch size 8, learning rate 0.05, step 10")
    assert len(told.observed) == 1


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_metric_at_times_is_observed_at_those_and_the_limit_counts_at_all(told: Told) -> None:
    for step, values in ((0, {"accuracy": 0.1}), (10, {"loss": 2.0}), (20, {"accuracy": 0.3}), (30, {"loss": 1.0})):
        told.takes(step / 10, step, step / 10, **values)
    assert [step for step, *_ in told.curve] == [0, 20]
    told.takes(4.0, 40, 10.5, loss=0.5)
    outcome = told.trial.outcome()
    assert (outcome.state, outcome.steps, outcome.train_seconds) == (TrialState.EXHAUSTED, 40, 10.5)
    assert (outcome.last_miss_step, outcome.last_miss_seconds) == (20, 2.0)


def test_a_trial_that_trains_on_keeps_where_it_crossed() -> None:
    told = Told(changed(REQUEST, stop_at_target=False))
    for step, accuracy in ((0, 0.1), (10, 0.95), (20, 0.97)):
        told.takes(step, step, step / 10, accuracy=accuracy)
    told.trial.left(0)
    outcome = told.trial.outcome()
    assert (outcome.state, outcome.first_hit_step, outcome.best_metric) == (TrialState.REACHED, 10, 0.97)


@pytest.mark.parametrize(("code", "state"), [(0, TrialState.EXHAUSTED), (1, None)])
def test_a_program_that_leaves_has_an_end_by_what_it_said(code: int, state: TrialState | None) -> None:
    """The exit code decides the end of a failed program."""
    told, silent = Told(), Told()
    told.takes(1.0, 10, 1.0, accuracy=0.5)
    told.trial.left(code)
    assert told.state is state
    silent.takes(1.0, 10, 1.0, loss=0.5)
    with pytest.raises(UsageError, match="without a report of the target's metric"):
        silent.trial.left(0)


@pytest.mark.parametrize(
    ("asked", "state"), [(TrialState.CANCELLED, TrialState.CANCELLED), (TrialState.PAUSED, TrialState.PRUNED)]
)
def test_a_stop_is_one_and_a_pause_becomes_one(asked: TrialState, state: TrialState) -> None:
    told = Told().takes(1.0, 0, accuracy=0.1)
    told.trial.look((asked, "asked"), 102.0)
    outcome = told.trial.outcome()
    told.takes(3.0, 10, accuracy=0.99)
    assert len(told.observed) == 1, "what comes later is passed over"
    assert outcome.state is state
    assert (COULD_NOT_PAUSE in outcome.reason) is (asked is TrialState.PAUSED)


def test_reports_in_bursts_make_the_wall_clock_coarse_and_are_told() -> None:
    steady, bursts, own = Told(), Told(), Told()
    for index in range(12):
        steady.takes(1.0 + 0.1 * index, index, accuracy=0.1)
        bursts.takes(1.0 + 0.8 * (index // 6) + 1e-5 * index, index, accuracy=0.1)
        own.takes(1.0 + 0.8 * (index // 6) + 1e-5 * index, index, 0.1 * index, accuracy=0.1)
    for told in (steady, bursts, own):
        told.trial.left(0)
    assert steady.trial.outcome().warnings == own.trial.outcome().warnings == ()
    (warning,) = bursts.trial.outcome().warnings
    assert "came in bursts up to 0.8 s apart" in warning


def test_evaluations_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MOST_OBSERVATIONS", 3)
    told = Told()
    for step in range(3):
        told.takes(step, step, accuracy=0.1)
    with pytest.raises(UsageError, match="accuracy more than 3 times") as caught:
        told.takes(4.0, 4, accuracy=0.1)
    assert caught.value.hint is not None and "{evaluate_every}" in caught.value.hint


def test_steps_that_took_no_time_are_refused() -> None:
    told = Told().takes(0.0, 0, 0.0, accuracy=0.1)
    with pytest.raises(UsageError, match="0 seconds of training after step 5"):
        told.takes(1.0, 5, 0.0, accuracy=0.5)


@pytest.mark.parametrize(("wall", "is_refused"), [(0.5, True), (0.01, False)], ids=["of an epoch", "of a coarse clock"])
def test_seconds_that_stand_still_are_of_an_epoch(wall: float, is_refused: bool, told: Told) -> None:
    for number in range(1, 6):
        told.takes(wall * number, 10 * number, 0.4, accuracy=0.5)
    if is_refused:
        with pytest.raises(UsageError, match=r"0\.4 seconds in 6 reports, up to step 60"):
            told.takes(wall * 6, 60, 0.4, accuracy=0.95)
    else:
        assert told.takes(wall * 6, 60, 0.4, accuracy=0.95).state is TrialState.REACHED


@pytest.mark.parametrize(("seconds", "warns"), [(9.0, False), (250.0, True)])
def test_more_seconds_than_have_passed_are_warned_of(
    seconds: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 109.5)
    told = Told(changed(REQUEST, train_seconds_limit=1e3))
    told.takes(1.0, 10, 1.0, accuracy=0.5).takes(9.5, 20, seconds, accuracy=0.95)
    assert any("milliseconds" in one for one in told.trial.outcome().warnings) is warns


@pytest.mark.parametrize(
    ("target", "metric", "is_refused"),
    [
        (Target(metric="accuracy", value=0.9), 52.0, True),
        (Target(metric="accuracy", value=0.9), 0.95, False),
        (Target(metric="error", value=5.0, goal=Goal.MINIMIZE), 0.48, True),
        (Target(metric="loss", value=5.0, goal=Goal.MINIMIZE), 0.48, False),
        (Target(metric="score", value=0.9), 152.0, False),
    ],
)
def test_a_first_evaluation_that_is_met_in_another_unit_is_refused(
    target: Target, metric: float, is_refused: bool
) -> None:
    told = Told(replace(REQUEST, target=target))
    if is_refused:
        with pytest.raises(UsageError, match="in percent"):
            told.takes(1.0, 10, 1.0, **{target.metric: metric})
    else:
        assert told.takes(1.0, 10, 1.0, **{target.metric: metric}).state is TrialState.REACHED


@pytest.mark.parametrize(("epochs", "warns"), [((1, 2, 3), True), ((1, 1, 2), False)])
def test_steps_that_are_the_epochs_are_warned_of(epochs: tuple[int, ...], warns: bool, told: Told) -> None:
    for step, epoch in enumerate(epochs, start=1):
        told.takes(float(step), step, accuracy=0.95 if step == 3 else 0.5, epoch=epoch)
    assert any("step and epoch are the same" in one for one in told.trial.outcome().warnings) is warns
