from typing import Any

import pytest
import torch

from bssearch.errors import LaunchError, WorkloadError
from bssearch.records import GradientNoise, NoiseMeasurement, NoiseRequest, Target
from bssearch.records.noise_scale import FEWEST_PASSES
from bssearch.training.probes import PRECISION, measure_noise
from tests.training.toys import Toy, configuration, metric_by_evaluation, on_cpu, toy_data


def request(**changes: Any) -> NoiseRequest:
    values: dict[str, Any] = {
        "configuration": configuration(64),
        "seed": 3,
        "target": Target(metric="accuracy", value=0.9),
        "train_seconds_limit": 20.0,
        "noise_seconds_limit": 60.0,
        "eval_every_steps": 5,
        **changes,
    }
    return NoiseRequest(**values)


def measure(toy: Toy, samples: int = 600, **changes: Any) -> NoiseMeasurement:
    return measure_noise(request(**changes), toy, toy_data(samples), on_cpu())


def test_it_measures_where_the_metric_comes_near_the_target_until_the_interval_is_narrow() -> None:
    found = measure(Toy(on_evaluate=metric_by_evaluation([0.5, 0.7, 0.85, 0.88])))
    assert (found.step, found.metric) == (15, 0.88)
    assert (found.batch_size, found.micro_batch_size) == (64, 64)
    noise = found.noise
    assert noise.scale and noise.low and noise.high and noise.passes
    assert (noise.high - noise.low) / 2 <= PRECISION * noise.scale
    assert noise.adam_scale is None
    assert found.reason is None


def test_the_same_seed_trains_to_the_same_weights_and_draws_the_same_passes() -> None:
    one, other = (measure(Toy(), target=Target(metric="accuracy", value=0.8)) for _ in range(2))
    assert one == other
    assert one.step > 0


def test_the_training_ends_at_its_limit_wherever_it_is() -> None:
    found = measure(Toy(on_evaluate=metric_by_evaluation([0.5])), train_seconds_limit=0.01, eval_every_steps=10**9)
    assert 0 < found.step < 10_000
    assert found.metric == 0.5
    assert found.noise.passes
    assert found.reason == "the limit of 0.01 train seconds passed before"


def test_the_training_ends_with_the_schedules_horizon() -> None:
    wanted = configuration(64, parameters={"schedule": "cosine", "horizon_samples": 7 * 64})
    assert measure(Toy(on_evaluate=metric_by_evaluation([0.5])), configuration=wanted).step == 7


def test_a_measurement_without_time_says_nothing() -> None:
    found = measure(Toy(on_evaluate=metric_by_evaluation([0.95])), noise_seconds_limit=0.0)
    assert (found.step, found.noise) == (0, GradientNoise())


def test_the_measurement_ends_at_its_limit_however_wide_the_interval_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr("bssearch.training.probes.time.perf_counter", lambda: float(next(seconds)))
    found = measure(Toy(on_evaluate=metric_by_evaluation([0.95])), noise_seconds_limit=FEWEST_PASSES + 3.0)
    assert found.noise.passes == FEWEST_PASSES + 2


def test_a_metric_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="accuracy is not finite at step 5"):
        measure(Toy(on_evaluate=metric_by_evaluation([0.5, float("nan")])))


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(WorkloadError, match="has 31 samples; there must be >= 32"):
        measure(Toy(), samples=31, configuration=configuration(2))


def test_running_out_of_memory_is_a_launch_error_with_the_micro_batch() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(LaunchError, match="batch size 64 in micro-batches of 64: CUDA out of memory"):
        measure(Toy(on_loss=fail))
