"""The gradient noise scale near the target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from bssearch.analysis.numbers import noise_scale
from bssearch.analysis.optimum import fastest
from bssearch.commands.launch import Launch
from bssearch.commands.opening import OpenStudy, opened
from bssearch.commands.probe.report import ProbeReport
from bssearch.commands.unstored import step_time_of_default
from bssearch.records import Configuration, NoiseMeasurement, NoiseRequest, Phase
from bssearch.registry import Option
from bssearch.search.history import trial_seed
from bssearch.spec import StudySpec

NOISE_SECONDS = 30.0  # default limit of the measurement, however wide its interval


def noise(
    spec: StudySpec,
    launch: Launch,
    *,
    seconds: Annotated[float, Option("The longest to measure, once near the target.", min=0.1)] = NOISE_SECONDS,
) -> ProbeReport:
    """Measure the gradient noise scale of the best configuration near the target."""
    with opened(spec, launch) as study:
        found = probe_noise(study, seconds)
    row = {"study": spec.name, **asdict(found)}
    row |= {f"noise_{name}": value for name, value in row.pop("noise").items()}
    return ProbeReport(document=row, rows=[row], sentences=list(sentences(found, spec.target.metric)))


def sentences(found: NoiseMeasurement, metric: str) -> Iterator[str]:
    """Yield the noise scale, its position, and nearness to the target."""
    noise = found.noise
    if noise.low is None:
        yield f"The gradient could not be told from its noise in {noise.passes or 'so few'} passes."
    else:
        scale = noise_scale(noise.scale, noise.low, noise.high)
        yield f"Gradient noise scale: {scale} samples ({noise.passes} passes)"
    if noise.adam_low is not None:
        yield f"as Adam sees it: {noise_scale(noise.adam_scale, noise.adam_low, noise.adam_high)} samples"
    yield f"at batch {found.batch_size}, step {found.step}, where {metric} is {found.metric:.4g}"
    if found.reason is not None:
        yield f"note: that is not near the target: {found.reason}"


def probe_noise(
    study: OpenStudy, seconds_limit: float = NOISE_SECONDS, *, train_seconds_limit: float = math.inf
) -> NoiseMeasurement:
    """Measure and store the noise scale near the target, of the best known configuration.

    It depends on the learning rate (Gray et al. 2024). Raises `LaunchError` if it does not fit.
    """
    spec = study.spec
    configuration, eval_every_steps = _best_known(study)
    measurement = study.executor.measure_noise(
        NoiseRequest(
            configuration=configuration,
            seed=trial_seed(spec.seed, Phase.PROBE, 0),
            target=spec.record_target,
            train_seconds_limit=min(train_seconds_limit, spec.budget.trial_train_seconds),
            noise_seconds_limit=seconds_limit,
            eval_every_steps=eval_every_steps,
            threads=spec.executor.threads,
        )
    )
    study.store.save_noise(spec.name, study.environment, measurement)
    return measurement


def _best_known(study: OpenStudy) -> tuple[Configuration, int]:
    spec, store, environment = study.spec, study.store, study.environment
    trial = fastest(store.trials(spec.name))
    configuration = spec.default_configuration if trial is None else trial.configuration
    size = configuration.batch_size
    probe = store.probes(spec.name, environment).get(size)
    if trial is not None:
        micro = configuration.micro_batch_size if probe is None else probe.micro_batch_size
        return configuration.in_micro_batches(micro), trial.eval_every_steps
    if probe is None:
        probe = step_time_of_default(spec, study.executor, size, store.memory_boundary(spec.name, environment))
    assert probe.eval_every_steps is not None, "the default was timed"
    return spec.default_configuration.in_micro_batches(probe.micro_batch_size), probe.eval_every_steps
