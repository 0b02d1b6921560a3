"""The driver with a simulated executor, its shifts, the estimate of remaining time, and refused stored
configurations."""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    BSSearchError,
    InterruptedRunError,
    Launch,
    LaunchError,
    SpecError,
    StudySpec,
    TargetNotReachedError,
    UsageError,
    audit_study,
    confirm_study,
    enqueue,
    open_store,
    rerun,
    run_study,
)
from bssearch.analysis.answer import Answer
from bssearch.commands.display import CONFIRMATION_RUNS, LIMIT_SHARE, seconds_left
from bssearch.executors.base import Event
from bssearch.records import (
    REFUSED,
    Goal,
    MetricInfo,
    Phase,
    Target,
    TrialEnded,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)
from bssearch.search.confirmation import next_run
from bssearch.search.driver import Interrupts, Shift
from bssearch.search.history import History
from bssearch.search.stored_finding import SearchEnd
from bssearch.settings import user_name
from bssearch.spec import PrunerSpec, problem_with
from bssearch.storage.transfer.study_copy import read_study
from tests.factories import EPOCH, SPEC, make_environment, make_probe, make_spec, make_trial, not_none
from tests.schema import execute
from tests.search.law import SHARES, LawExecutor, interrupt, step_seconds, trials_in, url_in
from tests.search.test_pausing_driver import Dies, SteppingLaw, die, study_spec
from tests.waiting import Ear

BUDGET = {"trials": 40, "trial_train_seconds": 100.0}
# A short study without confirmation
SHORT: dict[str, Any] = {"budget": {**BUDGET, "trials": 9}, "confirm": {"runs": 0}}


def run(spec: StudySpec, folder: Path, executor: LawExecutor) -> Answer:
    return run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor))


@dataclass(frozen=True)
class Ran:
    """A study that ran to its end."""

    answer: Answer
    executor: LawExecutor
    trials: list[TrialRecord]
    url: str


@pytest.fixture(scope="module", params=[1, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A study of 40 trials in one slot or in four."""
    folder, executor = tmp_path_factory.mktemp("ran"), LawExecutor(slots=request.param)
    answer = run(make_spec(budget=BUDGET), folder, executor)
    with open_store(url_in(folder), write=False) as store:
        return Ran(answer, executor, store.trials.of("toy"), url_in(folder))


def test_it_finds_the_optimum_of_the_law(ran: Ran) -> None:
    answer, executor, trials = ran.answer, ran.executor, ran.trials
    # B* = sqrt(B_crit * alpha / beta) = sqrt(30 * 10) = 17.3
    assert answer.optimal.batch_size in (16, 32)
    assert answer.optimal.test_metric == 0.89
    assert not_none(answer.speedup.over_largest).value > 1.5
    assert executor.most_at_once == executor.slots
    searched = [trial for trial in trials if trial.phase is Phase.SEARCH]
    assert len(searched) == 40
    assert min(Counter(trial.configuration.batch_size for trial in searched).values()) >= 2
    confirming = [request for request in executor.requests if request.plan.is_tested]
    assert len(confirming) == len(trials) - 40
    assert all(request.plan.limit_state is TrialState.EXHAUSTED for request in confirming)


def test_every_trial_keeps_its_starter_and_its_spec_when_the_study_changes(tmp_path: Path) -> None:
    first = make_spec(**SHORT)
    more = make_spec(**SHORT | {"budget": {**BUDGET, "trials": 12}})
    run(first, tmp_path, LawExecutor())
    run(more, tmp_path, LawExecutor(slots=2))
    with open_store(url_in(tmp_path), write=False) as store:
        trials = store.trials.of("toy")
        specs = [store.trials.spec("toy", trial.number) for trial in trials]
        study = store.studies.get("toy")
    assert {trial.started_by for trial in trials} == {user_name()}
    assert specs[0] == first.model_dump(mode="json")
    assert specs[-1] == study.spec and len({trial.spec_digest for trial in trials}) == 2


def test_every_trial_is_stored_with_its_evaluations_and_its_steps_times_the_step_time(ran: Ran) -> None:
    for trial in ran.trials:
        assert trial.outcome is not None and trial.state.is_finished
        steps, product = trial.outcome.steps_to_target, trial.steps_x_step_time_s
        assert (product is None) is (steps is None)
        if steps is not None:
            assert product == pytest.approx(steps * step_seconds(trial.configuration.batch_size))
    with open_store(ran.url, write=False) as store:
        curves = store.trials.curves("toy", [trial.number for trial in ran.trials])
        assert store.findings.current("toy") is not None, "the answer is kept"
    assert {len(curve) for curve in curves.values()} == {len(SHARES)}


def test_output_of_a_trial_is_stored_without_white_space(tmp_path: Path) -> None:
    class Prints(LawExecutor):
        def events(self, timeout: float) -> list[Event]:
            logs = {1: "a line\n", 2: " \n"}
            return [
                replace(one, log=logs.get(one.number, "")) if isinstance(one, TrialEnded) else one
                for one in super().events(timeout)
            ]

    run(make_spec(budget={**BUDGET, "trials": 5}, confirm={"runs": 0}), tmp_path, Prints())
    with open_store(url_in(tmp_path), write=False) as store:
        assert [store.trials.log("toy", number) for number in (1, 2, 3)] == ["a line\n", None, None]


def test_the_answer_is_kept_while_the_study_runs_and_takes_a_small_share_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated clock: an answer takes 1 s, a trial 10 s."""
    now: list[float] = [0.0]
    kept: list[float] = []
    ends: list[SearchEnd] = []

    def save(store: object, name: str, search_end: SearchEnd | None = None) -> None:
        if search_end is None:
            kept.append(now[0])
        else:
            ends.append(search_end)
        now[0] += 1.0

    monkeypatch.setattr("bssearch.search.driver.time.monotonic", lambda: now[0])
    monkeypatch.setattr("bssearch.search.driver.save_finding", save)
    monkeypatch.setattr("bssearch.search.driver.Driver._take_over", lambda self: None)
    with pytest.raises(TargetNotReachedError):
        run(make_spec(**SHORT), tmp_path, LawExecutor(reachable=False, on_look=lambda _: now.append(now.pop() + 10.0)))
    during, last = kept[:-1], kept[-1]
    assert during and all(later - earlier >= 1.0 / 0.02 for earlier, later in itertools.pairwise(during))
    assert last == now[0] - 1.0, "always at the end"
    assert [one.spent for one in ends] == [9], "and once at the end of the search"


def test_a_broken_batch_size_is_given_up_and_the_study_completes(tmp_path: Path) -> None:
    executor = LawExecutor(fails=frozenset({16}))
    answer = run(make_spec(budget={**BUDGET, "trials": 20}, confirm={"runs": 1}), tmp_path, executor)
    row = next(row for row in answer.batches if row.batch_size == 16)
    assert row.ended == {"failed": 3}
    assert {notice.code for notice in answer.warnings} >= {"failed_trials"}


def test_a_study_whose_trials_all_fail_stops_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"5 trials in a row failed, most recently trial .* broken"):
        run(make_spec(budget=BUDGET), tmp_path, LawExecutor(fails=frozenset(range(1000))))


def test_a_default_off_the_ladder_is_run_and_compared(tmp_path: Path) -> None:
    spec = make_spec(
        default={**SPEC["default"], "batch_size": 100}, budget={**BUDGET, "trials": 16}, confirm={"runs": 1}
    )
    answer = run(spec, tmp_path, LawExecutor())
    assert 100 in [row.batch_size for row in answer.batches]
    assert answer.speedup.over_default is not None
    assert "default_outside_space" in {notice.code for notice in answer.warnings}


def test_an_error_in_mid_study_leaves_no_trial_running(tmp_path: Path) -> None:
    def breaks(executor: LawExecutor) -> None:
        if len(executor.requests) == 5:
            raise LaunchError("no worker can be started")

    with pytest.raises(LaunchError, match="no worker"):
        run(make_spec(**SHORT), tmp_path, LawExecutor(on_submit=breaks))
    states = Counter(trial.state for trial in trials_in(tmp_path))
    assert (states[TrialState.RUNNING], states[TrialState.CANCELLED]) == (0, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trials": 0}, r"budget\.trials = 0: must be >= 1 \(given in Python\)"),
        ({"trials": 9, "trial_train_seconds": math.nan}, r"budget\.trial_train_seconds = nan"),
        ({"trials": "many"}, r"budget\.trials = 'many'"),
    ],
)
def test_a_spec_made_in_python_is_checked_before_any_write(
    tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    spec = make_spec()
    for budget in (spec.budget.model_copy(update=wrong), wrong):
        with pytest.raises(SpecError, match=message):
            run(spec.model_copy(update={"budget": budget}), tmp_path, LawExecutor())
    assert not (tmp_path / "study.db").exists()


def test_another_device_under_one_name_is_refused(tmp_path: Path) -> None:
    run(make_spec(**SHORT), tmp_path, LawExecutor())
    with pytest.raises(BSSearchError, match="Another GPU"):
        run(make_spec(**SHORT), tmp_path, LawExecutor(place={"device_name": "Another GPU"}))


def test_a_target_met_before_the_first_step_is_refused_each_time(tmp_path: Path) -> None:
    at_once = TrialOutcome(
        state=TrialState.REACHED, reason="", time_to_target_s=0.0, steps_to_target=0, best_metric=0.95
    )
    for _ in range(2):
        with pytest.raises(SpecError, match=r"target.value = 0.9 is met before the first step: trial 1 .* = 0.95"):
            run(make_spec(**SHORT), tmp_path, LawExecutor(ended_as=lambda *_: at_once))


class OwnLoop(LawExecutor):
    """A metric without known bounds; no trial reaches the target."""

    def describe(self) -> WorkloadDescription:
        model = replace(super().describe().model, initial_metrics={})
        return replace(super().describe(), metrics={"accuracy": MetricInfo()}, model=model)


PERCENT = {"target": {"metric": "accuracy", "value": 90, "goal": "maximize"}}


def test_a_target_in_percent_ends_the_study_after_the_default(tmp_path: Path) -> None:
    executor = OwnLoop(reachable=False)
    for _ in range(2):
        with pytest.raises(SpecError, match=r"did you mean 0\.9\?"):
            run(make_spec(**SHORT, **PERCENT), tmp_path, executor)
    assert [one.plan.configuration.batch_size for one in executor.requests] == [32]
    longer = {"budget": {**SHORT["budget"], "trial_train_seconds": 200.0}}
    with pytest.raises(SpecError, match=r"trial [2-9] reached"):
        run(make_spec(**{**SHORT, **longer}, **PERCENT), tmp_path, OwnLoop(reachable=False))


@pytest.mark.parametrize(
    ("metric", "low", "high", "value", "is_wrong"),
    [
        ("accuracy", 0.1, 0.93, 95, True),
        ("val/acc", 0.6, 0.6, 95, True),
        ("accuracy", 0.1, 0.4, 75, False),  # in percent, of a thousand classes
        ("reward", 0.0, 0.9, 20, False),
        ("accuracy", 1.0, 93.0, 95, False),
    ],
)
def test_a_target_is_in_percent_of_a_share(metric: str, low: float, high: float, value: float, is_wrong: bool) -> None:
    assert Target(metric=metric, value=value, goal=Goal.MAXIMIZE).is_percent_of_share(low, high) is is_wrong


@pytest.mark.parametrize("changes", [{"target": {"metric": "return", "value": 500}}, {"objective": "metric_in_budget"}])
def test_other_targets_above_one_are_searched_for(changes: dict[str, Any], tmp_path: Path) -> None:
    class Signed(OwnLoop):
        def describe(self) -> WorkloadDescription:
            return replace(super().describe(), metrics=dict.fromkeys(("accuracy", "return"), MetricInfo()))

    executor = Signed(reachable=False)
    with suppress(TargetNotReachedError):
        run(make_spec(**SHORT, **{**PERCENT, **changes}), tmp_path, executor)
    assert len({one.number for one in executor.requests}) > 1


def test_nan_at_any_learning_rate_ends_the_study_and_blames_the_data(tmp_path: Path) -> None:
    nan = TrialOutcome(state=TrialState.DIVERGED, reason="nan", steps=1)
    for low, ends_early in ((1e-4, True), (0.05, False)):
        executor, folder = LawExecutor(ended_as=lambda *_: nan), tmp_path / str(low)
        folder.mkdir()
        space = {**SPEC["space"], "learning_rate": {"low": low, "high": 1.0}}
        with pytest.raises(TargetNotReachedError) as caught:
            run(make_spec(**SHORT, space=space), folder, executor)
        assert (len(executor.requests) < 9) is ends_early
        assert ("NaN in the inputs" in not_none(caught.value.hint)) is ends_early


def test_a_default_that_diverged_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    diverged = TrialOutcome(state=TrialState.DIVERGED, reason="the loss is not finite", steps=20, train_seconds=0.1)
    ear = Ear()
    executor = LawExecutor(ended_as=lambda *_: diverged)
    launch = Launch(db=url_in(tmp_path), make_executor=lambda *_: executor, listener=ear)
    with pytest.raises(TargetNotReachedError):
        run_study(make_spec(**SHORT), launch)
    missed = next(one for one in ear.notes if "missed accuracy" in one)
    assert missed.endswith(": the loss is not finite; change default.learning_rate or the model")
    assert "--suggest-target" not in missed


def test_a_default_that_overran_its_limit_says_why(tmp_path: Path) -> None:
    class Late(LawExecutor):
        def end_of(self, request: TrialRequest, seconds: float) -> float:
            return 2.3 * super().end_of(request, seconds)

    ear = Ear()
    launch = Launch(db=url_in(tmp_path), make_executor=lambda *_: Late(reachable=False), listener=ear)
    with pytest.raises(TargetNotReachedError):
        run_study(make_spec(**SHORT | {"budget": {"trials": 5, "trial_train_seconds": 0.2}}), launch)
    missed = next(one for one in ear.notes if "missed accuracy" in one)
    assert "the limit of 0.2 s ends a trial at the next step or report" in missed


def test_a_trial_taken_over_by_another_driver_is_left_to_it(tmp_path: Path) -> None:
    url = url_in(tmp_path)

    def overtake(executor: LawExecutor) -> None:
        if executor.running and executor.running[0].number == 3:
            with open_store(url) as other:
                assert other.leases.mark_lost("toy", is_alive=lambda owner: False) == [3]

    run(make_spec(**SHORT), tmp_path, LawExecutor(on_look=overtake))
    trials = trials_in(tmp_path)
    assert trials[2].state is TrialState.LOST
    assert [trial.number for trial in trials if trial.retry_of == 3] == [4]


def test_a_study_without_room_for_any_batch_size_says_so_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(
            LaunchError, match=r"not even a micro-batch of one sample .* these sizes ran out .* 1, 2, 4, 8 "
        ):
            run(make_spec(**SHORT), tmp_path, LawExecutor(fits_up_to=0))


def test_a_search_trial_after_the_confirmation_keeps_no_other_driver_from_confirming(tmp_path: Path) -> None:
    url = url_in(tmp_path)

    spec = make_spec(budget={**BUDGET, "trials": 5}, confirm={"top": 1, "runs": 1})
    with open_store(url) as another:
        free: dict[int, bool] = {}

        class Looks(LawExecutor):
            number = 0

            def submit(self, request: TrialRequest) -> None:
                if request.plan.is_tested and not self.number:
                    self.number, _ = enqueue(another, "toy", {"dropout": 0.44})
                claim = f"confirm on {make_environment().host}"
                free[request.number] = another.leases.claim(
                    "toy", claim, owner="another", lease_seconds=60.0, is_alive=lambda owner: True
                )
                if free[request.number]:
                    another.leases.release("toy", claim, owner="another")
                super().submit(request)

        executor = Looks()
        run(spec, tmp_path, executor)
    confirming = {one.number for one in executor.requests if one.plan.is_tested}
    assert confirming and not any(free[number] for number in confirming)
    assert free[executor.number]


def test_an_enqueued_configuration_outlives_a_stop_and_a_spent_budget(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    spec = make_spec(budget={**BUDGET, "trials": 10}, confirm={"runs": 0})
    run(spec, tmp_path, LawExecutor())
    with open_store(url) as store:
        number, configuration = enqueue(store, "toy", {"dropout": 0.44})

    with pytest.raises(InterruptedRunError):
        run(spec, tmp_path, LawExecutor(on_look=interrupt))
    assert trials_in(tmp_path)[number - 1].state is TrialState.CANCELLED
    executor = LawExecutor()
    run(spec, tmp_path, executor)
    assert [request.plan.configuration for request in executor.requests] == [configuration]
    assert executor.requests[0].plan.train_seconds_limit == 100.0


def test_other_code_is_refused_unless_allowed_and_another_budget_is_reported(tmp_path: Path) -> None:
    def go_on(trials: int, executor: LawExecutor, *, allow: bool = False) -> None:
        run_study(
            make_spec(budget={**BUDGET, "trials": trials}, confirm={"runs": 0}),
            Launch(db=url_in(tmp_path), listener=ear, allow_changed_workload=allow, make_executor=lambda *_: executor),
        )

    ear, edited = Ear(), LawExecutor(place={"workload_revision": "def"})
    go_on(12, LawExecutor())
    with pytest.raises(UsageError, match=r"the file of workload 'digits' has changed since the study 'toy' began"):
        go_on(14, edited)
    assert not any("budget.trials was" in note for note in ear.notes)
    go_on(10, edited, allow=True)
    go_on(10, edited)  # it is this code's study from now on
    assert "budget.trials was 12, and is now 10" in ear.notes
    assert any("the workload's file has changed since the study began (abc → def)" in note for note in ear.notes)


def test_a_repaired_workload_may_go_on_if_every_trial_failed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="trials in a row failed"):
        run(make_spec(**SHORT), tmp_path, LawExecutor(fails=frozenset(range(1000))))
    for _ in range(2):
        mended = LawExecutor(place={"workload_revision": "mended"})
        assert run(make_spec(**SHORT), tmp_path, mended).optimal.batch_size in (8, 16, 32)
    with pytest.raises(UsageError, match="has changed since"):
        run(make_spec(**SHORT), tmp_path, LawExecutor())


SIZES = (8, 16, 32, 64, 128)
PROBES = {size: make_probe(size) for size in SIZES}


def searched(count: int, seconds: float = 3.0) -> list[TrialRecord]:
    """Sequential search trials of ``seconds`` wall seconds each; the first takes twice as long."""
    return [
        replace(
            make_trial(n, batch_size=SIZES[n % 5], learning_rate=0.01 * n, seconds=seconds * (2 if n == 1 else 1)),
            created_at=EPOCH + timedelta(seconds=seconds * (0 if n == 1 else n)),
            ended_at=EPOCH + timedelta(seconds=seconds * (n + 1)),
        )
        for n in range(1, count + 1)
    ]


def history(trials: list[TrialRecord], spec: StudySpec | None = None) -> History:
    return History(spec or make_spec(), trials, PROBES, now=EPOCH.timestamp() + 1e6)


def fresh(count: int) -> float:
    """Seconds of confirmation after ``count`` trials that ran one at a time."""
    return CONFIRMATION_RUNS * 3.0 * (count + 1) / count


def test_a_study_takes_the_rest_of_its_trials_at_their_pace_and_the_usual_confirmation() -> None:
    guess = LIMIT_SHARE * make_spec().budget.trial_train_seconds
    assert seconds_left(history([])) == pytest.approx((20 + CONFIRMATION_RUNS) * guess)
    assert seconds_left(history(searched(1))) == pytest.approx((19 + CONFIRMATION_RUNS) * guess)
    assert seconds_left(history(searched(5))) == pytest.approx(15 * 3.0 + fresh(5)), (
        "though the last trial ended long ago"
    )
    assert seconds_left(history(searched(20))) == pytest.approx(fresh(20))
    apart = [
        replace(one, ended_at=one.ended_at + one.number * timedelta(seconds=6)) for one in searched(5) if one.ended_at
    ]
    assert seconds_left(history(apart)) == pytest.approx(
        15 * 3.0 + fresh(5) + (15 + CONFIRMATION_RUNS) * 6.0 * 4 / 5
    ), "process starts"
    assert seconds_left(history(searched(5), make_spec(confirm={"top": 1, "runs": 0}))) == pytest.approx(15 * 3.0)


def test_two_trials_at_once_take_half_the_time_and_a_lost_trial_is_no_progress() -> None:
    beside = [*searched(2), *(replace(one, number=one.number + 2) for one in searched(2))]
    assert seconds_left(history(beside)) == pytest.approx((16 * 3.0 + fresh(2)) / 2)
    lost = replace(make_trial(9, state=TrialState.LOST), ended_at=EPOCH)
    assert seconds_left(history([*searched(5), lost])) == pytest.approx(15 * 3.0 + fresh(5))


def test_if_no_trial_has_reached_the_target_a_confirmation_run_takes_as_long_as_a_trial() -> None:
    missed = [replace(one, state=TrialState.CAPPED) for one in searched(5)]
    assert seconds_left(history(missed)) == pytest.approx(15 * 3.0 + fresh(5))


def test_a_budget_of_wall_seconds_ends_the_search_sooner() -> None:
    spec = make_spec(budget={"trials": 20, "trial_train_seconds": 10.0, "wall_seconds": 23.0})
    assert seconds_left(history(searched(5), spec)) == pytest.approx(5.0 + fresh(5))
    assert seconds_left(history(searched(10), spec)) == pytest.approx(fresh(10))


def test_a_confirmation_run_is_one_less_to_make_and_ends_the_search() -> None:
    known = history(searched(10))
    before = seconds_left(known)
    plan = not_none(next_run(known))
    known.take(make_trial(11, configuration=plan.configuration, seed=plan.seed, phase=Phase.CONFIRM, seconds=9.0))
    assert seconds_left(known) == pytest.approx(before - 10 * 3.0 - 3.3)


# Shifts ---------------------------------------------------------------------------------------------------------------


def interrupts() -> Interrupts:
    return Interrupts(on_second=lambda: None)


def test_at_its_end_running_trials_finish_first() -> None:
    shift, asked = Shift(), interrupts()
    shift.join(asked, lambda: None)
    shift.raise_if_over()
    shift.end()
    shift.raise_if_over(running=[3])
    with pytest.raises(InterruptedRunError, match="the shift ended"):
        shift.raise_if_over()
    assert asked.count == 0


def test_an_interrupt_reaches_each_driver_once_even_a_later_one() -> None:
    shift, early, late = Shift(), interrupts(), interrupts()
    shift.join(early, lambda: None)
    shift.interrupt()
    shift.interrupt()
    shift.join(late, lambda: None)
    assert (early.count, late.count, shift.is_ending) == (1, 1, True)


def test_a_workload_is_loaded_no_further_once_it_is_interrupted() -> None:
    shift, ended = Shift(), []
    with pytest.raises(LaunchError, match="no GPU"), shift.loading(lambda: ended.append("early")):
        raise LaunchError("no GPU")
    with pytest.raises(InterruptedRunError), shift.loading(lambda: ended.append("now")):
        shift.interrupt()
        shift.interrupt()
        raise LaunchError("its process was killed")
    with pytest.raises(InterruptedRunError), shift.loading(lambda: ended.append("late")):
        pytest.fail("nothing is loaded any more")
    assert ended == ["now", "now"], "there was perhaps no process yet to be ended"


def test_the_end_of_loading_waits_for_the_thread_that_ends_it() -> None:
    shift, begun, left, order = Shift(), threading.Event(), threading.Event(), list[str]()

    def end() -> None:
        begun.set()
        left.wait(0.3)  # times out; without the wait, "left" would come first
        order.append("ended")

    other = threading.Thread(target=shift.interrupt)
    with shift.loading(end):
        other.start()
        assert begun.wait(60)
    order.append("left")
    left.set()
    other.join()
    assert order == ["ended", "left"]


def test_running_trials_are_killed_by_their_driver() -> None:
    shift, killed = Shift(), []
    for name in ("one", "two"):
        shift.join(interrupts(), lambda name=name: killed.append(name))  # type: ignore[misc]
    shift.kill()
    assert killed == ["one", "two"]


def test_waiting_for_others_counts_from_its_beginning_until_there_is_work() -> None:
    now = 0.0
    shift = Shift(clock=lambda: now)
    assert shift.seconds_waited == 0
    shift.wait()
    now = 4.0
    shift.wait()
    now = 5.0
    assert shift.seconds_waited == 5
    shift.work()
    assert shift.seconds_waited == 0


# Stored configurations ------------------------------------------------------------------------------------------------


FORGED = "r$(id > PWNED)"
MODEL: dict[str, Any] = {
    "space": {**SPEC["space"], "model": {"activation": ["relu", "gelu"]}},
    "default": {**SPEC["default"], "model": {"activation": "relu"}},
}


def spec_with(trials: int, confirm: Mapping[str, int] | None = None) -> StudySpec:
    return make_spec(**MODEL, budget={"trials": trials, "trial_train_seconds": 100.0}, confirm=confirm or {"runs": 0})


def by_number(folder: Path, name: str = "toy") -> dict[int, TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return {trial.number: trial for trial in store.trials.of(name)}


def forge(folder: Path, number: int, *, activation: str = FORGED, **columns: object) -> None:
    """Change a stored trial, as anyone with write access can."""
    names = ["parameters = json_set(parameters, '$.\"model.activation\"', ?)", *(f"{name} = ?" for name in columns)]
    statement = f"UPDATE bss_trial SET {', '.join(names)} WHERE number = ? RETURNING number"
    assert execute(folder / "study.db", statement, (activation, *columns.values(), number)) == [(number,)]


def given(executor: LawExecutor) -> set[object]:
    """Every activation that reached the executor."""
    asked = [request.plan.configuration for request in executor.requests] + executor.splits_timed
    return {one.parameters["model.activation"] for one in asked}


def assert_refused(trial: TrialRecord) -> None:
    assert trial.state is TrialState.FAILED and trial.is_refused
    assert trial.outcome is not None and trial.outcome.reason.startswith(REFUSED)
    assert f"model.activation = {FORGED!r} must be" in trial.outcome.reason
    assert trial.outcome.steps == 0


def test_a_queued_trial_is_refused_and_the_others_run(tmp_path: Path) -> None:
    run(spec_with(5), tmp_path, LawExecutor())
    with open_store(url_in(tmp_path)) as store:
        forged, _ = enqueue(store, "toy", {"model.activation": "gelu"})
        honest, _ = enqueue(store, "toy", {"dropout": 0.44})
    forge(tmp_path, forged)
    executor = LawExecutor()
    run(spec_with(9), tmp_path, executor)
    trials = by_number(tmp_path)
    assert_refused(trials[forged])
    assert trials[honest].state is TrialState.REACHED
    assert given(executor) <= {"relu", "gelu"}


def test_an_imported_queued_trial_is_refused(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    run(spec_with(5), theirs, LawExecutor())
    with open_store(url_in(theirs)) as store:
        number, _ = enqueue(store, "toy", {"model.activation": "gelu"})
    forge(theirs, number)
    with open_store(url_in(theirs), write=False) as store:
        store.transfer.write("toy", tmp_path / "study.jsonl.gz")
    with open_store(url_in(mine)) as store:
        store.transfer.join([read_study(tmp_path / "study.jsonl.gz")])
    executor = LawExecutor()
    run(spec_with(9), mine, executor)
    assert_refused(by_number(mine)[number])
    assert executor.requests and given(executor) <= {"relu", "gelu"}


def test_many_refused_trials_neither_end_the_study_nor_give_up_their_batch_size(tmp_path: Path) -> None:
    run(spec_with(5), tmp_path, LawExecutor())
    with open_store(url_in(tmp_path)) as store:
        forged = [enqueue(store, "toy", {"batch_size": 16, "dropout": 0.01 * at})[0] for at in range(12)]
    for number in forged:
        forge(tmp_path, number)
    executor = LawExecutor()
    answer = run(spec_with(30), tmp_path, executor)
    trials = by_number(tmp_path)
    for number in forged:
        assert_refused(trials[number])
    assert 16 in {request.plan.configuration.batch_size for request in executor.requests}
    assert answer.optimal.batch_size in {16, 32}


@pytest.fixture
def stepping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudySpec:
    """Spec of a study with paused and resumed trials and its own checkpoint folder."""
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    return study_spec(**MODEL, budget={"trials": 12, "trial_train_seconds": 0.1})


def step(spec: StudySpec, folder: Path, executor: SteppingLaw) -> SteppingLaw:
    """Run a study that spends its budget without a hit."""
    executor.full = spec.budget.trial_train_seconds
    with pytest.raises((Dies, InterruptedRunError, TargetNotReachedError)):
        run(spec, folder, executor)
    return executor


def test_a_refused_paused_trial_does_not_stop_the_others(tmp_path: Path, stepping: StudySpec) -> None:
    done = step(stepping, tmp_path, SteppingLaw(on_look=die)).done
    forged, *others = [one.number for one in by_number(tmp_path).values() if one.state is TrialState.PAUSED]
    forge(tmp_path, forged)
    executor = step(stepping, tmp_path, SteppingLaw(done=done))
    assert_refused(by_number(tmp_path)[forged])
    assert forged not in executor.resumed and {*others} <= {*executor.resumed}
    assert given(executor) <= {"relu", "gelu"}


def test_the_retry_of_a_forged_trial_is_refused_once(
    tmp_path: Path, stepping: StudySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping = stepping.model_copy(update={"pruner": PrunerSpec(name="cap")})  # so that the default is uncapped
    step(stepping, tmp_path, SteppingLaw(interrupts_when=lambda law: law.done.get(1) == 1))
    forge(tmp_path, 1)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "elsewhere"))
    executor = step(stepping, tmp_path, SteppingLaw())
    (again,) = [trial for trial in by_number(tmp_path).values() if trial.retry_of == 1]
    assert_refused(again)
    assert executor.requests and given(executor) <= {"relu", "gelu"}


@pytest.fixture
def with_forged_best(tmp_path: Path) -> int:
    """Number of a forged trial that looks faster than all others."""
    run(spec_with(12), tmp_path, LawExecutor())
    reached = [one for one in by_number(tmp_path).values() if one.state is TrialState.REACHED]
    number = max(one.number for one in reached)
    forge(tmp_path, number, time_to_target_s=0.001, steps_to_target=1, steps_x_step_time_s=0.001)
    return number


def test_the_confirmation_of_a_forged_trial_is_refused_and_another_configuration_is_the_answer(
    tmp_path: Path, with_forged_best: int
) -> None:
    executor = LawExecutor()
    answer = run(spec_with(12, {"runs": 3}), tmp_path, executor)
    confirming = [one for one in by_number(tmp_path).values() if one.phase is Phase.CONFIRM]
    forged = [one for one in confirming if one.configuration.parameters["model.activation"] == FORGED]
    assert len(forged) == 1
    assert_refused(forged[0])
    assert with_forged_best not in answer.optimal.trial_numbers
    assert {*answer.optimal.trial_numbers} <= {one.number for one in confirming}
    assert len(executor.requests) == len(confirming) - 1 and given(executor) <= {"relu", "gelu"}


def test_audit_and_runs_to_the_whole_budget_refuse_a_forged_trial(tmp_path: Path, with_forged_best: int) -> None:
    spec = spec_with(12, {"runs": 3})
    run(spec, tmp_path, LawExecutor())
    for number, trial in by_number(tmp_path).items():
        if trial.phase is Phase.CONFIRM and not trial.is_refused:
            forge(tmp_path, number)
            break
    executor = LawExecutor()
    audit_study(spec, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor), runs=3)
    confirm_study(spec, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor), to_budget_runs=2)
    assert executor.requests and given(executor) <= {"relu", "gelu"}


def test_a_rerun_of_a_forged_trial_is_refused_before_the_start(tmp_path: Path) -> None:
    run(spec_with(5), tmp_path, LawExecutor())
    forge(tmp_path, 2)

    def no_executor(*_: object) -> LawExecutor:
        raise AssertionError("nothing is started")

    with pytest.raises(UsageError, match=r"cannot rerun trial 2 .*: model\.activation"):
        rerun("toy", 2, Launch(db=url_in(tmp_path), make_executor=no_executor))


def test_a_value_that_is_null_is_within_all_limits() -> None:
    spec = make_spec()
    default = spec.default_configuration
    unset = replace(
        default, learning_rate=0.9 * default.learning_rate, parameters={**default.parameters, "momentum": None}
    )
    assert problem_with(spec, unset, in_bounds=False) is None
    low = replace(unset, parameters={**default.parameters, "momentum": -1.0})
    assert problem_with(spec, low, in_bounds=False) == "momentum = -1 must be in [0, 1)"
