"""The probe of every batch size's step time, against an executor that answers by a law."""

from __future__ import annotations

from pathlib import Path

import pytest

from bssearch.commands.opening import Launch
from bssearch.commands.probe.step_time import SECONDS_LIMIT, probe_step_times, step_time
from bssearch.search import calibration
from bssearch.search.calibration import measure_step_times, missing_step_times
from bssearch.search.listener import Listener
from bssearch.storage.repository import Store
from tests.commands.probing import HERE, SPEC, ProbedExecutor, open_study
from tests.factories import SPEC as RAW
from tests.factories import make_environment, make_probe, make_spec
from tests.search.law import step_seconds

SIZES = [8, 16, 32, 64, 128]


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


def test_a_run_that_follows_has_nothing_left_to_time(store: Store) -> None:
    probe_step_times(open_study(store, ProbedExecutor()))
    assert missing_step_times(SPEC, store, HERE) == []


def test_a_run_times_what_is_missing_and_not_for_long(store: Store) -> None:
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None)
    assert executor.limits == [calibration.SECONDS_LIMIT] * 5
    assert calibration.SECONDS_LIMIT < SECONDS_LIMIT


def test_what_was_measured_now_is_returned_and_what_was_first_is_kept(store: Store) -> None:
    probe_step_times(open_study(store, ProbedExecutor()))
    again = probe_step_times(open_study(store, ProbedExecutor(slower=2.0)))
    assert [probe.step_seconds for probe in again] == [2 * step_seconds(size) for size in SIZES]
    assert [probe.step_seconds for probe in store.probes(SPEC.name).values()] == [step_seconds(size) for size in SIZES]


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


def test_what_was_timed_on_a_shared_device_is_timed_again(store: Store) -> None:
    elsewhere = make_environment(host="busy")
    for size in SIZES:
        store.save_probe(SPEC.name, elsewhere, make_probe(size, contended=size == 32, eval_every_steps=3))
    assert missing_step_times(SPEC, store, HERE) == [32]
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None)
    assert len(executor.limits) == 1
    assert missing_step_times(SPEC, store, HERE) == []
    again = store.probes(SPEC.name)[32]
    assert (again.step_seconds, again.eval_every_steps) == (step_seconds(32), 3)
    assert len(store.step_times(SPEC.name)) == 6


def test_where_nothing_fits_nothing_is_returned(store: Store) -> None:
    assert probe_step_times(open_study(store, ProbedExecutor(fits_up_to=0))) == []
