"""``bssearch run --quick``: which runs it makes, what it says of them, and what a search makes of it."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, UsageError, WorkloadError, open_store, run_study
from bssearch.analysis.law.quick import QuickAnswer
from bssearch.commands.quick import SLOWER, quick, track_record
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    GradientNoise,
    NoiseMeasurement,
    NoiseRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRecord,
    TrialState,
)
from bssearch.search.driver import Listener
from bssearch.search.finding import quick_prior, stored_quick
from bssearch.search.history import History
from tests.commands.conftest import ProbedExecutor
from tests.factories import make_quick, make_spec, not_none

SPEC = make_spec(
    space={"batch_size": {"low": 4, "high": 512}, "learning_rate": {"reference_batch": 32, "low": 0.01, "high": 1.0}},
    default={"batch_size": 64, "learning_rate": 0.14},
    budget={"trials": 12, "trial_train_seconds": 40.0},
    confirm={"top": 2, "runs": 3},
)
BEST = 18
"""√(B_crit · α / β) of the law that the executor answers by."""


def measured_noise(scale: float | None, low: float, high: float | None) -> GradientNoise:
    return GradientNoise(scale=scale, low=low, high=high, passes=64)


@dataclass
class NoisyExecutor(ProbedExecutor):
    """Measures a noise scale, or has no gradients to measure; some configurations may diverge before an evaluation."""

    noise: GradientNoise | None = field(default_factory=lambda: measured_noise(30.0, 24.0, 36.0))
    reason: str | None = None
    diverges: Callable[[Configuration], bool] = lambda configuration: False

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        if self.noise is None:
            raise WorkloadError("it is a program")
        return replace(super().measure_noise(request), noise=self.noise, reason=self.reason)

    def events(self, timeout: float) -> list[Event]:
        gone = TrialOutcome(state=TrialState.DIVERGED, reason="loss is nan", train_seconds=0.001)
        diverged = {request.number for request in self.requests if self.diverges(request.plan.configuration)}
        return [
            replace(one, outcome=gone) if isinstance(one, TrialEnded) and one.number in diverged else one
            for one in super().events(timeout)
            if not (isinstance(one, TrialObserved) and one.number in diverged)
        ]


Ask = Callable[..., QuickAnswer]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'quick.db'}"


@pytest.fixture
def ask(url: str) -> Ask:
    def asked(executor: ProbedExecutor | None = None, spec: Any = SPEC, seconds: float = 60.0) -> QuickAnswer:
        used = executor or NoisyExecutor()
        return quick(spec, Launch(db=url, make_executor=lambda *_: used), seconds=seconds)

    return asked


def test_a_few_runs_and_the_noise_scale_tell_the_batch_size(ask: Ask) -> None:
    found = ask()
    assert found.verified is False
    assert found.optimal.batch_size == 16, "the ladder's nearest to the law's optimum"
    assert found.interval[0] <= BEST <= found.interval[1] <= 8 * found.interval[0]
    assert found.flat_range[0] <= BEST <= found.flat_range[1]
    assert found.optimal.learning_rate == pytest.approx(0.14 / 2), "by the rule of the root"
    assert found.alpha_s == pytest.approx(0.001) and found.beta_s == pytest.approx(0.0001)
    assert found.b_crit.low < 30 < found.b_crit.high
    assert found.gain == pytest.approx(1.36, rel=0.15)
    assert {one.batch_size for one in found.runs} >= {64, 256, 16}
    assert [one.code for one in found.warnings] == ["many_epochs"], "9.4 of them"


@pytest.mark.slow
def test_its_runs_are_search_trials_that_a_search_goes_on_from(ask: Ask, url: str) -> None:
    found = ask()
    executor = NoisyExecutor()
    answer = run_study(SPEC, Launch(db=url, make_executor=lambda *_: executor))
    with open_store(url, write=False) as store:
        trials = store.trials.of(SPEC.name)
        record = track_record(store)
    assert [one.trial for one in found.runs] == [trial.number for trial in trials][: len(found.runs)]
    assert all(
        request.plan.configuration != SPEC.default_configuration or request.number > 3 for request in executor.requests
    )
    assert answer.quick is not None
    assert (answer.quick.batch_size, answer.quick.found_batch_size) == (16, answer.optimal.batch_size)
    assert answer.quick.holds and answer.quick.time_ratio is not None
    assert (record.held, [one.study for one in record.studies], record.waiting) == (1, [SPEC.name], [])


def trials_in(url: str) -> list[TrialRecord]:
    with open_store(url, write=False) as store:
        return store.trials.of(SPEC.name)


def test_before_a_search_the_promise_waits(ask: Ask, url: str) -> None:
    ask()
    with open_store(url, write=False) as store:
        record = track_record(store)
    assert (record.studies, record.waiting, record.median_time_ratio) == ([], [SPEC.name], None)


def test_a_noise_scale_far_from_the_target_is_told(ask: Ask) -> None:
    found = ask(NoisyExecutor(reason="the limit of 15 train seconds passed before"))
    assert "noise_moving" in [one.code for one in found.warnings]


def test_a_default_that_does_not_get_there_is_compared_at_part_of_the_way(ask: Ask) -> None:
    found = ask(spec=SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"trial_train_seconds": 0.3})}))
    assert found.target < SPEC.target.value
    assert found.warnings[0].code == "easier_target"


@pytest.mark.parametrize(
    ("highest", "said", "hint"),
    [
        (
            0.1,
            r"learning_rate = 0\.14 at batch 64 \(loss is nan\); the default trains with learning rate 0\.0156",
            f"--set default.learning_rate=0.0156 --set name={SPEC.name}-2",
        ),
        (0.0, r"does not train with learning rate 0\.0156 or 1\.26 either", "the first steps"),
    ],
)
def test_a_default_that_does_not_train_is_refused_with_the_rates_that_were_tried(
    ask: Ask, highest: float, said: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=said) as error:
        ask(NoisyExecutor(diverges=lambda one: one.learning_rate > highest))
    assert hint in not_none(error.value.hint)


def test_a_learning_rate_that_is_there_much_sooner_is_recommended(ask: Ask) -> None:
    found = ask(spec=SPEC.model_copy(update={"default": SPEC.default.model_copy(update={"learning_rate": 0.014})}))
    rule = 0.014 * (found.optimal.batch_size / 64) ** 0.5
    assert found.optimal.learning_rate == pytest.approx(9 * rule), "the best of rule, 3 × and 9 × and 27 ×"
    assert found.learning_rate_gain == pytest.approx(6.3, rel=0.1)
    low_end, high_end = found.learning_rate_range
    assert low_end <= 0.014 and high_end == pytest.approx(3 * found.optimal.learning_rate)
    assert found.interval[0] <= BEST <= found.interval[1], "other rates are no runs of the rule"


def test_a_default_outside_the_space_is_asked_about_all_the_same(ask: Ask) -> None:
    outside = SPEC.model_copy(update={"default": SPEC.default.model_copy(update={"learning_rate": 2.0})})
    assert ask(spec=outside).optimal.batch_size in {8, 16, 32}


@pytest.mark.parametrize("noise", [None, measured_noise(1e-9, 0.0, 40.0), measured_noise(None, 20.0, None)])
def test_without_a_noise_scale_with_both_ends_it_rests_on_the_runs_and_says_so(
    ask: Ask, noise: GradientNoise | None
) -> None:
    found = ask(NoisyExecutor(noise=noise))
    assert found.noise_scale is None
    assert [one.code for one in found.warnings] == ["noise_not_measured", "many_epochs"]
    assert found.optimal.batch_size == 16 and found.interval[0] <= BEST <= found.interval[1], "the runs tell it"


def test_what_it_is_not_made_for_is_told(ask: Ask) -> None:
    decaying = SPEC.default.model_copy(update={"schedule": "cosine", "horizon_samples": 5000.0})
    space = SPEC.space.model_copy(
        update={"schedule": SPEC.space.schedule.model_copy(update={"name": "cosine", "horizon_samples": 5000.0})}
    )
    found = ask(spec=SPEC.model_copy(update={"default": decaying, "space": space}).from_preset("fine_tuning"))
    assert {"fixed_horizon", "fine_tuning"} <= {one.code for one in found.warnings}


def test_it_begins_no_run_that_would_leave_no_time_for_the_noise(ask: Ask, url: str) -> None:
    executor = NoisyExecutor()
    ask(executor, seconds=1e-3)
    assert [request.plan.configuration.batch_size for request in executor.requests] == [64], "the default alone"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(ask: Ask, seconds: float) -> None:
    with pytest.raises(UsageError, match="must be a finite number > 0"):
        ask(seconds=seconds)


@dataclass
class Told(Listener):
    """Keeps what is said, and the quick answer that the search knows when a trial starts."""

    notes: list[str]
    known: list[QuickAnswer | None]

    def note(self, message: str) -> None:
        self.notes.append(message)

    def started(self, trial: TrialRecord, history: History) -> None:
        self.known.append(history.quick)


def run(url: str, spec: Any = SPEC, **options: Any) -> Told:
    told = Told([], [])
    run_study(spec, Launch(db=url, make_executor=lambda *_: NoisyExecutor(), listener=told), **options)
    return told


@pytest.mark.slow
def test_a_search_begins_at_a_quick_answer_that_is_stored_and_every_run_of_it_finds_that_again(
    ask: Ask, url: str
) -> None:
    expected = ask()
    assert expected.noise_scale == 30.0
    first, again = run(url), run(url, SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"trials": 16})}))
    for known in (first.known, again.known):
        assert known and all(one == expected for one in known)
    assert any("starts from the quick answer: batch 16" in one for one in first.notes)


@pytest.mark.slow
def test_two_drivers_of_a_study_begin_at_the_same_quick_answer(ask: Ask, url: str) -> None:
    expected = ask()
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(run, [url, url])
    known = [*one.known, *other.known]
    assert known and all(one == expected for one in known)


@pytest.mark.slow
def test_from_quick_makes_the_answer_where_none_is_stored(url: str) -> None:
    first = run(url, from_quick=True)
    with open_store(url, write=False) as store:
        made = not_none(stored_quick(store, SPEC.name))
        assert [one.trial for one in made.runs] == [*range(1, len(made.runs) + 1)]
        assert first.known[-1] == made
        run(url, from_quick=True)
        assert stored_quick(store, SPEC.name) == made, "it is not made twice"


def test_without_a_quick_answer_a_search_begins_at_none(url: str) -> None:
    assert set(run(url).known) == {None}


def test_from_quick_is_refused_where_the_objective_is_no_time(url: str) -> None:
    samples = make_spec(objective="samples_to_target")
    with pytest.raises(UsageError, match="objective = 'samples_to_target'"):
        run(url, samples, from_quick=True)
    with open_store(url) as store:
        assert store.studies.find(samples.name) is None


def test_a_run_far_behind_the_fastest_does_not_take_the_time_of_a_quick_answer(ask: Ask, url: str) -> None:
    ask()
    fastest = math.inf
    for trial in trials_in(url):
        assert trial.train_seconds_limit <= SLOWER * fastest
        if trial.state is TrialState.REACHED:
            fastest = min(fastest, not_none(trial.outcome).train_seconds)


@pytest.mark.parametrize(
    "changes", [{"interval": [0, 4]}, {"b_crit": {}}, {"noise_scale": -1.0}, {"optimal": None}, {"interval": ["a", 3]}]
)
def test_what_is_no_quick_answer_counts_as_none(url: str, changes: dict[str, Any]) -> None:
    with open_store(url) as store:
        store.studies.create(SPEC.new_study("tester"))
        for quick in (make_quick().model_dump(mode="json"), {**make_quick().model_dump(mode="json"), **changes}):
            store.findings.save(SPEC.name, store.findings.stamp(SPEC.name), {"quick": quick})
            assert (quick_prior(store, SPEC) is None) is (quick != make_quick().model_dump(mode="json"))


def test_a_default_that_had_too_little_time_runs_again_where_there_is_more(ask: Ask, url: str) -> None:
    assert ask(seconds=1.0).target < SPEC.target.value
    found = ask()
    assert found.target == SPEC.target.value
    assert "easier_target" not in [one.code for one in found.warnings]
    default = [one.state for one in trials_in(url) if one.configuration.trains_like(SPEC.default_configuration)]
    assert default == [TrialState.CAPPED, TrialState.REACHED]


def test_a_run_that_diverges_does_not_tell_how_long_the_others_train(ask: Ask, url: str) -> None:
    slow = SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"trial_train_seconds": 0.3})})
    ask(NoisyExecutor(diverges=lambda one: one.batch_size == 256), slow)
    limits = {one.configuration.batch_size: one.train_seconds_limit for one in trials_in(url)}
    assert 256 in limits and len(limits) > 2
    assert min(limits.values()) == pytest.approx(0.3)


@pytest.mark.slow
def test_a_quick_answer_after_the_search_is_no_promise(ask: Ask, url: str) -> None:
    ask()
    run(url)
    with open_store(url, write=False) as store:
        promised = stored_quick(store, SPEC.name)
        assert "after_search" in [one.code for one in ask().warnings]
        assert stored_quick(store, SPEC.name) == promised


def test_from_quick_makes_no_answer_once_a_search_has_ended(url: str) -> None:
    run(url)
    trials = len(trials_in(url))
    run(url, from_quick=True)
    assert len(trials_in(url)) == trials, "a quick answer makes runs"
    with open_store(url, write=False) as store:
        assert stored_quick(store, SPEC.name) is None


def test_a_default_that_had_too_little_time_to_train_is_told_to_take_more(ask: Ask) -> None:
    @dataclass
    class Still(NoisyExecutor):
        def events(self, timeout: float) -> list[Event]:
            return [one for one in super().events(timeout) if not isinstance(one, TrialObserved)]

    with pytest.raises(UsageError, match="does not train") as error:
        ask(Still(), seconds=1e-3)
    assert error.value.hint is not None and error.value.hint.startswith("raise --seconds 0.001")


def test_a_ladder_of_one_batch_size_has_a_quick_answer(ask: Ask) -> None:
    found = ask(spec=SPEC.model_copy(update={"space": SPEC.space.model_copy(update={"batch_size": [64]})}))
    assert (found.optimal.batch_size, found.interval) == (64, [64, 64])
    assert "one_batch_size" in [one.code for one in found.warnings]
