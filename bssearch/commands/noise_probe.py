"""The gradient noise scale of a study's best known configuration, measured near its target."""

from __future__ import annotations

from bssearch.analysis.optimum import fastest
from bssearch.commands.unstored import step_time_of_default
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Environment, NoiseMeasurement, NoiseRequest, Phase
from bssearch.search.seeds import trial_seed
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

NOISE_SECONDS = 30.0
"""Seconds after which the measurement ends by default, however wide its interval is then."""


def probe_noise(
    spec: StudySpec,
    executor: Executor,
    store: Store,
    environment: Environment,
    seconds_limit: float = NOISE_SECONDS,
) -> NoiseMeasurement:
    """Measure the noise scale near the target, store it with the study, which must be there, and return it.

    The noise scale depends on the learning rate (Gray et al. 2024), so it is that of the configuration of the fastest
    trial, and of the default where none has reached the target. Raises `LaunchError` where it does not fit into memory.
    """
    configuration, eval_every_steps = _best_known(spec, executor, store, environment)
    measurement = executor.measure_noise(
        NoiseRequest(
            configuration=configuration,
            seed=trial_seed(spec.seed, Phase.PROBE, 0),
            target=spec.record_target,
            train_seconds_limit=spec.budget.trial_train_seconds,
            noise_seconds_limit=seconds_limit,
            eval_every_steps=eval_every_steps,
            threads=spec.executor.threads,
        )
    )
    store.save_noise(spec.name, environment, measurement)
    return measurement


def _best_known(
    spec: StudySpec, executor: Executor, store: Store, environment: Environment
) -> tuple[Configuration, int]:
    """Return a configuration and how often it is evaluated, in steps."""
    trial = fastest(store.trials(spec.name))
    configuration = spec.default_configuration if trial is None else trial.configuration
    size = configuration.batch_size
    probe = store.probes(spec.name, environment).get(size)
    if trial is not None:
        micro = configuration.micro_batch_size if probe is None else probe.micro_batch_size
        return configuration.in_micro_batches(micro), trial.eval_every_steps
    if probe is None:
        probe = step_time_of_default(spec, executor, size, store.memory_boundary(spec.name, environment))
    assert probe.eval_every_steps is not None, "the default was timed"
    return spec.default_configuration.in_micro_batches(probe.micro_batch_size), probe.eval_every_steps
