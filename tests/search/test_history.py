"""A history that is updated record by record equals a new one, and follows plain formulas; kept answers are current."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, Store, TargetNotReachedError, open_store, run_study
from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.records import (
    BatchSchedule,
    Configuration,
    LearningRateRule,
    Lease,
    MemoryUse,
    Observation,
    Phase,
    ProbeRecord,
    Stage,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
    TrialState,
    step_seconds_of,
    with_batch_schedule,
    with_step_time,
)
from bssearch.search.finding import ANSWERS, answer, compute_answer, save_finding
from bssearch.search.history import ATTEMPTS, INTERRUPTED, SEED_NOISE, SEED_NOISE_FREEDOM, History
from bssearch.spec import StudySpec
from tests.factories import (
    EPOCH,
    make_environment,
    make_plan,
    make_probe,
    make_spec,
    make_trial,
    not_none,
    store_study,
    with_outcome,
)
from tests.records.test_batch_schedule import milestones
from tests.search.law import LawExecutor, url_in

SIZES = (8, 16, 32, 64, 128)
RATES = (0.1, 0.2)
PROBES = {size: make_probe(size) for size in SIZES}
ENDS = tuple(state for state in TrialState if state.is_finished) + 2 * (TrialState.REACHED,)
STARTS_WAITING = (TrialState.RUNNING, TrialState.RUNNING, TrialState.RUNNING, TrialState.QUEUED)
AGAIN = (TrialState.LOST, TrialState.OOM, TrialState.FAILED, TrialState.CANCELLED)
CONFIGURATIONS = tuple(
    Configuration(batch_size=size, micro_batch_size=size, learning_rate=rate) for size in SIZES for rate in RATES
)


def spec(**changes: Any) -> StudySpec:
    budget = {"trials": 40, "trial_train_seconds": 10.0, "wall_seconds": 500.0}
    return make_spec(**{"budget": budget, "executor": {"slots": 2}, **changes})


def answers(history: History) -> dict[str, object]:
    """A history's answer to every question."""
    questions: dict[str, Callable[[], object]] = {
        **{name: lambda name=name: getattr(history, name) for name in PROPERTIES},  # type: ignore[misc]
        "busy_seconds": lambda: round(history.busy_seconds, 6),
        "time_share": lambda: round(history.time_share, 9),
        "budget_share": lambda: round(history.budget_share, 9),
        "seed_noise": lambda: round(history.seed_noise, 12),
        "at": lambda: {size: history.at(size) for size in SIZES},
        "best_at": lambda: {size: history.best_at(size) for size in SIZES},
        "in_state": lambda: {state: history.in_state(state) for state in TrialState},
        "in_states": lambda: history.in_state(TrialState.REACHED, TrialState.PAUSED, TrialState.CAPPED),
        "tried": lambda: [history.tried(one) for one in CONFIGURATIONS],
        "has_trial_of": lambda: [history.has_trial_of(one) for one in CONFIGURATIONS],
        "coordinates_near": lambda: {size: history.coordinates_near(size) for size in SIZES},
        "as_run": lambda: [history.as_run(one) for one in CONFIGURATIONS if one.batch_size in history.probes],
        "to_retry": lambda: [history.to_retry(uncapped=uncapped) for uncapped in (False, True)],
        "trial": lambda: [history.trial(number) for number in range(history.length + 2)],
        "all_trials": lambda: list(history.all_trials),
        "trials": lambda: list(history.trials),
        "value": lambda: [history.value(trial) for trial in history.all_trials],
        "curves": lambda: {
            number: (curve.train_seconds, curve.gains) for number, curve in sorted(history.curves.items())
        },
    }
    return {name: ask() for name, ask in questions.items()}


def test_a_configuration_that_was_stopped_and_then_reached_shows_the_noise_of_its_seeds() -> None:
    history = History(spec(), (), PROBES)
    for number, seconds in enumerate((1.0, 2.0, 4.0), 1):
        history.take(make_trial(number, state=TrialState.CAPPED, seconds=seconds))
        assert history.seed_noise == pytest.approx(SEED_NOISE)
    for number, seconds in enumerate((1.0, 2.0, 4.0), 1):
        history.take(make_trial(number, seconds=seconds))
    squares = SEED_NOISE_FREEDOM * SEED_NOISE**2 + 2 * math.log(2) ** 2
    assert history.seed_noise == pytest.approx(math.sqrt(squares / (SEED_NOISE_FREEDOM + 2)))


PROPERTIES = (
    "length",
    "spent",
    "ended",
    "last_expectation",
    "incumbent",
    "reference",
    "feasible",
    "untimed",
    "largest",
)


class Life:
    """A study with random changes; ``live`` is updated one change at a time."""

    def __init__(self, of: StudySpec, seed: int) -> None:
        self.spec = of
        self.rng = random.Random(seed)
        self.trials: dict[int, TrialRecord] = {}
        self.evaluations: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.now = EPOCH
        self.live = History(of, (), dict(PROBES))

    def anew(self) -> History:
        """A new history of the stored trials."""
        made = History(self.spec, (), self.live.probes, now=self.live.now)
        for number, trial in sorted(self.trials.items()):
            if trial.phase is Phase.SEARCH:
                made.observe(number, self.evaluations[number])
            made.take(trial)
        return made

    def change(self) -> None:
        """Change something: start, resume, evaluate or end a trial, or time steps."""
        self.now += timedelta(seconds=self.rng.choice((0, 1, 3)))
        running = self._in(TrialState.RUNNING)
        waiting = self._in(TrialState.PAUSED, TrialState.QUEUED)
        what = self.rng.random()
        if running and what < 0.35:
            self._evaluate(self.rng.choice(running))
        elif running and (what < 0.7 or len(running) > 3):
            self._end(self.rng.choice(running))
        elif waiting and what < 0.8:
            self._wait_no_more(self.rng.choice(waiting))
        elif what < 0.83:
            self._time()
        else:
            self._begin()
        self.live.now = self.now.timestamp()

    def _in(self, *states: TrialState) -> list[TrialRecord]:
        return [trial for trial in self.trials.values() if trial.state in states]

    def _keep(self, trial: TrialRecord) -> None:
        self.trials[trial.number] = trial
        self.live.take(trial)

    def _begin(self) -> None:
        retried = {trial.retry_of for trial in self.trials.values()}
        again = [trial for trial in self._in(*AGAIN) if trial.number not in retried]
        earlier = self.rng.choice(again) if again and self.rng.random() < 0.5 else None
        configuration = earlier.configuration if earlier else self.rng.choice(CONFIGURATIONS)
        trial = make_trial(
            len(self.trials) + 1,
            state=self.rng.choice(STARTS_WAITING),
            configuration=configuration,
            sampled=self.spec.space.encode(configuration),
            phase=earlier.phase if earlier else self.rng.choice((Phase.SEARCH, Phase.SEARCH, Phase.CONFIRM)),
            uncapped=self.rng.random() < 0.3,
            retry_of=earlier.number if earlier else None,
        )
        self._keep(replace(trial, created_at=self.now, expected_improvement=self.rng.choice((None, 0.5, 0.01))))

    def _evaluate(self, trial: TrialRecord) -> None:
        seen = self.evaluations[trial.number]
        seconds, metric = (seen[-1][0] if seen else 0.0) + 1.0, self.rng.choice((math.nan, 0.2, 0.5, 0.8))
        seen.append((seconds, metric))
        if trial.phase is Phase.SEARCH:
            self.live.observe(trial.number, [(seconds, metric)])

    def _end(self, trial: TrialRecord) -> None:
        state, seconds = self.rng.choice(ENDS), self.rng.choice((0.5, 2.0, 4.0, 10.0))
        reached = state is TrialState.REACHED
        outcome = TrialOutcome(
            state=state,
            reason=self.rng.choice((INTERRUPTED, "by chance")),
            train_seconds=seconds,
            wall_seconds=seconds + self.rng.choice((0.0, 5.0)),
            time_to_target_s=seconds if reached else None,
            steps_to_target=100 if reached else None,
            best_metric=0.9 if reached else 0.5,
            contended=self.rng.random() < 0.2,
        )
        product = seconds * 1.1 if reached else None
        self._keep(
            replace(trial, state=state, ended_at=self.now, outcome=outcome, steps_x_step_time_s=product),
        )

    def _wait_no_more(self, trial: TrialRecord) -> None:
        if trial.state is TrialState.PAUSED and self.rng.random() < 0.4:
            state = self.rng.choice((TrialState.PRUNED, TrialState.CANCELLED))
            self._keep(replace(trial, state=state, outcome=replace(not_none(trial.outcome), state=state)))
        else:
            self._keep(
                replace(trial, state=TrialState.RUNNING, created_at=self.now, ended_at=None, outcome=None),
            )

    def _time(self) -> None:
        some = self.rng.sample(SIZES, self.rng.choice((3, 4, 5)))
        probes: dict[int, ProbeRecord] = {
            size: make_probe(size, micro_batch_size=self.rng.choice((size, 8))) for size in some
        }
        self.live.probes = probes


@pytest.mark.parametrize("objective", ["time_to_target", "metric_in_budget"])
@pytest.mark.parametrize("seed", range(2))
def test_a_history_that_saw_changes_answers_like_a_new_one(seed: int, objective: str) -> None:
    life = Life(spec(objective=objective), seed)
    for _ in range(100):
        life.change()
        ours, anew = answers(life.live), answers(life.anew())
        assert ours == anew, [name for name in ours if ours[name] != anew[name]]
    assert TrialState.REACHED in {trial.state for trial in life.trials.values()}


def busy_seconds(*trials: TrialRecord, now: float = 0.0, slots: int = 1) -> float:
    return History(spec(executor={"slots": slots}), trials, PROBES, now=now).busy_seconds


def test_busy_seconds_count_overlaps_once_and_leave_pauses_out() -> None:
    first, second = make_trial(1, seconds=5.0), make_trial(2, seconds=5.0)  # ten seconds apart
    assert busy_seconds(first, second) == 10.0
    assert busy_seconds(first, replace(second, created_at=first.created_at, ended_at=first.ended_at)) == 5.0
    waited = with_outcome(first, wall_seconds=8.0)  # 3 s before it waited
    assert busy_seconds(waited, second) == 13.0
    assert busy_seconds(waited, second, slots=2) == 11.5
    running = make_trial(3, state=TrialState.RUNNING)
    assert busy_seconds(running, now=running.created_at.timestamp() + 3.0) == 3.0
    assert busy_seconds(make_trial(1, state=TrialState.LOST)) == 0.0
    assert busy_seconds(make_trial(1, state=TrialState.QUEUED), now=1e10) == 0.0


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_jump_does_not_change_the_budget(hours: int) -> None:
    trial = make_trial(1, seconds=5.0)
    assert busy_seconds(replace(trial, ended_at=not_none(trial.ended_at) + timedelta(hours=hours))) == 5.0
    later = make_trial(2, seconds=5.0)
    moved = replace(
        later,
        created_at=later.created_at + timedelta(hours=hours),
        ended_at=not_none(later.ended_at) + timedelta(hours=hours),
    )
    assert busy_seconds(trial, moved) == 10.0
    unknown = replace(trial, outcome=replace(trial.outcome, wall_seconds=0.0) if trial.outcome else None)
    assert busy_seconds(unknown) == 5.0, "its worker died: only the database's clock is known"


def test_the_noise_of_seeds_is_the_prior_until_one_configuration_has_had_two_runs() -> None:
    assert (SEED_NOISE, SEED_NOISE_FREEDOM) == (0.15, 4)
    alone = [make_trial(n, learning_rate=0.01 * n, seconds=float(n)) for n in range(1, 6)]
    assert History(spec(), alone, PROBES).seed_noise == SEED_NOISE
    far = [make_trial(n, seconds=seconds, phase=Phase.CONFIRM) for n, seconds in ((6, 1.0), (7, math.e**2))]
    # Two logs, 0 and 2: 2 squares of 1 about their mean, one degree of freedom.
    assert History(spec(), [*alone, *far], PROBES).seed_noise == pytest.approx(math.sqrt((4 * 0.15**2 + 2) / 5))
    stopped = make_trial(8, state=TrialState.CAPPED)
    assert History(spec(), [*far, stopped], PROBES).seed_noise == SEED_NOISE, "only its lucky runs have a time"


def expecting(number: int, expected: float | None, state: TrialState = TrialState.REACHED) -> TrialRecord:
    return replace(make_trial(number, state=state), expected_improvement=expected)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([], None),
        ([expecting(1, 0.5), expecting(2, 0.1)], 0.1),
        ([expecting(1, 0.5), expecting(2, 0.1, TrialState.RUNNING)], 0.5),
        ([expecting(1, 0.5), expecting(2, 0.1, TrialState.PAUSED)], 0.5),
        ([expecting(1, 0.5), expecting(2, None)], 0.5),
        ([expecting(1, 0.5, TrialState.RUNNING), expecting(2, 0.1), expecting(1, 0.5)], 0.1),
    ],
    ids=["no trial", "newest", "running", "paused", "unknown", "newer by number, ended earlier"],
)
def test_the_last_expectation_is_that_of_the_newest_ended_trial(
    trials: list[TrialRecord], expected: float | None
) -> None:
    assert History(spec(), trials).last_expectation == expected


def test_a_new_timing_replaces_the_step_times_of_trials_that_shared_a_device() -> None:
    slow, fast = (make_trial(n, seconds=9.0, contended=True, product=seconds) for n, seconds in ((1, 5.0), (2, 1.0)))
    other = replace(slow, number=3, configuration=replace(slow.configuration, batch_size=8, micro_batch_size=8))
    history = History(spec(), [slow, replace(fast, number=2)], {})
    assert history.value(history.incumbent) == 1.0, "the stored values"
    history.probes = {8: make_probe(8, step_seconds=0.02), 32: make_probe(32, step_seconds=0.03)}
    history.take(other)
    assert [history.value(trial) for trial in history.trials] == pytest.approx([3.0, 3.0, 2.0])
    assert history.incumbent is not None and history.incumbent.number == 3
    history.probes = {8: make_probe(8, step_seconds=0.05), 32: make_probe(32, step_seconds=0.04)}
    assert history.incumbent is not None and history.incumbent.number == 1
    assert history.value(history.incumbent) == pytest.approx(4.0)


def past(*trials: TrialRecord, **changes: Any) -> History:
    return History(spec(**changes), trials, PROBES)


def tries(count: int, state: TrialState = TrialState.LOST, **changes: Any) -> list[TrialRecord]:
    """A trial and its retries, all in one state."""
    return [make_trial(n, state=state, retry_of=n - 1 if n > 1 else None, **changes) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("trials", "uncapped", "again"),
    [
        ([], False, None),
        ([make_trial(1)], False, None),
        ([make_trial(1, state=TrialState.CAPPED)], False, None),
        (tries(1), False, 1),
        (tries(1, TrialState.OOM), False, 1),
        (tries(2), False, 2),
        (tries(ATTEMPTS - 1), False, ATTEMPTS - 1),
        (tries(ATTEMPTS), False, None),
        (tries(1, TrialState.FAILED), False, 1),
        (tries(2, TrialState.FAILED), False, None),
        ([*tries(1), make_trial(2, retry_of=1)], False, None),
        ([*tries(1), make_trial(2, state=TrialState.RUNNING, retry_of=1)], False, None),
        ([*tries(1), make_trial(2, state=TrialState.LOST)], False, 1),
        ([make_trial(n, state=TrialState.LOST, retry_of=1) for n in (1, 2)], False, 2),
        (tries(1, TrialState.CANCELLED), False, None),
        (tries(1, uncapped=True), False, None),
        (tries(1, batch_size=4), False, None),
        (tries(1, TrialState.CANCELLED, uncapped=True), True, 1),
        (tries(1, uncapped=True), True, 1),
        (tries(1), True, None),
    ],
)
def test_lost_trials_have_five_attempts_failed_ones_two_and_cancelled_ones_a_retry_if_uncapped(
    trials: list[TrialRecord], uncapped: bool, again: int | None
) -> None:
    found = past(*trials).to_retry(uncapped=uncapped)
    assert (None if found is None else found.number) == again


@pytest.mark.parametrize(
    ("failed", "ran", "is_feasible"), [(2, 0, True), (3, 0, False), (3, 2, False), (3, 3, True), (4, 3, False)]
)
def test_a_batch_size_is_given_up_after_three_failures_if_most_trials_failed(
    failed: int, ran: int, is_feasible: bool
) -> None:
    trials = [make_trial(n, state=TrialState.FAILED) for n in range(failed)]
    trials += [make_trial(10 + n, state=TrialState.CAPPED) for n in range(ran)]
    assert (32 in past(*trials).feasible) is is_feasible
    assert set(SIZES) - {32} <= set(past(*trials).feasible)


@pytest.mark.parametrize(
    "other", [{"learning_rate": 0.2}, {"dropout": 0.1}, {"parameters": {"momentum": 0.5}}, {"optimizer": "adamw"}]
)
def test_a_running_configuration_counts_as_tried_and_a_lost_or_cancelled_one_does_not(
    other: dict[str, Any],
) -> None:
    one = make_trial(1).configuration
    for state in TrialState:
        history = past(make_trial(1, state=state))
        assert history.tried(one) is (state not in {TrialState.LOST, TrialState.CANCELLED, TrialState.OOM}), state
        assert history.has_trial_of(one)
        assert history.tried(one.in_micro_batches(8)) is history.tried(one), "however it is split"
    assert not past(make_trial(1)).tried(replace(one, **other))


def test_the_spent_share_is_the_larger_of_trials_and_wall_seconds() -> None:
    ran = [make_trial(n, seconds=5.0) for n in range(1, 11)]  # of 500 s, and 10 of 40 trials
    assert past(*ran).time_share == pytest.approx(0.1)
    assert past(*ran).budget_share == pytest.approx(0.25)
    short = {"trials": 40, "trial_train_seconds": 10.0, "wall_seconds": 100.0}
    assert past(*ran, budget=short).budget_share == pytest.approx(0.5)
    unbounded = past(*ran, budget={"trials": 40, "trial_train_seconds": 10.0})
    assert (unbounded.time_share, unbounded.budget_share) == (0.0, 0.25)


def test_trials_are_compared_with_the_incumbent_or_the_first_trial() -> None:
    first, second = (make_trial(n, state=TrialState.CAPPED) for n in (2, 3))
    assert past(make_trial(1, state=TrialState.DIVERGED)).reference is None
    assert past(second, first).reference == first
    hit, later = (with_step_time(make_trial(n, seconds=9.0), step_seconds_of(PROBES.values())) for n in (4, 5))
    assert past(first, second, hit).reference == hit
    assert past(hit, later).incumbent == hit, "the earlier of two that are equal"


def test_the_best_coordinates_are_taken_from_the_nearest_batch_size() -> None:
    def hit(number: int, size: int, dropout: float, seconds: float = 1.0) -> TrialRecord:
        sampled = {"reference_learning_rate": 0.1, "weight_decay": 0.0, "dropout": dropout}
        return make_trial(number, batch_size=size, seconds=seconds, sampled=sampled)

    default = past().coordinates_near(32)
    assert default is not None and default["dropout"] == pytest.approx(0.1)
    history = past(hit(1, 16, 0.16), hit(2, 128, 0.28, 0.5), hit(3, 16, 0.2, 3.0))
    for size, dropout in ((8, 0.16), (32, 0.16), (64, 0.28), (128, 0.28)):
        found = history.coordinates_near(size)
        assert found is not None and found["dropout"] == dropout
    between = past(hit(1, 16, 0.16), hit(2, 64, 0.26, 0.5)).coordinates_near(32)
    assert between is not None and between["dropout"] == 0.26, "of two as near the faster"
    untuned = replace(hit(1, 32, 0.1), configuration=past().spec.default_configuration)
    beyond = past(untuned, hit(2, 8, 0.08)).coordinates_near(64)
    assert beyond is not None and beyond["dropout"] == 0.08, "the default's own trial is not tuned"


# Kept answers ---------------------------------------------------------------------------------------------------------


HERE = make_environment()
SPEC = make_spec(confirm={"runs": 0})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(url_in(tmp_path)) as opened:
        store_study(opened, SPEC, HERE)
        yield opened


def add_trial(
    store: Store,
    batch_size: int,
    seconds: float,
    schedule: BatchSchedule | None = None,
    *,
    is_contended: bool = False,
) -> int:
    """Store a trial that is at 0.8 half-way, and at the target of 0.9 at its end.

    A trial with a schedule is contended.
    """
    configuration = Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.1)
    phase = Phase.SEARCH
    if schedule is not None:
        configuration, phase = with_batch_schedule(configuration, schedule), Phase.GROWTH
    lease = Lease(owner="driver", seconds=60.0)
    plan = make_plan(configuration=configuration, phase=phase)
    trial = not_none(store.trials.start("toy", plan, environment=HERE, lease=lease))
    curve = [
        Observation(
            step=step, samples=step * batch_size, train_seconds=share * seconds, metric=metric, loss=None,
            learning_rate=0.1,
        )
        for step, share, metric in ((0, 0.0, 0.1), (50, 0.5, 0.8), (100, 1.0, 0.9))
    ]  # fmt: skip
    store.trials.append_observations("toy", [(trial.number, one) for one in curve])
    outcome = TrialOutcome(
        state=TrialState.REACHED, reason="by the test", steps=100, train_seconds=seconds, wall_seconds=seconds,
        time_to_target_s=seconds, steps_to_target=100, best_metric=0.9, final_metric=0.9,
        contended=is_contended or schedule is not None,
    )  # fmt: skip
    store.trials.finish("toy", trial.number, outcome, steps_x_step_time_s=None)
    return trial.number


@pytest.fixture
def found(store: Store) -> Answer:
    add_trial(store, 32, 2.0)
    add_trial(store, 64, 1.0)
    return compute_answer(store, "toy")


def test_before_the_first_hit_no_finding_is_kept(store: Store) -> None:
    save_finding(store, "toy")
    assert store.findings.current("toy") is None
    with pytest.raises(TargetNotReachedError):
        answer(store, "toy")


def test_a_kept_answer_is_read_until_the_study_changes(store: Store, found: Answer) -> None:
    other = found.model_copy(update={"tied": [8, 16]})
    kept = {"made_by": ANSWERS, "answer": other.model_dump(mode="json")}
    store.findings.save("toy", store.findings.stamp("toy"), kept)
    assert answer(store, "toy") == other
    add_trial(store, 128, 0.5)
    assert answer(store, "toy").optimal.batch_size == 128


def test_a_figure_that_changed_without_new_trials_is_named_until_its_batch_size_has_one(store: Store) -> None:
    for size in (32, 64):
        store.probes.add_step_time("toy", HERE, make_probe(size, step_seconds=0.02))
        add_trial(store, size, 9.0, is_contended=True)
    save_finding(store, "toy")
    assert moved_in(answer(store, "toy")) == []
    store.probes.add_step_time("toy", HERE, make_probe(64, step_seconds=0.03))
    for _ in range(2):  # a second save keeps the notice
        before, after = (times_in(one) for one in (kept_answer(store), compute_answer(store, "toy")))
        assert after[32] == before[32]
        (message,) = moved_in(compute_answer(store, "toy"))
        assert f"batch 64 by {100 * (after[64] / 2.0 - 1):+.1f} %" in message and "32" not in message
        save_finding(store, "toy")
    add_trial(store, 64, 9.0, is_contended=True)
    assert moved_in(compute_answer(store, "toy")) == []


def kept_answer(store: Store) -> Answer:
    return Answer.model_validate(not_none(store.findings.last("toy"))["answer"])


def times_in(found: Answer) -> dict[int, float]:
    return {one.batch_size: not_none(one.time_to_target_s).median for one in found.batches}


def moved_in(found: Answer) -> list[str]:
    return [one.message for one in found.warnings if one.code == "step_times_changed"]


def test_for_another_target_no_kept_answer_is_read(store: Store, found: Answer) -> None:
    other = found.model_copy(update={"tied": [8, 16]}).model_dump(mode="json")
    store.findings.save("toy", store.findings.stamp("toy"), {"made_by": ANSWERS, "answer": other})
    assert answer(store, "toy", 0.9) == found, "its own target"
    easier = answer(store, "toy", 0.8)
    assert easier.target.value == 0.8
    assert not_none(easier.optimal.time_to_target_s).median == pytest.approx(0.5)
    assert easier.warnings[0].code not in {one.code for one in found.warnings}
    assert easier.next == []


def test_for_another_target_a_batch_that_grows_counts_each_step_at_the_size_it_had(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (32, 64, 128):
        store.probes.add_step_time("toy", HERE, make_probe(size, step_seconds=0.001 * size))
    add_trial(store, 64, 6.4)
    number = add_trial(store, 32, 9.0, milestones((0, 32), (640, 64), (1920, 128)))
    stages = (Stage(0, 32, 32), Stage(0, 64, 64))
    measured = BatchSchedule(name="noise_scale", stages=stages, rate_rule=LearningRateRule.SQRT, noise_share=1.0)
    by_noise = add_trial(store, 32, 20.0, measured)
    asked: list[TrialRecord] = []

    def listening(study: StudyRecord, spec: StudySpec, trials: Sequence[TrialRecord], *rest: Any) -> Answer:
        asked.extend(trials)
        return build_answer(study, spec, trials, *rest)

    monkeypatch.setattr("bssearch.search.finding.build_answer", listening)
    easier = compute_answer(store, "toy", 0.8).batch_schedule
    (trial,) = (one for one in asked if one.number == number)
    assert trial.outcome is not None and trial.outcome.steps_to_target == 50
    assert trial.steps_x_step_time_s == pytest.approx(20 * 0.032 + 20 * 0.064 + 10 * 0.128)
    assert {one.steps_x_step_time_s for one in asked if one.number == by_noise} == {None}, "its sizes are not known"
    assert easier is not None and easier.time_to_target == pytest.approx(trial.steps_x_step_time_s)


def test_the_memory_that_a_probe_measured_is_in_the_answer(store: Store) -> None:
    for size in (8, 16, 32, 64):
        use = MemoryUse(micro_batch_size=size, fits=True, peak_memory_bytes=10**6 + 1000 * size)
        store.probes.save_memory("toy", HERE, use)
    add_trial(store, 64, 1.0)
    memory = not_none(compute_answer(store, "toy").measured.memory)
    assert (memory.largest_that_fits, memory.smallest_that_does_not) == (64, None)
    assert not_none(memory.fixed_bytes) == pytest.approx(1e6)
    assert memory.bytes_per_sample == pytest.approx(1000)


def test_an_answer_says_that_its_trials_ran_with_several_versions_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_in(tmp_path)
    spec = make_spec(budget={"trials": 8, "trial_train_seconds": 100.0}, confirm={"runs": 0})
    run_study(spec, Launch(db=url, make_executor=lambda *_: LawExecutor()))
    with open_store(url, write=False) as store:
        alone = compute_answer(store, spec.name)
        monkeypatch.setattr(store.trials, "torch_versions", lambda _: ["2.11", "2.13"])
        several = compute_answer(store, spec.name)
    assert (several.warnings[:-1], several.warnings[-1].code) == (alone.warnings, "torch_changed")
    assert "torch 2.11 and 2.13" in several.warnings[-1].message


def test_an_invalid_stored_answer_is_computed_again(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    spec = make_spec(budget={"trials": 8, "trial_train_seconds": 100.0}, confirm={"runs": 0})
    made = run_study(spec, Launch(db=url, make_executor=lambda *_: LawExecutor()))
    with open_store(url) as store:
        for hostile in ({"made_by": ANSWERS, "answer": {"optimal": 5}}, {"made_by": ANSWERS, "answer": [1]}):
            store.findings.save(spec.name, store.findings.stamp(spec.name), hostile)
            assert answer(store, spec.name).model_dump() == made.model_dump()
