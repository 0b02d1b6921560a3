"""Memory, its limit and its end, in real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.opening import opened as opened_study
from bssearch.commands.probes import next_size, probe_memory
from bssearch.errors import LaunchError
from bssearch.executors.base import Executor, ExecutorSettings
from bssearch.executors.slots import LocalExecutor
from bssearch.records import MemoryRequest, TrialEnded, TrialObserved, TrialOutcome, TrialRequest, TrialState, TrialStop
from tests.executors.line_workload import request_endless_trial, worker_pids
from tests.factories import changed, make_spec, not_none

MIB = 2**20
LIMIT = 2**31
PER_SAMPLE = 280 * MIB
SAMPLES = 8

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

KEEPS_SMALL_BLOCKS = """
        self.kept = []
        for _ in range(3):  # freed as a mapping, a block of 20 MiB has glibc take the next ones from the heap
            torch.empty(20 * 2**20, dtype=torch.uint8)
        large = []
        for _ in range(64):
            large.append(torch.empty(20 * 2**20, dtype=torch.uint8))
            self.kept.append(torch.empty(2000, dtype=torch.uint8))
        del large
        held ="""


@contextmanager
def hungry(folder: Path, limit_bytes: int | None = LIMIT, *, code: str = WORKLOAD) -> Iterator[LocalExecutor]:
    """Yield an executor of a workload that takes 280 MiB a sample, out of 2 GiB."""
    (folder / "hungry.py").write_text(code)
    settings = ExecutorSettings(
        workload="hungry.py:Hungry", folder=folder, device="cpu", memory_limit_bytes=limit_bytes
    )
    with closing(LocalExecutor(settings)) as made:
        yield made


def request(size: int) -> MemoryRequest:
    configuration = request_endless_trial(1).plan.configuration
    return MemoryRequest(configuration=replace(configuration, batch_size=size, micro_batch_size=size))


@pytest.mark.slow
def test_a_death_under_a_limit_is_out_of_memory_where_something_says_so(tmp_path: Path) -> None:
    last_words = "terminate called after throwing an instance of std::bad_alloc"
    code = WORKLOAD.replace("held =", f"import os; os.write(2, b'{last_words}'); os.abort()\n        held =")
    with hungry(tmp_path, code=code) as executor:
        assert train(executor, 8).state is TrialState.OOM
        use = executor.measure_memory(request(8))
        assert not use.fits and use.reason is not None and "bad_alloc" in use.reason


@pytest.mark.slow
def test_a_death_under_a_limit_is_an_error_where_nothing_says_so(tmp_path: Path) -> None:
    code = WORKLOAD.replace("held =", "import os; os.abort()\n        held =")
    with hungry(tmp_path, code=code) as executor, pytest.raises(LaunchError, match="SIGABRT"):
        executor.measure_memory(request(8))


@pytest.mark.slow
def test_a_worker_under_a_limit_keeps_nothing_of_the_trials_before(tmp_path: Path) -> None:
    """Blocks of 20 MiB, between which small ones stay, would else leave a heap full of holes."""
    code = WORKLOAD.replace("held =", KEEPS_SMALL_BLOCKS)
    with hungry(tmp_path, code=code) as executor:
        train(executor, 1, steps=3)
        [pid] = worker_pids(executor)
        data_kib = int(Path(f"/proc/{pid}/status").read_text().split("VmData:")[1].split()[0])
        assert 1024 * data_kib < LIMIT / 2, "what counts towards the limit of a process"


@pytest.mark.slow
def test_the_probes_answer_never_runs_out_in_200_steps_and_one_size_above_its_bracket_does(tmp_path: Path) -> None:
    spec = make_spec(
        workload="hungry.py:Hungry",
        target={"metric": "score", "value": 0.9, "goal": "maximize"},
        space={"batch_size": {"low": 6, "high": 8}, "learning_rate": 0.05},
        default={"batch_size": 6, "learning_rate": 0.05},
        executor={"device": "cpu", "memory_limit_gib": LIMIT / 2**30},
    )
    (tmp_path / "hungry.py").write_text(WORKLOAD)
    with opened_study(spec, Launch(db=f"sqlite:///{tmp_path / 'study.db'}", folder=tmp_path)) as study:
        found = probe_memory(study)
        assert isinstance(study.executor, LocalExecutor)
        assert worker_pids(study.executor) == [], "each size is run in a process of its own"
        assert next_size(found.uses, smallest=6, ceiling=SAMPLES) is None
        for other in (3, 5, 4):
            train(study.executor, other, steps=3)
        fits = train(study.executor, found.largest_that_fits)
        runs_out = train(study.executor, not_none(found.smallest_that_does_not) + 1)
    uses = {use.micro_batch_size: use for use in found.uses}
    assert (uses[6].fits, uses[6].reason) == (True, None)
    assert uses[6].peak_memory_bytes is not None and 100 * MIB < uses[6].peak_memory_bytes < LIMIT
    assert not uses[SAMPLES].fits and "can't allocate memory" in (uses[SAMPLES].reason or "")
    assert (fits.state, fits.steps) == (TrialState.CANCELLED, 200)
    assert runs_out.state is TrialState.OOM


def train(executor: Executor, size: int, steps: int = 200) -> TrialOutcome:
    """Train at a micro-batch size until an evaluation finds so many steps done, or to its end."""
    trial: TrialRequest = changed(
        request_endless_trial(size, seconds=600.0), configuration=request(size).configuration, eval_every_steps=steps
    )
    executor.submit(trial)
    while True:
        for event in executor.events(1.0):
            if isinstance(event, TrialObserved) and event.observation.step == steps:
                executor.stop(TrialStop(size, TrialState.CANCELLED, "enough"))
            if isinstance(event, TrialEnded):
                return replace(event.outcome, steps=min(event.outcome.steps, steps))
