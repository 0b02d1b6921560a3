import math
import resource
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bssearch.errors import LaunchError, WorkloadError
from bssearch.records import Configuration, GradientNoise, MemoryRequest, NoiseMeasurement, NoiseRequest, Target
from bssearch.records.noise_scale import FEWEST_PASSES
from bssearch.training import memory
from bssearch.training.memory import limit_memory, peak_resident_bytes
from bssearch.training.probes import (
    CPU_RESERVE_BYTES,
    PRECISION,
    RESERVE,
    STEPS,
    bytes_within_reserve,
    measure_memory,
    measure_noise,
)
from bssearch.training.trainer import WARM_UP_STEPS
from tests.training.toys import CPU, Toy, configuration, metric_by_evaluation, on_cpu, toy_data

REQUEST = MemoryRequest(configuration=Configuration(batch_size=20, micro_batch_size=20, learning_rate=0.1))


def test_three_whole_steps_and_an_evaluation_are_run() -> None:
    done: list[str] = []

    def evaluated(metrics):  # type: ignore[no-untyped-def]
        done.append("evaluation")
        return metrics

    use = measure_memory(REQUEST, Toy(on_loss=lambda: done.append("step"), on_evaluate=evaluated), toy_data(), on_cpu())
    assert (use.micro_batch_size, use.fits, use.reason) == (20, True, None)
    assert use.peak_memory_bytes is not None
    assert done.count("step") == WARM_UP_STEPS + STEPS
    assert done[-STEPS - 1 :] == ["step"] * STEPS + ["evaluation"]


@pytest.mark.parametrize("where", ["loss", "evaluate"])
def test_out_of_memory_is_an_answer_wherever_it_comes_and_has_its_reason(where: str) -> None:
    failing: Any = {f"on_{where}": Mock(side_effect=MemoryError("no room\nfor that"))}
    use = measure_memory(REQUEST, Toy(**failing), toy_data(), on_cpu())
    assert (use.fits, use.reason) == (False, "no room")


def test_other_errors_of_the_workload_are_raised() -> None:
    with pytest.raises(RuntimeError, match="a mistake"):
        measure_memory(REQUEST, Toy(on_loss=Mock(side_effect=RuntimeError("a mistake"))), toy_data(), on_cpu())


def test_an_allocator_that_thrashes_counts_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    of_kernels, of_training = 3, [4, 5]  # as kernels are chosen, and later on: 2 at the last step

    def retries(device: torch.device) -> int:
        trained = len(steps) - WARM_UP_STEPS
        return of_kernels if trained == 0 else of_training[trained == STEPS]

    monkeypatch.setattr("bssearch.training.probes.allocation_retries", retries)
    reset_at: list[int] = []
    monkeypatch.setattr("bssearch.training.probes.reset_peak_memory", lambda device: reset_at.append(len(steps)))
    use = measure_memory(REQUEST, Toy(on_loss=lambda: steps.append("step")), toy_data(), on_cpu())
    assert reset_at == [WARM_UP_STEPS], "the peak has no workspaces that were tried"
    assert not use.fits
    assert use.reason == "the allocator had to release memory and retry 2 times in 3 steps"


def test_a_reserve_is_kept_free_if_the_limit_of_the_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_within_reserve(CPU, None) is None
    assert bytes_within_reserve(CPU, 2**30) == 2**30 - CPU_RESERVE_BYTES
    assert bytes_within_reserve(CPU, 100 * 2**30) == pytest.approx((1 - RESERVE) * 100 * 2**30, abs=1)
    limits: list[int] = []
    monkeypatch.setattr("bssearch.training.probes.limit_memory", lambda device, limit: limits.append(limit))
    assert measure_memory(REQUEST, Toy(), toy_data(), on_cpu(), memory_bytes=990).fits
    assert limits == [990]


def test_the_peak_of_a_process_is_its_high_water_mark(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t   99 kB\nVmHWM:\t     12 kB\nVmRSS:\t 7 kB\n")
    assert peak_resident_bytes(status) == 12 * 1024
    assert peak_resident_bytes(tmp_path / "absent") is None


@pytest.mark.parametrize(("hard", "soft"), [(resource.RLIM_INFINITY, 5000), (4000, 4000)])
def test_on_the_cpu_the_limit_is_that_of_the_data_segment(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int
) -> None:
    set_to: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(memory, "_give_back_what_is_freed", lambda: None)  # this process lives on
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append((kind, limits)))
    monkeypatch.setattr(resource, "getrlimit", lambda kind, hard=hard: (hard, hard))
    limit_memory(CPU, 5000)
    assert set_to.pop() == (resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.gpu
def test_on_a_gpu_the_limit_is_that_of_the_allocator() -> None:
    device = torch.device("cuda")
    limit_memory(device, 2**30)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
    finally:
        limit_memory(device, 2**60)


# The noise scale ------------------------------------------------------------------------------------------------------


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


def test_it_measures_near_the_target_until_the_interval_is_narrow() -> None:
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
    assert found.reason == "the limit of 0.01 train seconds passed before the target was near"


def test_the_training_ends_with_the_schedules_horizon() -> None:
    wanted = configuration(64, parameters={"schedule": "cosine", "horizon_samples": 7 * 64})
    assert measure(Toy(on_evaluate=metric_by_evaluation([0.5])), configuration=wanted).step == 7


def test_a_measurement_without_time_is_empty() -> None:
    found = measure(Toy(on_evaluate=metric_by_evaluation([0.95])), noise_seconds_limit=0.0)
    assert (found.step, found.noise) == (0, GradientNoise())


def test_the_measurement_ends_at_its_limit_however_wide_the_interval_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr("bssearch.training.probes.time.perf_counter", lambda: float(next(seconds)))
    found = measure(Toy(on_evaluate=metric_by_evaluation([0.95])), noise_seconds_limit=FEWEST_PASSES + 3.0)
    assert found.noise.passes == FEWEST_PASSES + 2


@pytest.mark.parametrize(
    ("toy", "changes", "error", "said"),
    [
        (Toy(on_evaluate=metric_by_evaluation([0.5, math.nan])), {}, WorkloadError, "accuracy is not finite at step 5"),
        (
            Toy(),
            {"samples": 31, "configuration": configuration(2)},
            WorkloadError,
            "31 training samples or tokens are too few for 32",
        ),
        (
            Toy(on_loss=Mock(side_effect=torch.OutOfMemoryError("full"))),
            {},
            LaunchError,
            "64 in micro-batches of 64: full",
        ),
    ],
    ids=["a metric that is not finite", "too few samples", "out of memory"],
)
def test_a_failed_measurement_is_an_error(toy: Toy, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        measure(toy, **changes)
