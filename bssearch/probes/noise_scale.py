"""The gradient noise scale of a configuration near its target."""

from __future__ import annotations

from bssearch.records import NoiseMeasurement, NoiseRequest
from bssearch.training.computation import Computation
from bssearch.workloads.base import Data, Workload


def measure_noise(request: NoiseRequest, workload: Workload, data: Data, computation: Computation) -> NoiseMeasurement:
    """Train toward the target and measure the noise scale near it."""
    raise NotImplementedError
