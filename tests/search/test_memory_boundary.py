"""What a search does where memory ends: it goes on in smaller micro-batches, and says so."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.commands.launch import Launch
from bssearch.commands.opening import opened
from bssearch.commands.probes import probe_memory
from bssearch.commands.run import run_study
from bssearch.commands.trials import enqueue
from bssearch.errors import LaunchError
from bssearch.executors.base import Event
from bssearch.records import Phase, TrialEnded, TrialOutcome, TrialState
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.spec import StudySpec
from bssearch.storage.repository import open_store
from tests.factories import SPEC as RAW, make_spec
from tests.search.law import LawExecutor
from tests.search.study import trials_in, url_in

BUDGET = {"trials": 16, "trial_train_seconds": 100.0}
SPEC = make_spec(budget=BUDGET, confirm={"top": 2, "runs": 2})
SIZES = [8, 16, 32, 64, 128]


def run(folder: Path, executor: LawExecutor, spec: StudySpec = SPEC) -> Answer:
    return run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor))


def splits(executor: LawExecutor) -> set[tuple[int, int]]:
    return {(one.plan.configuration.batch_size, one.plan.configuration.micro_batch_size) for one in executor.requests}


def test_batch_sizes_that_do_not_fit_at_once_are_timed_and_run_in_micro_batches(tmp_path: Path) -> None:
    executor = LawExecutor(fits_up_to=40)
    answer = run(tmp_path, executor)
    assert splits(executor) == {(8, 8), (16, 16), (32, 32), (64, 32), (128, 32)}
    timed = [(one.batch_size, one.micro_batch_size) for one in executor.splits_timed]
    first = [(8, 8), (16, 16), (32, 32), (64, 64), (64, 32), (128, 32)]  # 128 at once is known not to fit
    later = [(8, 8), (16, 16), (32, 32), (64, 32), (128, 32)]
    assert timed[: len(first)] == first
    confirmed = {one.configuration.batch_size for one in trials_in(tmp_path) if one.phase is Phase.CONFIRM}
    compared = [one for one in later if one[0] in confirmed]
    assert timed[len(first) :] == (COMPARING_VISITS - FIRST_VISITS) * compared
    assert answer.largest_that_fits.batch_size == 32
    assert answer.largest_that_fits.reason == "a micro-batch of 64 ran out of memory"
    assert {row.batch_size for row in answer.batches} == set(SIZES)
    assert all(trial.state is not TrialState.OOM for trial in trials_in(tmp_path))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_trial_that_runs_out_is_tried_again_in_smaller_micro_batches(tmp_path: Path, slots: int) -> None:
    executor = LawExecutor(slots=slots, trains_up_to=20)
    answer = run(tmp_path, executor)
    trials = trials_in(tmp_path)
    ran_out = [trial for trial in trials if trial.state is TrialState.OOM]
    assert ran_out
    for trial in ran_out:
        (again,) = [other for other in trials if other.retry_of == trial.number]
        assert again.configuration.trains_like(trial.configuration)
        assert again.configuration.micro_batch_size < trial.configuration.micro_batch_size
        assert (again.seed, again.uncapped, again.sampled) == (trial.seed, trial.uncapped, trial.sampled)
        assert again.eval_every_steps == trial.eval_every_steps
    default = [one for one in trials if one.configuration.trains_like(SPEC.default_configuration)]
    assert [one.state for one in default if one.phase is Phase.SEARCH] == [TrialState.OOM, TrialState.REACHED]
    assert answer.speedup.over_default is not None
    assert "default_outside_space" not in {notice.code for notice in answer.warnings}
    assert answer.largest_that_fits.batch_size == 16
    assert sum(one.phase is Phase.SEARCH and not one.state.is_missing for one in trials) == BUDGET["trials"]
    assert {row.batch_size for row in answer.batches} == set(SIZES)
    after = [one for one in executor.requests if one.number > max(trial.number for trial in ran_out) + slots]
    assert max(one.plan.configuration.micro_batch_size for one in after) == 16


@dataclass
class Unlucky(LawExecutor):
    """Trials in micro-batches of 32 and more run out of memory ``times``, for what others left of it."""

    times: int = 1

    def events(self, timeout: float) -> list[Event]:
        if self.running and self.times and self.running[0].plan.configuration.micro_batch_size >= 32:
            self.times -= 1
            return [
                TrialEnded(self.running.pop(0).number, TrialOutcome(state=TrialState.OOM, reason="CUDA out of memory"))
            ]
        return super().events(timeout)


def test_a_size_that_fits_into_a_new_process_is_used_again_after_one_trial_ran_out_of_memory(tmp_path: Path) -> None:
    executor = Unlucky()
    answer = run(tmp_path, executor)
    trials = trials_in(tmp_path)
    (ran_out,) = [trial for trial in trials if trial.state is TrialState.OOM]
    (again,) = [trial for trial in trials if trial.retry_of == ran_out.number]
    assert again.configuration == ran_out.configuration
    assert executor.sizes_run == [ran_out.configuration.micro_batch_size]
    assert all(one.plan.configuration.accumulation_steps == 1 for one in executor.requests)
    assert answer.largest_that_fits.batch_size == 128


def test_the_second_trial_that_runs_out_of_memory_at_a_size_lowers_the_boundary_for_good(tmp_path: Path) -> None:
    executor = Unlucky(times=2)
    answer = run(tmp_path, executor)
    ran_out = [trial.configuration for trial in trials_in(tmp_path) if trial.state is TrialState.OOM]
    assert len(ran_out) == 2 and len({one.micro_batch_size for one in ran_out}) == 1
    assert executor.sizes_run == [ran_out[0].micro_batch_size], "it is tried once"
    assert answer.largest_that_fits.batch_size < ran_out[0].micro_batch_size


def test_memory_that_ends_during_confirmation_repeats_the_runs_of_that_batch_size(tmp_path: Path) -> None:
    def shrinks(law: LawExecutor) -> None:
        confirming = bool(law.running and law.running[0].plan.is_tested)
        if confirming and sum(one.plan.is_tested for one in law.requests) == 5:
            law.trains_up_to = min(law.trains_up_to, law.running[0].plan.configuration.micro_batch_size - 1)

    executor = LawExecutor(on_look=shrinks)
    answer = run(tmp_path, executor)
    confirming = [trial for trial in trials_in(tmp_path) if trial.phase is Phase.CONFIRM]
    (ran_out,) = [trial for trial in confirming if trial.state is TrialState.OOM]
    bound = ran_out.configuration.micro_batch_size
    whole = [trial for trial in confirming if trial.configuration.micro_batch_size < bound]
    assert set(Counter(trial.configuration.key for trial in whole).values()) == {2}
    assert any(trial.configuration.accumulation_steps > 1 for trial in whole)
    assert not {"unconfirmed", "confirmation_incomplete"} & {notice.code for notice in answer.warnings}
    assert answer.optimal.micro_batch_size < bound


def test_where_nothing_fits_any_more_the_study_ends_with_the_reason(tmp_path: Path) -> None:
    executor = LawExecutor(trains_up_to=0)
    with pytest.raises(LaunchError, match="not even a micro-batch of one sample") as raised:
        run(tmp_path, executor)
    assert raised.value.exit_code == 6
    with (
        open_store(url_in(tmp_path)) as store,
        pytest.raises(LaunchError, match="not even a micro-batch of one sample"),
    ):
        enqueue(store, SPEC.name, {"dropout": 0.4})


def test_a_cap_that_the_probe_has_shown_not_to_fit_is_refused_before_the_study_begins(tmp_path: Path) -> None:
    capped: dict[str, Any] = {"space": {**RAW["space"], "max_micro_batch_size": 64}, "budget": BUDGET}
    spec = make_spec(**capped)
    executor = LawExecutor(fits_up_to=40)
    with opened(spec, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor)) as study:
        probe_memory(study)
    with pytest.raises(LaunchError, match=r"max_micro_batch_size = 64 .*: 42 ran .* nearest that works is 40 \(peak"):
        run(tmp_path, executor, spec)
    assert executor.requests == []
