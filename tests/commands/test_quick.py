"""``bssearch quick``: which runs it makes, what it says of them, and what a search makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bssearch.analysis.law.quick import QuickAnswer
from bssearch.commands.quick.answer import quick
from bssearch.commands.quick.track_record import track_record
from bssearch.commands.run import run_study
from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.base import Ended, Event, Observed
from bssearch.records import GradientNoise, NoiseMeasurement, NoiseRequest, TrialOutcome, TrialState
from bssearch.storage.repository import open_store
from tests.commands.probing import ProbedExecutor
from tests.factories import make_spec

SPEC = make_spec(
    space={"batch_size": {"low": 4, "high": 512}, "learning_rate": {"reference_batch": 32, "low": 0.01, "high": 1.0}},
    default={"batch_size": 64, "learning_rate": 0.14},
    budget={"trials": 12, "trial_train_seconds": 40.0},
    confirm={"top": 2, "runs": 3},
)
BEST = 18
"""√(B_crit · α / β) of the law that the executor answers by."""


@dataclass
class NoisyExecutor(ProbedExecutor):
    """Measures a noise scale."""

    scale: float = 30.0
    reason: str | None = None

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        noise = GradientNoise(scale=self.scale, low=0.8 * self.scale, high=1.2 * self.scale, passes=64)
        return replace(super().measure_noise(request), noise=noise, reason=self.reason)


@dataclass
class SilentExecutor(ProbedExecutor):
    """Has no gradients to measure."""

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        raise WorkloadError("it is a program")


Ask = Callable[..., QuickAnswer]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'quick.db'}"


@pytest.fixture
def ask(url: str) -> Ask:
    def asked(executor: ProbedExecutor | None = None, spec: Any = SPEC, seconds: float = 60.0) -> QuickAnswer:
        used = executor or NoisyExecutor()
        return quick(spec, seconds=seconds, db=url, make_executor=lambda *_: used)

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
    assert found.warnings == []


def test_its_runs_are_search_trials_that_a_search_goes_on_from(ask: Ask, url: str) -> None:
    found = ask()
    executor = NoisyExecutor()
    answer = run_study(SPEC, db=url, make_executor=lambda *_: executor)
    with open_store(url, write=False) as store:
        trials = store.trials(SPEC.name)
        record = track_record(store)
    assert [one.trial for one in found.runs] == [trial.number for trial in trials][: len(found.runs)]
    assert all(
        request.configuration != SPEC.default_configuration or request.number > 3 for request in executor.requests
    )
    assert answer.quick is not None
    assert (answer.quick.batch_size, answer.quick.found_batch_size) == (16, answer.optimal.batch_size)
    assert answer.quick.holds and answer.quick.time_ratio is not None
    assert (record.held, [one.study for one in record.studies], record.waiting) == (1, [SPEC.name], [])


def test_before_a_search_the_promise_waits(ask: Ask, url: str) -> None:
    ask()
    with open_store(url, write=False) as store:
        record = track_record(store)
    assert (record.studies, record.waiting, record.median_time_ratio) == ([], [SPEC.name], None)


def test_without_gradients_it_rests_on_the_runs_and_says_so(ask: Ask) -> None:
    found = ask(SilentExecutor())
    assert found.noise_scale is None
    assert [one.code for one in found.warnings] == ["noise_not_measured"]
    assert found.interval[0] <= BEST <= found.interval[1]


def test_a_noise_scale_far_from_the_target_is_told(ask: Ask) -> None:
    found = ask(NoisyExecutor(reason="the limit of 15 train seconds passed before"))
    assert "noise_moving" in [one.code for one in found.warnings]


def test_a_default_that_does_not_get_there_is_compared_at_part_of_the_way(ask: Ask) -> None:
    short = SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"trial_train_seconds": 0.3})})
    found = ask(spec=short)
    assert found.target < SPEC.target.value
    assert found.warnings[0].code == "easier_target"


def test_a_default_that_does_not_train_is_refused_with_other_rates(ask: Ask) -> None:
    @dataclass
    class Dead(NoisyExecutor):
        def events(self, timeout: float) -> list[Event]:
            gone = TrialOutcome(state=TrialState.DIVERGED, reason="loss is nan")
            return [
                replace(one, outcome=gone) if isinstance(one, Ended) else one
                for one in super().events(timeout)
                if not isinstance(one, Observed)
            ]

    with pytest.raises(UsageError, match=r"learning_rate = 0\.14 at batch 64 \(loss is nan\)") as error:
        ask(Dead())
    assert "0.014" in str(error.value.hint)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(ask: Ask, seconds: float) -> None:
    with pytest.raises(UsageError, match="must be a finite number > 0"):
        ask(seconds=seconds)
