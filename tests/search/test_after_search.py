"""Batch schedules and their repeats, and finalists trained past the target."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, LaunchError, Store, UsageError, audit_study, confirm_study, open_store, run_study
from bssearch.analysis.answer import Answer
from bssearch.commands.check import longest_seconds, pruned_seconds
from bssearch.commands.opening import stored_spec
from bssearch.commands.trials import enqueue, with_schedule
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    Phase,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
    batch_schedule_of,
    constant_configurations,
)
from bssearch.search.after_search import finalists, more_regularised, next_run
from bssearch.search.finding import answer
from bssearch.search.history import History, trial_seed
from bssearch.spec import SearchSpace
from tests.factories import SPEC as RAW, make_probe, make_spec, make_trial, not_none
from tests.search.law import LawExecutor, step_seconds, trials_in, url_in
from tests.waiting import Ear

LIMIT = 100.0
HORIZON = 20000
GROWS: dict[str, Any] = {"name": ["geometric", "linear"]}


def spec_of(schedule: dict[str, Any] | None = None, decays: Any = None, **budget: Any) -> Any:
    return make_spec(
        budget={"trials": 12, "trial_train_seconds": LIMIT, "schedule_trials": 6, **budget},
        confirm={"top": 1, "runs": 3},
        space={
            "batch_size": {"low": 4, "high": 256},
            "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 0.5},
            **({} if schedule is None else {"batch_schedule": schedule}),
            **({} if decays is None else {"schedule": {"name": decays, "horizon_samples": HORIZON}}),
        },
        default={
            "batch_size": 32,
            "learning_rate": 0.1,
            **({"schedule": decays[0]} if isinstance(decays, list) else {}),
        },
    )


def walked(configuration: Configuration, spread: float) -> tuple[int, int, float]:
    """(Steps, samples, seconds) to the target, while the critical batch size grows from 5 to 400."""
    schedule = batch_schedule_of(configuration)
    rates = {one.batch_size: one.learning_rate for one in constant_configurations(configuration)}
    progress, steps, samples, seconds = 0.0, 0, 0, 0.0
    while progress < 100 * spread:
        critical = 5 + 4 * progress
        size = configuration.batch_size
        if schedule is not None and schedule.noise_share is not None:
            size = max(one.batch_size for one in schedule.stages if one.batch_size <= max(size, critical))
        elif schedule is not None:
            size = next(one.batch_size for one in reversed(schedule.stages) if one.start_samples <= samples)
        off = math.log(rates[size] / (0.1 * math.sqrt(size / 32)))
        progress += size / (size + critical) / (1 + off**2)
        steps, samples, seconds = steps + 1, samples + size, seconds + step_seconds(size)
    return steps, samples, seconds


class CriticalLaw(LawExecutor):
    """Ends each trial at the simulated target, slightly varied by its seed."""

    def events(self, timeout: float) -> list[Event]:
        if not self.running:
            return []
        request = self.running.pop(0)
        steps, samples, seconds = walked(request.plan.configuration, 1 + 0.01 * (request.plan.seed % 7 - 3))
        reached = seconds <= request.plan.train_seconds_limit
        end = min(seconds, request.plan.train_seconds_limit)
        events: list[Event] = [
            TrialObserved(request.number, self.observe(request, share, seconds)) for share in (0.0, 1.0)
        ]
        outcome = TrialOutcome(
            state=TrialState.REACHED if reached else request.plan.limit_state,
            reason="by the law",
            steps=steps if reached else max(1, round(steps * end / seconds)),
            samples=samples,
            train_seconds=end,
            wall_seconds=end,
            time_to_target_s=seconds if reached else None,
            steps_to_target=steps if reached else None,
            best_metric=0.9 if reached else 0.5,
            final_metric=0.9,
        )
        return [*events, TrialEnded(request.number, outcome)]


class NoDecay(CriticalLaw):
    """Diverges if the learning rate decays."""

    def events(self, timeout: float) -> list[Event]:
        if self.running and self.running[0].plan.configuration.parameters["schedule"] == "cosine":
            diverged = TrialOutcome(state=TrialState.DIVERGED, reason="as the test has it")
            return [TrialEnded(self.running.pop(0).number, diverged)]
        return super().events(timeout)


@dataclass
class EndsGrowth(CriticalLaw):
    """Ends every trial with a growing batch in ``state``."""

    state: TrialState = TrialState.FAILED

    def events(self, timeout: float) -> list[Event]:
        if self.running and self.running[0].plan.configuration.grows:
            return [TrialEnded(self.running.pop(0).number, TrialOutcome(state=self.state, reason="as the test has it"))]
        return super().events(timeout)


def run(spec: Any, folder: Path, executor: LawExecutor | None = None) -> Any:
    return run_study(spec, Launch(db=url_in(folder), make_executor=lambda spec, folder: executor or CriticalLaw()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished study with schedules; read-only."""
    folder = tmp_path_factory.mktemp("grown")
    run(spec_of(GROWS), folder)
    return folder


@pytest.fixture
def store(folder: Path) -> Any:
    with open_store(url_in(folder), write=False) as store:
        yield store


def test_it_follows_the_search_within_its_own_budget_and_its_two_best_are_repeated(store: Store) -> None:
    spec, trials = spec_of(GROWS), store.trials.of("toy")
    grown = [one for one in trials if one.phase is Phase.GROWTH]
    assert len(grown) == 6 and all(one.configuration.grows for one in grown)
    others = [one for one in trials if one.phase in {Phase.SEARCH, Phase.CONFIRM}]
    assert max(one.number for one in others) < min(one.number for one in grown)
    assert not any(one.configuration.grows for one in others)
    repeats = [one for one in trials if one.phase is Phase.AUDIT]
    ranked = sorted(
        (one for one in grown if one.outcome and one.outcome.time_to_target_s),
        key=lambda one: one.outcome.time_to_target_s if one.outcome and one.outcome.time_to_target_s else math.inf,
    )
    assert {one.configuration.key for one in repeats} == {one.configuration.key for one in ranked[:2]}
    seeds = [trial_seed(spec.seed, Phase.CONFIRM, index) for index in range(3)]
    assert sorted(one.seed for one in repeats) == sorted(2 * seeds)


def test_if_the_critical_batch_grows_the_answer_recommends_growth_and_its_gain(store: Store, folder: Path) -> None:
    found = run(spec_of(GROWS), folder)
    grown = found.batch_schedule
    assert grown.saves_time == "yes" and grown.ratio.high < 1 and grown.runs == 3
    best, tuned = ([walked(one, 1.0)[2] for one in ones] for ones in ([_schedule(store, grown)], [_optimum(found)]))
    assert grown.ratio.value == pytest.approx(best[0] / tuned[0], rel=0.02)
    first, *later = grown.stages
    assert first.start_samples == 0 and all(one.start_samples > 0 for one in later)
    assert sum(one.seconds for one in grown.stages) == pytest.approx(grown.time_to_target, rel=0.02)
    assert "A growing batch saves time: the schedule takes" in _told(found)


def test_the_answer_about_batches_that_stay_is_the_same_without_schedules(tmp_path: Path, store: Store) -> None:
    plain = run(spec_of(), tmp_path)
    grown = run(spec_of(GROWS), Path(store.masked_url.removeprefix("sqlite:///")).parent)
    left_out = {"batch_schedule", "cost"}
    assert plain.batch_schedule is None
    assert plain.model_dump(exclude=left_out) == grown.model_dump(exclude=left_out)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_seesaw_grows_the_batch_by_as_much_as_the_decay_has_divided_the_rate(decay: str, tmp_path: Path) -> None:
    run(spec_of({"name": "seesaw", "rate_rule": "linear"}, decay), tmp_path)
    grown = [one.configuration for one in trials_in(tmp_path) if one.phase is Phase.GROWTH]
    assert grown
    for one in grown:
        first, *later = not_none(batch_schedule_of(one)).stages
        for stage in later:
            left = first.batch_size / stage.batch_size
            share = math.acos(2 * left - 1) / math.pi if decay == "cosine" else 1 - left
            assert stage.start_samples == pytest.approx(HORIZON * share, abs=stage.batch_size)
        assert (one.parameters["batch_rate_rule"], one.parameters["schedule"]) == ("sqrt", decay)


def test_seesaw_needs_a_tuned_rate_that_decays(tmp_path: Path) -> None:
    run(spec_of({"name": "seesaw"}, ["constant", "cosine"]), tmp_path, NoDecay())
    assert not [one for one in trials_in(tmp_path) if one.phase is Phase.GROWTH]


def test_the_audit_holds_the_belief_against_the_best_schedule(folder: Path) -> None:
    found = audit_study(spec_of(GROWS), Launch(db=url_in(folder)), run=False)
    [belief] = [one for one in found.rules if one.rule == "growing the batch saves time"]
    assert belief.verdict == "held" and belief.regret is not None and belief.regret.value < 1
    assert belief.configuration is not None and "batch_stages" in belief.configuration


def test_without_a_search_the_audit_runs_a_batch_that_doubles_around_the_optimum(tmp_path: Path) -> None:
    optimum = run(spec_of(), tmp_path).optimal.batch_size
    found = audit_study(spec_of(), Launch(db=url_in(tmp_path), make_executor=lambda spec, folder: CriticalLaw()))
    [belief] = [one for one in found.rules if one.rule == "growing the batch saves time"]
    assert belief.verdict in {"held", "broke", "undecided"} and belief.trial_numbers
    schedule = batch_schedule_of(trials_in(tmp_path)[belief.trial_numbers[0] - 1].configuration)
    assert [one.batch_size for one in not_none(schedule).stages] == [optimum // 2, optimum, 2 * optimum]


def test_an_enqueued_configuration_runs_first_even_outside_the_space(tmp_path: Path) -> None:
    run(spec_of(), tmp_path)
    with open_store(url_in(tmp_path)) as store:
        number, configuration = enqueue(store, "toy", {"batch_size": 8, "batch_stages": "400:32 2000:128"})
        assert configuration.learning_rate == pytest.approx(0.1 * math.sqrt(8 / 32))
        assert configuration.parameters["batch_rate_rule"] == "sqrt"
    found = run(spec_of(), tmp_path)
    trial = trials_in(tmp_path)[number - 1]
    assert (trial.phase, trial.state) == (Phase.GROWTH, TrialState.REACHED)
    assert [one.batch_size for one in found.batch_schedule.stages] == [8, 32, 128]
    assert found.batch_schedule.runs == 3 and found.batch_schedule.trials == 1


def test_a_schedule_whose_target_came_before_its_second_stage_is_not_repeated(tmp_path: Path) -> None:
    run(spec_of(), tmp_path)
    with open_store(url_in(tmp_path)) as store:
        best = answer(store, "toy").optimal.batch_size
        for stages in (f"40000:{2 * best}", f"400:{2 * best}"):
            enqueue(store, "toy", {"batch_size": best, "batch_stages": stages})
    found = run(spec_of(), tmp_path)
    with open_store(url_in(tmp_path), write=False) as store:
        late = next(one for one in store.trials.of("toy") if one.phase is Phase.GROWTH)
        assert late.outcome is not None and late.state is TrialState.REACHED and late.outcome.samples < 40000
        repeated = {one.configuration.key for one in store.trials.of("toy") if one.phase is Phase.AUDIT}
    assert late.configuration.key not in repeated and len(repeated) == 1
    assert found.batch_schedule.stages[1].start_samples == 400


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"batch_size": 8, "batch_stages": "400:33"}, "33 is not a batch size of the study; choose from 4, 8, 16"),
        ({"batch_size": 8, "batch_stages": "400:4"}, "batch 4 must be larger than 8, the batch before"),
        (
            {"batch_size": 8, "batch_stages": "4:32"},
            "begins after 4 samples; use at least 8 samples, one step after batch 8",
        ),
        ({"batch_size": 8, "batch_stages": "99999999:32"}, "begins after 99999999 samples, but a trial of 100 s"),
        ({"batch_size": 8, "batch_stages": "400:32 99999999:64"}, "batch 64 begins after 99999999 samples, but"),
        ({"batch_size": 8, "batch_stages": "400:32", "batch_schedule": None}, "batch_schedule = None must be one of"),
        (
            {"batch_size": 8, "batch_stages": "400:32", "batch_schedule": "linear", "batch_noise_share": 1},
            "batch_noise_share = 1 does not fit a linear schedule",
        ),
        ({"batch_size": 8, "batch_rate_rule": "sqrt"}, "batch_stages = '' must name 1 to 63 changes"),
        (
            {"batch_size": 8, "batch_stages": "32", "batch_noise_share": -1},
            "batch_noise_share = -1 must be a finite number",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_not_queued(folder: Path, values: dict[str, Any], expected: str) -> None:
    with open_store(url_in(folder)) as store, pytest.raises(UsageError, match=expected):
        before = len(store.trials.of("toy"))
        enqueue(store, "toy", values)
    assert len(trials_in(folder)) == before


@pytest.mark.parametrize(
    ("workload", "values", "expected"),
    [
        ("objective", {"batch_stages": "400:64"}, "a batch schedule does not work with a function"),
        ("train.py", {"batch_stages": "64", "batch_noise_share": 1}, "'noise_scale' does not work with a program"),
    ],
)
def test_a_schedule_that_a_program_cannot_follow_is_not_queued(
    workload: str, values: dict[str, Any], expected: str
) -> None:
    spec = make_spec(workload=workload)
    with pytest.raises(UsageError, match=expected):
        with_schedule(spec, spec.default_configuration, values)
    if workload == "train.py":
        assert with_schedule(spec, spec.default_configuration, {"batch_stages": "400:128"}).grows


def test_milestones_and_the_noise_scale_are_tried_as_given(tmp_path: Path) -> None:
    run(spec_of({"name": ["milestones", "noise_scale"], "milestones": {640: 32, 3200: 128}}), tmp_path)
    grown = [one.configuration for one in trials_in(tmp_path, Phase.GROWTH)]
    by_name = {str(one.parameters["batch_schedule"]): one for one in grown}
    assert by_name["milestones"].parameters["batch_stages"] == "640:32 3200:128"
    assert ":" not in str(by_name["noise_scale"].parameters["batch_stages"])
    shares = [float(one.parameters["batch_noise_share"] or 0) for one in grown if "batch_noise_share" in one.parameters]
    assert shares and all(0.25 <= share <= 4 for share in shares)


def test_schedules_without_milestones_are_searched_if_no_milestone_may_run(tmp_path: Path) -> None:
    broken = CriticalLaw(refuses=frozenset({256}))
    run(spec_of({"name": ["milestones", "linear"], "milestones": {640: 256}}), tmp_path, broken)
    grown = [one.configuration for one in trials_in(tmp_path, Phase.GROWTH)]
    assert [one.parameters["batch_schedule"] for one in grown] == ["linear"] * 6


def test_out_of_memory_in_a_growing_trial_does_not_blame_its_first_micro_batch(tmp_path: Path) -> None:
    run(spec_of(GROWS), tmp_path, EndsGrowth(state=TrialState.OOM))
    with open_store(url_in(tmp_path), write=False) as store:
        assert store.probes.memory_boundary("toy").too_large is None
        assert sum(one.state is TrialState.OOM for one in store.trials.of("toy")) == 6


def _schedule(store: Store, grown: Any) -> Configuration:
    return store.trials.get("toy", grown.trial_numbers[0]).configuration


def _optimum(found: Any) -> Configuration:
    size = found.optimal.batch_size
    return Configuration(
        batch_size=size, micro_batch_size=size, learning_rate=found.optimal.parameters["learning_rate"]
    )


def _told(found: Any) -> str:
    from bssearch.analysis.headline import about_growing

    return about_growing(found)


def test_an_estimate_has_the_schedules_and_their_repeats() -> None:
    plain, grown = spec_of(), spec_of(GROWS)
    runs = 6 + 2 * 3
    assert longest_seconds(grown, 10.0)[1] - longest_seconds(plain, 10.0)[1] == runs * 10
    assert pruned_seconds(grown, 5.0, LIMIT) - pruned_seconds(plain, 5.0, LIMIT) == pytest.approx(runs * 5)


@pytest.mark.parametrize("objective", ["samples_to_target", "cost_to_target"])
def test_a_trial_may_always_take_half_as_long_again_as_the_best(objective: str, tmp_path: Path) -> None:
    run(spec_of(GROWS).model_copy(update={"objective": objective, "price_per_device_hour": 2.0}), tmp_path)
    trials = trials_in(tmp_path)
    reached = [
        one.outcome.time_to_target_s
        for one in trials
        if one.phase is Phase.SEARCH and one.outcome is not None and one.outcome.time_to_target_s is not None
    ]
    limits = {one.train_seconds_limit for one in trials if one.phase is Phase.GROWTH}
    assert limits and all(1.5 * min(reached) * 0.99 <= limit <= LIMIT for limit in limits)


def test_no_configuration_is_tried_twice_and_one_that_never_began_is_untried(tmp_path: Path) -> None:
    spec = spec_of({"name": "milestones", "milestones": {99_999_999: 64}})
    ear = Ear()
    run_study(spec, Launch(db=url_in(tmp_path), make_executor=lambda spec, folder: CriticalLaw(), listener=ear))
    assert any("space.batch_schedule led to no trial" in one for one in ear.notes)
    run(spec_of({"name": "milestones", "milestones": {400: 64}, "start": 8}, schedule_trials=12), tmp_path)
    grown = [one.configuration.key for one in trials_in(tmp_path, Phase.GROWTH)]
    assert len(grown) == len(set(grown)) > 1


def test_trials_that_fail_end_the_search_for_a_schedule(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="5 trials in a row failed"):
        run(spec_of(GROWS), tmp_path, EndsGrowth())
    assert len(trials_in(tmp_path, Phase.GROWTH)) == 5


# Past the target ------------------------------------------------------------------------------------------------------


SPEC = make_spec(budget={"trials": 16, "trial_train_seconds": LIMIT}, confirm={"top": 2, "runs": 3})


def train_on(request: TrialRequest, outcome: TrialOutcome) -> TrialOutcome:
    """End a trial that trains past the target at its limit, with a metric that falls with the batch size."""
    if request.plan.stop_at_target:
        return outcome
    final = 0.99 - 0.0005 * request.plan.configuration.batch_size + 0.1 * request.plan.configuration.dropout
    limit = request.plan.train_seconds_limit
    return replace(outcome, train_seconds=limit, final_metric=final, test_metric=final - 0.01)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Database of a finished study; tests continue copies of it."""
    folder = tmp_path_factory.mktemp("searched")
    run_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: LawExecutor(ended_as=train_on)))
    return folder / "study.db"


@pytest.fixture
def ended(searched: Path, tmp_path: Path) -> Path:
    shutil.copy(searched, tmp_path / "study.db")
    return tmp_path


def go_on(folder: Path, executor: LawExecutor, runs: int = 2) -> Answer:
    spec, _ = stored_spec("toy", Launch(db=url_in(folder)))
    return confirm_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor), to_budget_runs=runs)


def at(size: int, **changes: Any) -> Configuration:
    return Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.1, **changes)


def history(*trials: TrialRecord, spec: Any = SPEC) -> History:
    return History(spec, trials, {size: make_probe(size) for size in (8, 16, 32, 64, 128)})


def confirmed(configuration: Configuration, start: int, *seconds: float) -> list[TrialRecord]:
    return [
        make_trial(start + n, configuration=configuration, phase=Phase.CONFIRM, seed=n, seconds=value)
        for n, value in enumerate(seconds)
    ]


def test_finalists_are_the_confirmed_trials_or_the_best_hit_of_each_batch_size() -> None:
    lucky, steady = at(32, weight_decay=1e-3), at(32)
    seen = history(
        make_trial(1, configuration=lucky, seconds=0.5),
        make_trial(2, configuration=steady, seconds=1.0),
        make_trial(3, configuration=at(64), seconds=3.0),
        make_trial(4, configuration=at(64, weight_decay=1e-3), seconds=2.0),
        make_trial(5, configuration=at(128), state=TrialState.CAPPED, seconds=9.0),
        *confirmed(lucky, 10, 1.5, 1.5, 1.5),
        *confirmed(steady, 20, 1.0, 1.0, 1.0),
    )
    assert finalists(seen) == [steady, at(64, weight_decay=1e-3)]
    assert finalists(history(make_trial(1, state=TrialState.CAPPED))) == []


def test_the_largest_is_also_run_with_more_regularisation_in_the_micro_batches_of_its_batch_size() -> None:
    best, largest = at(32, dropout=0.2, weight_decay=1e-4), at(128, dropout=0.1, weight_decay=1e-4)
    trials = [make_trial(1, configuration=best), make_trial(2, configuration=largest, seconds=2.0)]
    harder = replace(largest, dropout=0.4, weight_decay=1e-3)
    assert finalists(history(*trials)) == [best, largest, harder]
    accumulated = History(SPEC, trials, {32: make_probe(32), 128: make_probe(128, micro_batch_size=64)})
    assert finalists(accumulated)[1:] == [largest.in_micro_batches(64), harder.in_micro_batches(64)]


def test_regularisation_follows_the_square_root_of_the_batch_size_within_the_space() -> None:
    space = SearchSpace.model_validate({**RAW["space"], "label_smoothing": {"low": 0.05, "high": 0.1}})
    optimum = at(8, dropout=0.1, weight_decay=1e-4, label_smoothing=0.08)
    assert more_regularised(space, at(32), optimum) == at(32, dropout=0.2, weight_decay=1e-3, label_smoothing=0.1)
    assert more_regularised(space, at(128), replace(optimum, dropout=0.2)).dropout == 0.5  # 0.8, clipped
    assert more_regularised(space, at(32, dropout=0.3), optimum).dropout == 0.3  # never less than it is
    fixed = SearchSpace.model_validate({**RAW["space"], "weight_decay": 0.0, "dropout": 0.1})
    same = at(128, dropout=0.1)
    assert more_regularised(fixed, same, at(32, dropout=0.1)) == same


def test_all_train_to_the_full_limit_with_the_seeds_of_the_confirmation_interleaved(ended: Path) -> None:
    executor = LawExecutor(ended_as=train_on)
    answer = go_on(ended, executor)
    trials = trials_in(ended, Phase.TO_BUDGET)
    assert len(trials) == len(executor.requests)
    assert all(not one.plan.stop_at_target and one.plan.is_tested for one in executor.requests)
    assert {(one.plan.train_seconds_limit, one.plan.limit_state) for one in executor.requests} == {
        (LIMIT, TrialState.EXHAUSTED)
    }
    seeds = [trial.seed for trial in trials]
    half = len(seeds) // 2
    assert (set(seeds[:half]), set(seeds[half:])) == tuple({trial_seed(SPEC.seed, Phase.CONFIRM, n)} for n in range(2))
    orders = [[one.configuration.key for one in trials[part]] for part in (slice(half), slice(half, None))]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    found = not_none(answer.generalisation)
    assert found.train_seconds == LIMIT
    assert {row.batch_size: row.runs for row in found.batches} == dict.fromkeys(
        {trial.configuration.batch_size for trial in trials}, 2
    )
    assert len(go_on(ended, LawExecutor(ended_as=train_on), runs=3).optimal.trial_numbers) == len(
        answer.optimal.trial_numbers
    )
    assert len(trials_in(ended, Phase.TO_BUDGET)) == 3 * half  # one more seed each


@pytest.mark.parametrize(
    ("states", "limit", "phase", "is_repeated"),
    [
        ([TrialState.REACHED], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.DIVERGED], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.RUNNING], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.FAILED], LIMIT, Phase.TO_BUDGET, True),
        ([TrialState.FAILED, TrialState.FAILED], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.LOST, TrialState.CANCELLED], LIMIT, Phase.TO_BUDGET, True),
        ([TrialState.REACHED], LIMIT / 2, Phase.TO_BUDGET, True),  # the budget was raised later
        ([TrialState.REACHED], LIMIT, Phase.AUDIT, True),  # a rule audit stops at the target
    ],
)
def test_a_failed_run_is_repeated_once_and_a_run_with_another_limit_again(
    states: list[TrialState], limit: float, phase: Phase, is_repeated: bool
) -> None:
    base = make_trial(1, configuration=at(32), seconds=1.0)
    run = not_none(next_run(history(base), 1))
    assert (run.phase, run.uncapped, run.stop_at_target) == (Phase.TO_BUDGET, True, False)
    made: dict[str, Any] = {"configuration": at(32), "seed": run.seed, "phase": phase, "uncapped": True}
    done = [make_trial(10 + n, state=state, **made) for n, state in enumerate(states)]
    known = history(base, *(replace(one, train_seconds_limit=limit) for one in done))
    assert (next_run(known, 1) is not None) is is_repeated
