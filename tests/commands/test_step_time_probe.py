"""The probe of every batch size's step time, against an executor that answers by a law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.commands.opening import Launch
from bssearch.commands.probe.step_time import SECONDS_LIMIT, probe_step_times, step_time
from bssearch.records import MemoryUse, StepTime, StepTimeError, StepTimeRequest, TrialRecord
from bssearch.search import calibration
from bssearch.search.calibration import doubtful, measure_step_times, missing_step_times
from bssearch.search.listener import Listener
from bssearch.storage.repository import Store
from tests.commands.probing import HERE, SPEC, ProbedExecutor, open_study
from tests.factories import SPEC as RAW
from tests.factories import make_probe, make_spec, make_trial
from tests.search.law import step_seconds

SIZES = [8, 16, 32, 64, 128]
ERROR = StepTimeError(own=0.05, common=0.05, freedom=8.0, visits=3)


class Notes(Listener):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


def test_every_batch_size_is_timed_for_longer_than_a_run_would_and_told(store: Store) -> None:
    executor = ProbedExecutor()
    listener = Notes()
    probes = probe_step_times(open_study(store, executor, listener))
    assert [probe.batch_size for probe in probes] == SIZES
    assert probes == list(store.probes(SPEC.name).values())
    assert listener.told == [f"batch {probe.batch_size}: {probe.steps_timed} steps timed" for probe in probes]
    assert executor.limits == [SECONDS_LIMIT] * 5
    assert all(probe.eval_every_steps for probe in probes)


def test_the_document_has_the_fit_and_is_whole_without_one(tmp_path: Path) -> None:
    launch = Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: ProbedExecutor())
    fit = step_time(SPEC, launch).document["fit"]
    assert isinstance(fit, dict) and fit["beta_seconds"] == pytest.approx(0.0001, rel=1e-3)
    single = make_spec(name="single", space={**RAW["space"], "batch_size": 32})
    assert step_time(single, launch).document["fit"] is None


def test_the_host_bound_share_is_stored_and_shown_where_the_device_tells_one(tmp_path: Path) -> None:
    class OnCuda(ProbedExecutor):
        def measure_step_time(self, request: StepTimeRequest) -> StepTime:
            return replace(super().measure_step_time(request), host_bound_share=4 / request.configuration.batch_size)

    launch = Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: OnCuda())
    report = step_time(SPEC, launch)
    assert [row["host_bound_share"] for row in report.rows] == [4 / size for size in SIZES]
    assert [row["host-bound"] for row in report.table or ()] == ["50%", "25%", "12%", "6%", "3%"]
    assert report.columns[-2:] == ["host-bound", "remark"]
    elsewhere = Launch(db=f"sqlite:///{tmp_path / 'cpu.db'}", make_executor=lambda *_: ProbedExecutor())
    assert "host-bound" not in step_time(SPEC, elsewhere).columns


def test_a_run_that_follows_makes_the_visits_that_are_left(store: Store) -> None:
    probe_step_times(open_study(store, ProbedExecutor()))
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[])
    assert executor.limits == [calibration.SECONDS_LIMIT] * 5 * (calibration.FIRST_VISITS - 1)
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []
    assert calibration.SECONDS_LIMIT < SECONDS_LIMIT


def test_visits_go_round_over_the_batch_sizes(store: Store) -> None:
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, trials=[])
    assert [(one.visit, one.batch_size) for one in store.visits(SPEC.name)] == [
        (visit, size) for visit in range(1, calibration.FIRST_VISITS + 1) for size in SIZES
    ]
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, calibration.COMPARING_VISITS, trials=[])
    assert len(store.visits(SPEC.name)) == calibration.COMPARING_VISITS * len(SIZES)


def test_a_probe_is_one_more_visit_and_what_it_returns_is_what_is_stored(store: Store) -> None:
    first = probe_step_times(open_study(store, ProbedExecutor()))
    again = probe_step_times(open_study(store, ProbedExecutor(slower=4.0)))
    assert again == list(store.probes(SPEC.name).values())
    assert [probe.step_seconds for probe in again] == pytest.approx([2 * step_seconds(size) for size in SIZES])
    assert [probe.eval_every_steps for probe in again] == [probe.eval_every_steps for probe in first]
    assert [probe.error and probe.error.visits for probe in again] == [2] * 5


def test_what_contradicts_the_other_step_times_is_visited_again(store: Store) -> None:
    for visit in range(1, calibration.COMPARING_VISITS + 1):
        for size in SIZES:
            seconds = step_seconds(size) * (6.0 if size == 32 else 1.0)
            store.save_probe(SPEC.name, HERE, make_probe(size, step_seconds=seconds), visit)
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []
    assert missing_step_times(SPEC, store, HERE, calibration.COMPARING_VISITS, trials=[]) == [32, 64]
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, calibration.COMPARING_VISITS, trials=[])
    assert Counter(one.batch_size for one in store.visits(SPEC.name)) == {
        **dict.fromkeys(SIZES, calibration.COMPARING_VISITS),
        **dict.fromkeys([32, 64], calibration.MOST_VISITS),
    }, "and no more, though it is doubted still"


def test_what_does_not_fit_is_timed_in_smaller_micro_batches(store: Store) -> None:
    probes = probe_step_times(open_study(store, ProbedExecutor(fits_up_to=40)))
    assert [(probe.batch_size, probe.micro_batch_size) for probe in probes] == [
        (8, 8),
        (16, 16),
        (32, 32),
        (64, 32),
        (128, 32),
    ]
    assert store.memory_boundary(SPEC.name, HERE).too_large == 64


def test_visits_that_others_disturbed_are_made_and_not_made_again_for_ever(store: Store) -> None:
    for visit in range(1, calibration.COMPARING_VISITS + 1):
        for size in SIZES:
            store.save_probe(SPEC.name, HERE, make_probe(size, contended=visit > 1), visit)
    assert missing_step_times(SPEC, store, HERE, calibration.COMPARING_VISITS, trials=[]) == []
    assert [probe.error and probe.error.visits for probe in store.probes(SPEC.name).values()] == [3] * 5


def test_what_would_be_timed_in_smaller_micro_batches_than_those_in_force_is_left_alone(store: Store) -> None:
    store.save_memory(SPEC.name, HERE, MemoryUse(micro_batch_size=100, fits=False, peak_memory_bytes=None))
    store.save_memory(SPEC.name, HERE, MemoryUse(micro_batch_size=20, fits=True, peak_memory_bytes=None))
    for size in SIZES:
        store.save_probe(SPEC.name, HERE, make_probe(size, micro_batch_size=min(size, 64)), 1)
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[])
    assert len(executor.limits) <= len(SIZES) * calibration.MOST_VISITS
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []


def test_a_step_time_far_above_what_trials_ran_at_is_doubted() -> None:
    probes = {size: make_probe(size, step_seconds=0.001 * size, error=ERROR) for size in (32, 64)}

    def trial(batch_size: int, step_seconds: float, *, contended: bool = False, dropout: float = 0.1) -> TrialRecord:
        configuration = replace(SPEC.default_configuration, dropout=dropout, batch_size=batch_size)
        one = configuration.in_micro_batches(batch_size)
        trial = make_trial(1, configuration=one, seconds=100 * step_seconds, contended=contended)
        assert trial.outcome is not None
        return replace(trial, outcome=replace(trial.outcome, steps=100))

    assert doubtful(SPEC, probes, [trial(32, 0.031), trial(64, 0.064)]) == set()
    assert doubtful(SPEC, probes, [trial(32, 0.031), trial(64, 0.05)]) == {64}
    assert doubtful(SPEC, probes, [trial(64, 0.05, contended=True)]) == set()
    assert doubtful(SPEC, probes, [trial(64, 0.05, dropout=0.0)]) == set(), "a step without dropout takes less"


def test_where_nothing_fits_nothing_is_returned(store: Store) -> None:
    assert probe_step_times(open_study(store, ProbedExecutor(fits_up_to=0))) == []
