"""The audit's runs, against an executor that answers at once, from a law in which the best rate is ∝ √batch."""

import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    InterruptedRunError,
    Launch,
    NotFoundError,
    TargetNotReachedError,
    UsageError,
    WorkloadError,
    open_store,
)
from bssearch.analysis.answer import Answer
from bssearch.analysis.optimum import Candidate
from bssearch.analysis.rules.audit import Audit, Case, RuleFinding
from bssearch.analysis.rules.rule_book import Rule
from bssearch.commands.opening import stored_spec
from bssearch.commands.run import audit_stored, audit_study, missing_audit_runs, next_audit_run, run_study, seeds_of
from bssearch.records import Configuration, Phase, StepTime, StepTimeRequest, TrialPlan, TrialRecord, TrialState
from bssearch.search.finding import compute_answer, scratch_answers
from bssearch.search.history import History, trial_seed
from bssearch.spec import StudySpec, load_spec, spec_of
from tests.factories import make_probe, make_spec, make_trial, not_none
from tests.search.law import LawExecutor, interrupt, url_in
from tests.waiting import Ear

SPEC = make_spec(
    space={
        "batch_size": [32, 64, 256],
        "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 0.5, "rule": "sqrt"},
        "warmup_epochs": [1.0, 2.0],
    },
    default={"batch_size": 32, "learning_rate": 0.1, "warmup_epochs": 1.0},
    budget={"trials": 12, "trial_train_seconds": 100.0},
    confirm={"top": 3, "runs": 3},
)
SEEDS = [trial_seed(SPEC.seed, Phase.CONFIRM, index) for index in range(3)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study, run to its end, for tests to copy."""
    folder = tmp_path_factory.mktemp("finished")
    run_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: LawExecutor()))
    return folder


@pytest.fixture
def studied(finished: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the finished study."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


@dataclass
class Audited:
    """A folder with an audited study, the answer before, and how the audit was made."""

    folder: Path
    answer: Answer
    executor: LawExecutor
    found: Audit


@pytest.fixture(scope="module")
def done(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """The study audited once, for tests that look at it."""
    folder = Path(shutil.copytree(finished, tmp_path_factory.mktemp("audited"), dirs_exist_ok=True))
    with open_store(url_in(folder), write=False) as store:
        answer = compute_answer(store, SPEC.name)
    executor = LawExecutor()
    return Audited(folder, answer, executor, audited(folder, executor))


def audited(folder: Path, executor: LawExecutor | None = None, **asked: Any) -> Audit:
    return audit_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: executor or LawExecutor()), **asked)


def audit_trials(folder: Path) -> list[TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return [trial for trial in store.trials.of(SPEC.name) if trial.phase is Phase.AUDIT]


def of(found: Audit, rule: Rule, batch_size: int | None = 256) -> RuleFinding:
    return next(one for one in found.rules if one.rule is rule and one.batch_size == batch_size)


def test_the_law_keeps_the_root_and_breaks_the_line(done: Audited) -> None:
    found, executor = done.found, done.executor
    linear, root, warmup = (of(found, rule) for rule in (Rule.LINEAR_RATE, Rule.SQRT_RATE, Rule.WARMUP))
    assert linear.configuration is not None and root.configuration is not None
    assert linear.configuration["learning_rate"] == pytest.approx(0.8)
    assert (linear.verdict, root.verdict) == ("broke", "held")
    assert warmup.verdict == "broke"  # the law does not mind
    assert len(linear.trial_numbers) == 3
    assert executor.most_at_once == 1
    assert all(request.plan.train_seconds_limit == 100.0 and request.plan.is_tested for request in executor.requests)
    trials = audit_trials(done.folder)
    assert {trial.seed for trial in trials} == set(SEEDS)
    assert not any(trial.uncapped for trial in trials)
    assert found.spent_train_seconds == pytest.approx(sum(one.outcome.train_seconds for one in trials if one.outcome))


def test_a_second_audit_runs_nothing_and_says_the_same(done: Audited) -> None:
    executor = LawExecutor()
    second = audited(done.folder, executor)
    assert not executor.requests
    assert second == done.found
    with open_store(url_in(done.folder), write=False) as store:
        assert [one for one in audit_stored(store, SPEC.name).rules if one.trial_numbers] == [
            one for one in done.found.rules if one.trial_numbers
        ]


def test_the_answer_is_what_it_was(done: Audited) -> None:
    with open_store(url_in(done.folder), write=False) as store:
        after = compute_answer(store, SPEC.name)
    assert (after.optimal, after.tied) == (done.answer.optimal, done.answer.tied)


def test_without_running_nothing_is_started(studied: Path) -> None:
    def no_executor(*_: object) -> LawExecutor:
        raise AssertionError("nothing is to be run")

    found = audit_study(SPEC, Launch(db=url_in(studied), make_executor=no_executor), run=False)
    assert of(found, Rule.LINEAR_RATE).verdict == "not_run"
    assert not audit_trials(studied)


def test_the_budget_ends_it_after_the_first_rules_and_more_of_it_goes_on(studied: Path) -> None:
    one_run = audited(studied, train_seconds=0.0)
    assert not audit_trials(studied)
    assert "the budget of 0 train seconds is spent" in of(one_run, Rule.LINEAR_RATE).reason
    found = audited(studied, train_seconds=10.0)
    seconds = [trial.outcome.train_seconds for trial in audit_trials(studied) if trial.outcome]
    assert sum(seconds[:-1]) < 10.0 <= sum(seconds)
    assert any(one.verdict == "not_run" and "budget of 10 train seconds" in one.reason for one in found.rules)
    rest = LawExecutor()
    audited(studied, rest)
    assert rest.requests
    assert set(Counter((trial.configuration.key, trial.seed) for trial in audit_trials(studied)).values()) == {1}


def test_more_runs_than_the_confirmation_had_are_made_of_the_tuned_optimum_too(studied: Path) -> None:
    found = audited(studied, runs=4)
    fresh = trial_seed(SPEC.seed, Phase.CONFIRM, 3)
    at_256 = [one for one in audit_trials(studied) if one.configuration.batch_size == 256 and one.seed == fresh]
    with open_store(url_in(studied), write=False) as store:
        confirmed = {one.configuration.key for one in store.trials.of(SPEC.name) if one.phase is Phase.CONFIRM}
    assert sum(one.configuration.key in confirmed for one in at_256) == 1
    assert "paired by 4 seeds" in of(found, Rule.LINEAR_RATE).reason


def test_an_interrupted_audit_goes_on_where_it_stopped(studied: Path) -> None:
    with pytest.raises(InterruptedRunError):
        audited(studied, LawExecutor(on_look=lambda law: len(law.requests) == 3 and interrupt()))
    states = [trial.state for trial in audit_trials(studied)]
    assert states == [TrialState.REACHED, TrialState.REACHED, TrialState.CANCELLED]
    found = audited(studied)
    trials = audit_trials(studied)
    assert trials[3].retry_of == trials[2].number
    assert (trials[3].configuration, trials[3].seed) == (trials[2].configuration, trials[2].seed)
    assert of(found, Rule.LINEAR_RATE).verdict == "broke"


def test_what_is_timed_in_micro_batches_keeps_the_cadence_of_its_batch_size(done: Audited) -> None:
    assert (256, 64) in {(one.batch_size, one.micro_batch_size) for one in done.executor.splits_timed}
    assert of(done.found, Rule.ACCUMULATION).verdict == "broke"  # by the law it costs nothing
    with open_store(url_in(done.folder), write=False) as store:
        assert store.probes.by_batch_size(SPEC.name)[256].micro_batch_size == 256


def test_studies_that_cannot_be_audited_say_so(tmp_path: Path) -> None:
    with open_store(url_in(tmp_path)):
        pass
    with pytest.raises(NotFoundError, match="nowhere"):
        stored_spec("nowhere", Launch(db=url_in(tmp_path)))
    unreached = make_spec(budget={"trials": 5, "trial_train_seconds": 9.0})
    with pytest.raises(TargetNotReachedError):
        run_study(unreached, Launch(db=url_in(tmp_path), make_executor=lambda *_: LawExecutor(reachable=False)))
    with pytest.raises(TargetNotReachedError, match="nearest: "):
        stored_spec(SPEC.name, Launch(db=url_in(tmp_path)))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"runs": 0}, "runs = 0 must be >= 1"),
        ({"train_seconds": -1.0}, "train_seconds = -1.0 must be a finite number >= 0"),
        ({"train_seconds": math.inf}, "train_seconds = inf must be a finite number"),
    ]
    for asked, said in wrong:
        with pytest.raises(UsageError, match=said):
            audited(tmp_path, **asked)


def case_and_history(spec: StudySpec, *made: tuple[int, TrialState], limit: float = 100.0) -> tuple[Case, History]:
    tuned = Configuration(batch_size=64, micro_batch_size=64, learning_rate=0.2)
    rule = replace(tuned, learning_rate=0.8)
    confirmed = [
        replace(make_trial(n + 1, configuration=tuned, seed=seed, phase=Phase.CONFIRM), train_seconds_limit=100.0)
        for n, seed in enumerate(SEEDS)
    ]
    ran = [
        replace(
            make_trial(10 + n, configuration=rule, seed=SEEDS[index], state=state, phase=Phase.AUDIT),
            train_seconds_limit=limit,
        )
        for n, (index, state) in enumerate(made)
    ]
    history = History(spec, [*confirmed, *ran], {size: make_probe(size) for size in spec.batch_sizes})
    return Case(Rule.LINEAR_RATE, 64, rule, Candidate(tuned, tuple(confirmed))), history


def lacking(*made: tuple[int, TrialState], limit: float = 100.0, runs: int = 3) -> list[TrialPlan]:
    case, history = case_and_history(SPEC, *made, limit=limit)
    return list(missing_audit_runs(history, [case], runs))


def test_what_came_to_nothing_is_made_again_and_failures_once() -> None:
    assert [run.seed for run in lacking()] == SEEDS
    assert len(lacking((0, TrialState.REACHED), (1, TrialState.EXHAUSTED), (2, TrialState.DIVERGED))) == 0
    again = lacking((0, TrialState.LOST), (1, TrialState.CANCELLED), (2, TrialState.FAILED))
    assert [(run.seed, run.retry_of) for run in again] == list(zip(SEEDS, (10, 11, 12), strict=True))
    assert len(lacking((0, TrialState.FAILED), (0, TrialState.FAILED))) == 2
    assert len(lacking((0, TrialState.RUNNING))) == 2


@pytest.mark.parametrize(("state", "runs"), [(TrialState.EXHAUSTED, 3), (TrialState.REACHED, 2)])
def test_a_run_that_missed_within_a_smaller_limit_is_made_again(state: TrialState, runs: int) -> None:
    assert len(lacking((0, state), limit=50.0)) == runs


def test_seeds_are_those_the_tuned_optimum_had_whatever_the_study_would_give_now() -> None:
    case, _ = case_and_history(SPEC)
    assert seeds_of(SPEC.model_copy(update={"seed": 5}), case, 3) == SEEDS
    assert seeds_of(SPEC, case, 2) == SEEDS[:2]
    assert seeds_of(SPEC, case, 4) == [*SEEDS, trial_seed(SPEC.seed, Phase.CONFIRM, 3)]


def test_a_rule_that_gives_the_tuned_configuration_takes_no_runs() -> None:
    case, history = case_and_history(SPEC)
    assert not list(missing_audit_runs(history, [replace(case, configuration=not_none(case.tuned).configuration)], 4))


def noisy(rate: float, *seconds: float, batch_size: int = 64, number: int = 50) -> tuple[Case, list[TrialRecord]]:
    """A rule's case with runs of these seconds, against a tuned optimum of about 1 s with the same seeds."""
    tuned = Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=rate / 4)
    rule = replace(tuned, learning_rate=rate)
    seeds = [trial_seed(SPEC.seed, Phase.CONFIRM, index) for index in range(max(3, len(seconds)))]
    each = batch_size / 64
    confirmed = [
        make_trial(number + n, configuration=tuned, seed=seed, seconds=each * (1 + 0.1 * (n % 2)), phase=Phase.CONFIRM)
        for n, seed in enumerate(seeds)
    ]
    ran = [
        make_trial(number + 20 + n, configuration=rule, seed=seeds[n], seconds=each * value, phase=Phase.AUDIT)
        for n, value in enumerate(seconds)
    ]
    return Case(Rule.LINEAR_RATE, batch_size, rule, Candidate(tuned, tuple(confirmed))), [*confirmed, *ran]


def planned(*given: tuple[Case, list[TrialRecord]], most: int = 12) -> TrialPlan | None:
    trials = [trial for _, made in given for trial in made]
    history = History(SPEC, trials, {size: make_probe(size) for size in SPEC.batch_sizes})
    return next_audit_run(lambda: [case for case, _ in given], 3, math.inf, most)(history)


def test_an_undecided_rule_gets_twice_the_runs_and_a_decided_one_no_more() -> None:
    assert planned(noisy(0.8, 2.0, 2.2, 2.0)) is None
    wide = 0.5, 1.1, 1.0
    fourth = not_none(planned(noisy(0.8, *wide)))
    assert fourth.seed == trial_seed(SPEC.seed, Phase.CONFIRM, 3)
    assert planned(noisy(0.8, *wide), most=3) is None
    at_six = not_none(planned(noisy(0.8, 0.2, 2.2, 1.0, 3.0, 1.0, 2.0)))
    assert at_six.seed == trial_seed(SPEC.seed, Phase.CONFIRM, 6)
    begun = not_none(planned(noisy(0.8, 2.0, 2.2, 2.0, 2.2)))
    assert begun.seed == trial_seed(SPEC.seed, Phase.CONFIRM, 4), "a level that was begun is completed"


def test_the_cheapest_rule_runs_first_and_then_the_one_that_is_cheapest_to_decide() -> None:
    assert not_none(planned(noisy(0.8, batch_size=256), noisy(0.7, number=100))).configuration.batch_size == 64
    unclear, nearly = noisy(0.8, 1.0, 1.5, 1.0), noisy(0.7, 1.5, 2.5, 1.2, number=100)
    assert None not in (planned(unclear), planned(nearly))
    plans = planned(unclear, nearly), planned(nearly, unclear)
    assert [not_none(one).configuration.learning_rate for one in plans] == [0.7 / 4] * 2


def test_a_fine_tuning_study_remembers_its_preset_and_finds_the_study_from_scratch(tmp_path: Path) -> None:
    launch = Launch(db=url_in(tmp_path), make_executor=lambda *_: LawExecutor())
    run_study(SPEC, launch)
    run_study(SPEC.model_copy(update={"name": "tuned"}).from_preset("fine_tuning"), launch)
    slow = {**SPEC.space.model_dump(), "learning_rate": 0.004}, {**SPEC.default.model_dump(), "learning_rate": 0.004}
    run_study(load_spec({**SPEC.model_dump(), "name": "no_preset", "space": slow[0], "default": slow[1]}), launch)
    with open_store(url_in(tmp_path), write=False) as store:
        about = {
            name: next(one for one in audit_stored(store, name).rules if one.rule is Rule.FINE_TUNING)
            for name in ("tuned", "toy")
        }
        assert list(scratch_answers(store, spec_of(store.studies.get("tuned")))) == ["toy"]
    assert "of study toy /" in about["tuned"].reason
    assert about["toy"].verdict == "not_run"


def test_the_cost_of_accumulation_is_timed_again_after_other_work_used_the_device(studied: Path) -> None:
    def verdict(executor: LawExecutor) -> str:
        found = audit_study(SPEC, Launch(db=url_in(studied), make_executor=lambda *_: executor))
        return next(one.verdict for one in found.rules if one.rule is Rule.ACCUMULATION)

    assert verdict(LawExecutor(timed=lambda found: replace(found, contended=True))) == "not_run"
    again = LawExecutor()
    assert verdict(again) != "not_run"
    assert {one.accumulation_steps for one in again.splits_timed} == {4}


def test_code_that_knows_no_micro_batches_is_audited_without_the_cost_of_accumulation(studied: Path) -> None:
    class Whole(LawExecutor):
        def measure_step_time(self, request: StepTimeRequest) -> StepTime:
            if request.configuration.accumulation_steps > 1:
                raise WorkloadError("the script has not asked for trial.accumulation_steps")
            return super().measure_step_time(request)

    ear = Ear()
    found = audit_study(SPEC, Launch(db=url_in(studied), listener=ear, make_executor=lambda *_: Whole()))
    assert any("cannot time gradient accumulation: the script has not asked" in one for one in ear.notes)
    assert any(one.verdict != "not_run" for one in found.rules)
