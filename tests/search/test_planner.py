"""The planner's next trial: order, limits, budgets and the end of the search."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.records import Configuration, Phase, TrialPlan, TrialRecord, TrialState
from bssearch.search.engine import RETUNED, RETUNED_IN_VAIN, Planner
from bssearch.search.history import INTERRUPTED, History, trial_seed
from bssearch.search.pruners.base import Pruner, PruningController
from bssearch.search.samplers.base import Choice, Sampler, default_choice
from bssearch.spec import StudySpec
from tests.factories import make_probe, make_spec, make_trial, not_none, with_outcome
from tests.search.samplers.made_up import MadeUpStudy, study_spec

SIZES = (8, 16, 32, 64, 128)
STEP_SECONDS = 0.01
FULL = 100.0
DEFAULT = {"batch_size": 32, "learning_rate": 0.1, "weight_decay": 0.0, "dropout": 0.1}


class Scripted(Sampler):
    """A sampler with a fixed choice and a given expected improvement."""

    models_time = True

    def __init__(self, expected: float | None = None, contenders: Sequence[int] = (), *, at: int = 16) -> None:
        self.expected = expected
        self.may_win = contenders
        self.at = at
        self.has_more = True
        self.asked: list[int | None] = []

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        self.asked.append(batch_size)
        if not self.has_more:
            return None
        configuration = at(batch_size or self.at, learning_rate=0.01 * (len(history.trials) + 1))
        return Choice(configuration, None, expected_improvement=self.expected)

    def contenders(self, history: History) -> Sequence[int]:
        return self.may_win

    def ending(self, history: History) -> str | None:
        return None if self.has_more else "the script is at its end"


def at(batch_size: int, learning_rate: float = 0.1) -> Configuration:
    return Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=learning_rate)


def spec_of(**changes: Any) -> StudySpec:
    """A spec; its budget of trials may be smaller than a new spec allows."""
    budget = {"trials": 40, "trial_train_seconds": FULL, "least_improvement": 0.0, **changes.pop("budget", {})}
    trials = budget["trials"]
    values = {"pruner": {"name": "balanced", "slack": 1.5}, "default": DEFAULT, **changes}
    spec = make_spec(**values, budget={**budget, "trials": 40})
    return spec.model_copy(update={"budget": spec.budget.model_copy(update={"trials": trials})})


class Case:
    """A planner over given trials; ``saved``: paused trials with a checkpoint here."""

    def __init__(
        self,
        *trials: TrialRecord,
        spec: StudySpec | None = None,
        sampler: Any = None,
        saved: Sequence[int] = (),
        pruner: Pruner | None = None,
        now: float = 0.0,
        micro_batch_size: int = 128,
    ) -> None:
        self.spec = spec or spec_of()
        probes = {
            size: make_probe(size, step_seconds=STEP_SECONDS, micro_batch_size=min(size, micro_batch_size))
            for size in SIZES
        }
        self.history = History(self.spec, (), probes, now=now)
        self.pruning = PruningController(self.spec, self.history, pruner)
        self.sampler = Scripted() if sampler is None else sampler
        self.planner = Planner(self.spec, self.history, self.pruning, self.sampler)
        for trial in trials:
            self.add(trial)
        self.pruning.found_saved(saved)

    def add(self, trial: TrialRecord) -> None:
        if trial.outcome is not None and trial.outcome.best_metric is not None:
            self.history.observe(trial.number, [(0.0, 0.1), (trial.outcome.train_seconds / 2, 0.4)])
        self.history.take(trial)
        self.pruning.take(trial)

    def next(self) -> TrialPlan:
        plan, ending = self.planner.next_trial()
        assert plan is not None, ending
        return plan

    def ending(self) -> str | None:
        plan, ending = self.planner.next_trial()
        assert plan is None
        return ending


def default_trial(number: int = 1, **changes: Any) -> TrialRecord:
    return make_trial(
        number, **{"configuration": spec_of().default_configuration, "seconds": 4.0, "uncapped": True, **changes}
    )


def paused(number: int, *, reason: str = "behind", **changes: Any) -> TrialRecord:
    trial = make_trial(number, **{"state": TrialState.PAUSED, "seconds": 3.0, "best_metric": 0.5, **changes})
    return with_outcome(trial, reason=reason)


# The order of choices.


def test_an_enqueued_configuration_comes_first_whatever_the_budget() -> None:
    queued = make_trial(3, state=TrialState.QUEUED, batch_size=64, seed=77)
    lost = make_trial(2, state=TrialState.LOST, batch_size=16, uncapped=True)
    plan = Case(default_trial(), lost, queued, spec=spec_of(budget={"trials": 1})).next()
    assert (plan.queued, plan.retry_of, plan.configuration.batch_size, plan.seed) == (3, None, 64, 77)
    assert plan.uncapped
    assert plan.train_seconds_limit == FULL


def test_then_comes_a_lost_uncapped_trial_with_its_limit_whatever_the_budget() -> None:
    lost = replace(make_trial(2, state=TrialState.LOST, uncapped=True, seed=5), train_seconds_limit=7.0)
    plan = Case(default_trial(), lost, spec=spec_of(budget={"trials": 1})).next()
    assert (plan.retry_of, plan.seed, plan.uncapped, plan.train_seconds_limit) == (2, 5, True, 7.0)


def test_then_comes_a_lost_trial_if_the_budget_allows_it_and_the_search_goes_on() -> None:
    lost = make_trial(2, state=TrialState.LOST, seed=5)
    plan = Case(default_trial(), lost).next()
    assert (plan.retry_of, plan.seed, plan.uncapped) == (2, 5, False)
    assert Case(default_trial(), lost, spec=spec_of(budget={"trials": 1})).ending() is not None
    over = Case(default_trial(), lost)
    over.sampler.has_more = False
    assert over.ending() == "the script is at its end"


def test_a_lost_trial_is_tried_again_without_a_new_fit_unless_little_was_expected_last() -> None:
    lost = make_trial(2, state=TrialState.LOST, seed=5)
    case = Case(default_trial(), lost)
    assert (case.next().retry_of, case.sampler.asked) == (2, [])
    spec = spec_of(budget={"least_improvement": 0.02})
    before = [replace(default_trial(), expected_improvement=0.001), replace(make_trial(3), expected_improvement=0.001)]
    over = Case(before[0], lost, before[1], spec=spec, sampler=Scripted(expected=0.001))
    plan, ending = over.planner.next_trial()
    assert ending is not None
    assert plan is None or plan.retry_of is None
    assert over.sampler.asked[0] is None and len([one for one in over.sampler.asked if one is None]) == 1


def test_then_a_paused_trial_goes_on_if_the_pruner_prefers_it() -> None:
    class Patient(Pruner):
        def next_waiting(self, standings: object, *, fresh: bool) -> int | None:
            asked.append(fresh)
            return 2

    asked: list[bool] = []
    waiting = paused(2, batch_size=64, seed=9)
    plan = Case(default_trial(), waiting, saved=[2], pruner=Patient()).next()
    assert (plan.resumed, plan.queued, plan.retry_of, plan.seed) == (2, None, None, 9)
    assert (plan.configuration, plan.after) == (waiting.configuration, None)
    assert asked == [True]
    assert Case(default_trial(), waiting, pruner=Patient()).next().resumed is None, "its checkpoint does not lie here"


class Last(Pruner):
    """Resumes trial 2 if no new trial may start."""

    def next_waiting(self, standings: object, *, fresh: bool) -> int | None:
        return None if fresh else 2


def test_a_spent_trial_budget_lets_paused_trials_resume_but_spent_wall_seconds_do_not() -> None:
    spent = Case(default_trial(), paused(2), saved=[2], pruner=Last(), spec=spec_of(budget={"trials": 2}))
    assert spent.next().resumed == 2
    late = spec_of(budget={"wall_seconds": 6.0})
    assert Case(default_trial(), paused(2), saved=[2], pruner=Last(), spec=late).ending() is not None


def test_an_interrupted_trial_resumes_first() -> None:
    trials = [paused(2), paused(3, reason=INTERRUPTED), paused(4)]
    assert Case(default_trial(), *trials, saved=[2, 3, 4]).next().resumed == 3


def test_the_expectation_of_a_trial_survives_its_pause() -> None:
    plan = Case(default_trial(), replace(paused(2, reason=INTERRUPTED), expected_improvement=0.25), saved=[2]).next()
    assert (plan.resumed, plan.expected_improvement) == (2, 0.25)


@pytest.mark.parametrize("pruner", [{"name": "balanced"}, {"name": "balanced", "checkpoint_gib": 0}, {"name": "cap"}])
def test_then_the_default_under_the_full_limit_unless_the_pruner_paces_trials(pruner: dict[str, Any]) -> None:
    case = Case(make_trial(1, batch_size=16, state=TrialState.EXHAUSTED), spec=spec_of(pruner=pruner))
    plan = case.next()
    assert plan.configuration == case.spec.default_configuration
    assert (plan.train_seconds_limit, plan.limit_state) == (FULL, TrialState.EXHAUSTED)
    assert plan.uncapped is (pruner != {"name": "balanced"})
    assert plan.sampled == case.spec.space.encode(plan.configuration)
    assert case.sampler.asked == []


def test_from_half_the_budget_compared_batch_sizes_get_their_uncapped_trials() -> None:
    done = [default_trial(), make_trial(2, batch_size=16, seconds=2.0)]
    assert not Case(*done, spec=spec_of(budget={"trials": 5})).next().uncapped
    plan = Case(*done, spec=spec_of(budget={"trials": 4})).next()
    assert (plan.configuration.batch_size, plan.uncapped, plan.expected_improvement) == (128, True, None)
    sampler = Scripted()
    sampler.models_time = False
    unaware = Case(*done, spec=spec_of(budget={"trials": 4}), sampler=sampler).next()
    assert not unaware.uncapped, "a sampler by allocation does that itself"
    missed = [default_trial(state=TrialState.EXHAUSTED), make_trial(2, state=TrialState.CAPPED)]
    assert not Case(*missed, spec=spec_of(budget={"trials": 4})).next().uncapped, "no trial to compare with"


def test_otherwise_the_sampler_chooses_with_its_own_seed_and_records_what_it_expects() -> None:
    case = Case(default_trial(), sampler=Scripted(0.25))
    plan = case.next()
    assert (plan.configuration.batch_size, plan.expected_improvement, plan.uncapped) == (16, 0.25, False)
    assert (plan.phase, plan.after) == (Phase.SEARCH, 1)
    assert (plan.seed, plan.eval_every_steps) == (trial_seed(case.spec.seed, Phase.SEARCH, 1), 5)


def test_a_trial_runs_in_the_micro_batches_that_its_batch_size_runs_in_now() -> None:
    assert (
        Case(default_trial(), sampler=Scripted(at=64), micro_batch_size=16).next().configuration.micro_batch_size == 16
    )
    saved = Case(default_trial(), paused(2, batch_size=64, reason=INTERRUPTED), saved=[2], micro_batch_size=16).next()
    assert saved.configuration.micro_batch_size == 64, "a saved trial resumes unchanged"


# Limits.


def test_before_a_hit_limits_grow_sweep_by_sweep_unless_the_pruner_paces_trials_itself() -> None:
    def limit(ended: int, pruner: str = "cap") -> float:
        trials = [
            make_trial(n, configuration=at(SIZES[n % 5], 0.01 * n), state=TrialState.CAPPED)
            for n in range(2, ended + 1)
        ]
        missed = default_trial(state=TrialState.EXHAUSTED)
        return Case(missed, *trials, spec=spec_of(pruner={"name": pruner})).next().train_seconds_limit

    assert [limit(ended) for ended in (1, 4, 5, 9, 10, 14)] == [25.0, 25.0, 50.0, 50.0, 100.0, 100.0]
    assert limit(1, "balanced") == FULL
    assert limit(1, "none") == FULL, "no pruner, no limit but the budget's"


def test_after_a_hit_trials_are_capped_at_the_slack_times_the_incumbents_time() -> None:
    plan = Case(default_trial(seconds=4.0), make_trial(2, batch_size=8, seconds=6.0)).next()
    assert plan.limit_state == TrialState.CAPPED
    assert plan.train_seconds_limit == pytest.approx(1.5 * 4.0)
    slow = Case(default_trial(seconds=80.0)).next()
    assert (slow.train_seconds_limit, slow.limit_state) == (FULL, TrialState.EXHAUSTED)


def test_every_limit_is_after_the_second_evaluation() -> None:
    assert Case(default_trial(seconds=0.01)).next().train_seconds_limit == pytest.approx(2 * 5 * STEP_SECONDS)


def test_an_uncapped_trial_is_limited_by_the_best_of_its_batch_size_else_by_four_times_the_best() -> None:
    asked = spec_of(budget={"trials": 6})
    trials = [default_trial(seconds=2.0), *compared(8, start=2)]
    untried = Case(*trials, spec=asked).next()
    assert (untried.configuration.batch_size, untried.uncapped, untried.train_seconds_limit) == (128, True, 4 * 2.0)
    plan = Case(*trials, make_trial(9, batch_size=128, seconds=8.0, uncapped=True), spec=asked).next()
    assert (plan.configuration.batch_size, plan.uncapped) == (128, True)
    assert plan.train_seconds_limit == pytest.approx(1.5 * 8.0)


def test_without_the_models_of_seconds_every_trial_has_the_full_limit() -> None:
    plan = Case(
        default_trial(state=TrialState.EXHAUSTED, seconds=FULL), spec=spec_of(objective="metric_in_budget")
    ).next()
    assert (plan.train_seconds_limit, plan.stop_at_target) == (FULL, False)


def test_a_resumed_trial_has_the_current_limit() -> None:
    plan = Case(default_trial(seconds=4.0), paused(2, reason=INTERRUPTED), saved=[2]).next()
    assert plan.train_seconds_limit == pytest.approx(6.0)
    uncapped = Case(default_trial(seconds=4.0), paused(2, reason=INTERRUPTED, uncapped=True), saved=[2]).next()
    assert uncapped.train_seconds_limit == 10.0, "the one it began with"


# Budgets and retries.


def test_the_budget_counts_trials_that_cost_something() -> None:
    trials = [default_trial(), make_trial(2, batch_size=16, state=TrialState.RUNNING)]
    in_vain = [make_trial(n, state=TrialState.CANCELLED) for n in (3, 4)]
    assert (
        Case(*trials, *in_vain, spec=spec_of(budget={"trials": 2})).ending()
        == "the budget of 2 trials is spent; raise budget.trials to continue"
    )
    assert Case(*trials, *in_vain, spec=spec_of(budget={"trials": 3})).next() is not None


def test_the_budget_of_wall_seconds_counts_while_trials_run() -> None:
    ran, running = default_trial(), make_trial(2, batch_size=16, state=TrialState.RUNNING)
    ran = with_outcome(ran, wall_seconds=5.0)
    spec = spec_of(budget={"wall_seconds": 8.0})
    began = running.created_at.timestamp()
    assert Case(ran, running, spec=spec, now=began + 2.5).next() is not None
    ending = Case(ran, running, spec=spec, now=began + 3.0).ending()
    assert ending is not None and "budget.wall_seconds = 8;" in ending, "named as --set takes it"
    assert Case(ran, running, spec=spec_of(budget={"wall_seconds": 8.5}), now=began + 3.0).next() is not None


def test_half_way_without_a_hit_paused_trials_come_before_new_ones() -> None:
    trials = [default_trial(state=TrialState.EXHAUSTED), paused(2)]
    assert Case(*trials, saved=[2], pruner=Last(), spec=spec_of(budget={"trials": 5})).next().resumed is None
    assert Case(*trials, saved=[2], pruner=Last(), spec=spec_of(budget={"trials": 4})).next().resumed == 2


# The end for little expected.


def expecting(number: int, expected: float | None, batch_size: int = 32, **changes: Any) -> TrialRecord:
    return replace(make_trial(number, batch_size=batch_size, seconds=5.0, **changes), expected_improvement=expected)


def compared(*sizes: int, start: int) -> list[TrialRecord]:
    """Three uncapped trials at each batch size, as many as the answer needs."""
    return [
        make_trial(start + 3 * place + n, batch_size=size, seconds=9.0, uncapped=True)
        for place, size in enumerate(sizes)
        for n in range(3)
    ]


TOLD = "the sampler expects a further trial to improve the time to the target by"
LITTLE = spec_of(budget={"least_improvement": 0.1, "trials": 100})


def test_the_search_ends_when_little_is_expected_now_and_was_for_the_newest_ended_trial() -> None:
    enough = compared(128, 8, start=10)

    def ending(before: float | None, now: float | None, **changes: Any) -> str | None:
        case = Case(default_trial(), *enough, expecting(30, before, **changes), spec=LITTLE, sampler=Scripted(now))
        plan, ending = case.planner.next_trial()
        assert (plan is None) == (ending is not None)
        return ending

    assert (ending(0.01, 0.05) or "").startswith(f"{TOLD} 5.00 %, less than budget.least_improvement = 10.00 %")
    assert ending(0.5, 0.05) is None, "once is no end"
    assert ending(0.01, 0.5) is None
    assert ending(0.01, None) is None, "before a hit a sampler cannot say"
    running = expecting(30, 0.01, state=TrialState.RUNNING)
    case = Case(default_trial(), *enough, expecting(29, 0.5), running, spec=LITTLE, sampler=Scripted(0.05))
    for _ in range(3):
        assert case.planner.next_trial()[1] is None, "asking again before another trial has ended is no second time"


@pytest.mark.parametrize(("reached", "enough"), [(True, RETUNED), (False, RETUNED_IN_VAIN)])
def test_before_the_end_a_batch_size_in_contention_is_tuned(reached: bool, enough: int) -> None:
    state = TrialState.REACHED if reached else TrialState.CAPPED
    others = [default_trial(), *compared(128, 8, start=10), expecting(20, 0.01)]
    tuned = [make_trial(30 + n, batch_size=64, state=state, seconds=9.0) for n in range(enough - 1)]
    case = Case(*others, *tuned, spec=LITTLE, sampler=Scripted(0.05, contenders=[64]))
    plan, ending = case.planner.next_trial()
    assert plan is not None
    assert (ending or "").startswith(TOLD)
    assert (plan.configuration.batch_size, plan.uncapped, plan.expected_improvement) == (64, False, 0.05)
    case.add(make_trial(50, batch_size=64, state=state, seconds=9.0))
    assert (case.ending() or "").startswith(TOLD)


def test_before_the_end_the_compared_batch_sizes_get_their_trials() -> None:
    case = Case(default_trial(), expecting(2, 0.01), spec=LITTLE, sampler=Scripted(0.05))
    sizes: list[int] = []
    while (plan := case.planner.next_trial()[0]) is not None:
        assert plan.uncapped
        sizes.append(plan.configuration.batch_size)
        trial = make_trial(
            case.history.length + 1, configuration=plan.configuration, seconds=9.0, uncapped=True, sampled=plan.sampled
        )
        case.add(replace(trial, expected_improvement=plan.expected_improvement))
    assert sorted(sizes) == [8, 8, 8, 128, 128, 128]


# Whole searches with the sampler that models the time.


def whole(least_improvement: float, **changes: Any) -> MadeUpStudy:
    budget = {"trials": 1000, "trial_train_seconds": FULL, "least_improvement": least_improvement}
    return MadeUpStudy(study_spec(budget=budget, **changes))


def played(study: MadeUpStudy, most: int = 60) -> str | None:
    """Run a study to its end; return the reason. Every fifth plan must equal a new driver's plan."""
    while True:
        plan, ending = study.planner.next_trial()
        if len(study.trials) % 5 == 0:
            assert study.restarted().planner.next_trial() == (plan, ending)
        if plan is None:
            return ending
        assert len(study.trials) < most
        study.run_plan(plan)


def test_a_search_by_the_time_model_ends_by_itself_with_its_evidence_and_stays_at_its_end() -> None:
    lists = {"batch_size": [8, 16, 64], "learning_rate": [0.03, 0.07, 0.14], "weight_decay": 0.0, "dropout": [0.0, 0.1]}
    study = whole(0.02, space=lists, default={"batch_size": 16, "learning_rate": 0.03, "dropout": 0.0})
    assert "budget.least_improvement = 2.00 %" in (played(study) or "")
    best = not_none(study.history.incumbent)
    assert (best.configuration.batch_size, best.configuration.learning_rate) == (16, 0.07)
    assert any(trial.uncapped for trial in study.trials[1:]), "the answer had its evidence first"
    assert study.restarted().planner.next_trial()[0] is None
    for _ in range(3):
        study.run(
            default_choice(study.spec), seconds=0.5 * study.history.value(study.history.incumbent)
        )  # it would be news
        study.trials[-1] = replace(study.trials[-1], phase=Phase.CONFIRM)
        assert study.restarted().planner.next_trial()[0] is None
