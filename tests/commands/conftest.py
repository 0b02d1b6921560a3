"""What the tests of the probes share: a study in a store, and an executor that measures by the law and remembers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bssearch.commands.opening import OpenStudy
from bssearch.records import GradientNoise, NoiseMeasurement, NoiseRequest, StepTime, StepTimeRequest
from bssearch.search.driver import Listener
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment, make_spec
from tests.search.law import LawExecutor

SPEC = make_spec()
HERE = make_environment()


@dataclass
class ProbedExecutor(LawExecutor):
    """Keeps the limits and requests it was given."""

    limits: list[float] = field(default_factory=list)
    asked_noise: list[NoiseRequest] = field(default_factory=list)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        self.limits.append(request.seconds_limit)
        return super().measure_step_time(request)

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        self.asked_noise.append(request)
        return NoiseMeasurement(
            batch_size=request.configuration.batch_size,
            micro_batch_size=request.configuration.micro_batch_size,
            step=40,
            metric=0.88,
            noise=GradientNoise(low=90.0, passes=16),
        )


def open_study(store: Store, executor: LawExecutor, listener: Listener | None = None, **environment: Any) -> OpenStudy:
    """Return the study of the store, as a probe gets it."""
    return OpenStudy(SPEC, store, executor, make_environment(**environment), listener or Listener())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a study that nothing was measured for."""
    with open_store(f"sqlite:///{tmp_path / 'study.db'}") as store:
        store.studies.create(SPEC.new_study("tester"))
        yield store
