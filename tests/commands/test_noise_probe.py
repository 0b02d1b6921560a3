"""Which configuration a study's noise scale is measured at, and that it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bssearch.commands.probe.noise import probe_noise
from bssearch.errors import LaunchError
from bssearch.records import (
    Configuration,
    Lease,
    TrialOutcome,
    TrialState,
)
from bssearch.storage.repository import Store
from tests.commands.probing import HERE, SPEC, ProbedExecutor, open_study
from tests.factories import make_plan, make_probe


def add_trial(store: Store, configuration: Configuration, seconds: float | None) -> None:
    """Add a trial that reached the target after these seconds, or was capped."""
    plan = make_plan(configuration=configuration, eval_every_steps=17)
    trial = store.start(SPEC.name, plan, environment=HERE, lease=Lease(owner="driver", seconds=60.0))
    assert trial is not None
    outcome = TrialOutcome(state=TrialState.CAPPED, reason="as the test has it", train_seconds=0.1, wall_seconds=0.1)
    if seconds is not None:
        outcome = replace(
            outcome, state=TrialState.REACHED, train_seconds=seconds, time_to_target_s=seconds, steps_to_target=10
        )
    store.finish_trial(SPEC.name, trial.number, outcome, steps_x_step_time_s=None)


def test_the_default_is_measured_where_no_trial_has_reached_the_target(store: Store) -> None:
    add_trial(store, replace(SPEC.default_configuration, learning_rate=0.3), None)
    executor = ProbedExecutor()
    found = probe_noise(open_study(store, executor))
    (request,) = executor.asked_noise
    assert request.configuration == SPEC.default_configuration
    assert executor.splits_timed and request.eval_every_steps >= 1
    assert (request.target, request.train_seconds_limit) == (SPEC.record_target, SPEC.budget.trial_train_seconds)
    assert store.noise(SPEC.name) == [found]


def test_a_step_time_that_is_stored_is_not_measured_again(store: Store) -> None:
    store.save_probe(SPEC.name, HERE, make_probe(SPEC.default.batch_size, eval_every_steps=9))
    executor = ProbedExecutor()
    probe_noise(open_study(store, executor))
    assert executor.splits_timed == []
    assert executor.asked_noise[0].eval_every_steps == 9


def test_the_configuration_of_the_fastest_trial_is_measured_as_it_ran(store: Store) -> None:
    slow, fast = (replace(SPEC.default_configuration, learning_rate=rate) for rate in (0.2, 0.3))
    add_trial(store, slow, 3.0)
    add_trial(store, fast, 2.0)
    add_trial(store, slow, None)
    executor = ProbedExecutor()
    probe_noise(open_study(store, executor))
    assert executor.asked_noise[0].configuration == fast
    assert executor.asked_noise[0].eval_every_steps == 17
    assert executor.splits_timed == []


def test_a_second_measurement_takes_the_place_of_the_first(store: Store) -> None:
    for _ in range(2):
        probe_noise(open_study(store, ProbedExecutor()))
    assert len(store.noise(SPEC.name)) == 1


def test_a_default_that_does_not_fit_is_an_error(store: Store) -> None:
    with pytest.raises(LaunchError, match="does not fit into memory"):
        probe_noise(open_study(store, ProbedExecutor(fits_up_to=0)))
