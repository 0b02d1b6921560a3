"""The step times of a study at their best: every batch size timed alone and for longer than a run would."""

from __future__ import annotations

from collections.abc import Callable

from bssearch.executors.base import Executor
from bssearch.records import Environment, MemoryUse, ProbeRecord
from bssearch.search.calibration import measure_step_time_at
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

SECONDS_LIMIT = 5.0


def probe_step_times(
    spec: StudySpec,
    executor: Executor,
    store: Store,
    environment: Environment,
    seconds_limit: float = SECONDS_LIMIT,
    on_each: Callable[[ProbeRecord], None] = lambda probe: None,
) -> list[ProbeRecord]:
    """Time the default configuration at every batch size of a stored study; return what was measured, ascending.

    Each size is timed until its median is known within 2 %, or for ``seconds_limit`` seconds of steps; ``on_each`` is
    called after each. A size that does not fit at once is timed in the largest micro-batches that do; one for which
    there are none is left out. What runs out of memory is stored.

    The store keeps a measurement only where the same environment has none yet: the evaluation cadence of trials hangs
    on the first. A `run` that follows uses what is stored, and times only what is missing.
    Raises `LaunchError` where the worker dies, `WorkloadError` where the user's code fails.
    """

    def on_too_large(memory: MemoryUse) -> None:
        store.save_memory(spec.name, environment, memory)

    probes: list[ProbeRecord] = []
    for size in spec.batch_sizes:
        memory = store.memory_boundary(spec.name, environment)
        probe = measure_step_time_at(spec, executor, size, memory, on_too_large, seconds_limit)
        if probe is not None:
            store.save_probe(spec.name, environment, probe)
            probes.append(probe)
            on_each(probe)
    return probes
