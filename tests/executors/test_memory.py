"""Memory, its limit and its end, in real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.executors.base import Ended, Executor, Observed
from bssearch.executors.local import LocalExecutor
from bssearch.records import MemoryRequest, TrialOutcome, TrialRequest, TrialState
from bssearch.search.memory_probe import next_size, probe_memory
from bssearch.search.study import opened as opened_study
from tests.executors.line_workload import opened, outcomes, request_endless_trial, wait_for, worker_pids
from tests.factories import make_spec

MIB = 2**20
LIMIT = 2**31
PER_SAMPLE = 32 * MIB
SAMPLES = 96

WORKLOAD = f"""
import torch

from bssearch.records import MetricInfo
from bssearch.workloads.base import Data, Part


class Hungry:
    metrics = {{"score": MetricInfo(low=0.0, high=1.0, chance=0.0)}}

    def load(self, device):
        part = Part(torch.ones({SAMPLES}, 1), torch.ones({SAMPLES}, 1))
        return Data(part, part, part)

    def build_model(self, *, dropout):
        return torch.nn.Linear(1, 1)

    def loss(self, model, inputs, targets, *, label_smoothing):
        held = torch.empty(len(inputs) * {PER_SAMPLE}, dtype=torch.uint8)
        return torch.nn.functional.mse_loss(model(inputs), targets) + 0 * held[0]

    def evaluate(self, model, part):
        return {{"score": 0.5}}
"""


@contextmanager
def hungry(folder: Path, limit_bytes: int | None = LIMIT) -> Iterator[LocalExecutor]:
    """Yield an executor of a workload that takes 32 MiB a sample, out of 2 GiB."""
    (folder / "hungry.py").write_text(WORKLOAD)
    with closing(LocalExecutor("hungry.py:Hungry", {}, folder, device="cpu", memory_limit_bytes=limit_bytes)) as made:
        yield made


def request(size: int) -> MemoryRequest:
    configuration = request_endless_trial(1).configuration
    return MemoryRequest(configuration=replace(configuration, batch_size=size, micro_batch_size=size))


def test_a_size_is_run_in_a_process_of_its_own_under_the_limit(tmp_path: Path) -> None:
    with hungry(tmp_path) as executor:
        fits = executor.measure_memory(request(8))
        assert worker_pids(executor) == []
        too_large = executor.measure_memory(request(96))
    assert (fits.micro_batch_size, fits.fits, fits.reason) == (8, True, None)
    assert fits.peak_memory_bytes is not None and 100 * MIB < fits.peak_memory_bytes < LIMIT
    assert not too_large.fits
    assert too_large.reason is not None and "can't allocate memory" in too_large.reason


def test_no_trial_that_runs_is_ended_for_a_measurement(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.submit(request_endless_trial(1, seconds=0.5))
        with pytest.raises(ValueError, match="while a trial runs"):
            executor.measure_memory(request(8))
        events = wait_for(executor, lambda events: 1 in outcomes(events))
    assert outcomes(events)[1].state is TrialState.EXHAUSTED


@pytest.mark.slow
def test_the_probes_answer_never_runs_out_in_200_steps_and_one_size_above_its_bracket_does(tmp_path: Path) -> None:
    spec = make_spec(
        workload="hungry.py:Hungry",
        target={"metric": "score", "value": 0.9, "goal": "maximize"},
        space={"batch_size": {"low": 8, "high": 64}, "learning_rate": 0.05},
        default={"batch_size": 8, "learning_rate": 0.05},
        executor={"device": "cpu", "memory_limit_gib": LIMIT / 2**30},
    )
    (tmp_path / "hungry.py").write_text(WORKLOAD)
    with opened_study(spec, db=f"sqlite:///{tmp_path / 'study.db'}", folder=tmp_path) as study:
        found = probe_memory(spec, study.executor, study.store, study.environment)
        assert next_size(found.uses, smallest=8, ceiling=SAMPLES) is None
        assert found.smallest_that_does_not is not None
        fits = train(study.executor, found.largest_that_fits)
        runs_out = train(study.executor, found.smallest_that_does_not + 1)
    assert (fits.state, fits.steps) == (TrialState.CANCELLED, 200)
    assert runs_out.state is TrialState.OOM


def train(executor: Executor, size: int) -> TrialOutcome:
    """Train at a micro-batch size until an evaluation finds 200 steps done, or to its end."""
    trial: TrialRequest = replace(
        request_endless_trial(size, seconds=600.0), configuration=request(size).configuration, eval_every_steps=200
    )
    executor.submit(trial)
    while True:
        for event in executor.events(1.0):
            if isinstance(event, Observed) and event.observation.step == 200:
                executor.stop(size, TrialState.CANCELLED, "enough")
            if isinstance(event, Ended):
                return replace(event.outcome, steps=min(event.outcome.steps, 200))
