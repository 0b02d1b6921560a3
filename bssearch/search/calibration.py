"""Before the search: the step time of every batch size, one after the other, alone on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from bssearch.errors import LaunchError
from bssearch.executors.base import Executor
from bssearch.records import Environment, ProbeRecord, StepTime, StepTimeRequest
from bssearch.search.cadence import probe_record
from bssearch.space import split_batch
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store


def missing_step_times(spec: StudySpec, store: Store) -> list[int]:
    """Return the batch sizes of a study that nobody has timed yet."""
    known = store.probes(spec.name)
    return [size for size in spec.batch_sizes if size not in known]


def measure_step_times(
    spec: StudySpec, store: Store, executor: Executor, environment: Environment, before_each: Callable[[], None]
) -> None:
    """Time what is missing and store it; ``before_each`` is called between measurements, and may raise to end them."""
    for size in missing_step_times(spec, store):
        before_each()
        store.save_probe(spec.name, environment, _probe(spec, executor, size, store.probes(spec.name)))


def refuse_where_nothing_fits(spec: StudySpec, store: Store, environment: Environment) -> None:
    """Raise `LaunchError` where no batch size of a study fits into memory."""
    if all(probe.out_of_memory for probe in store.probes(spec.name).values()):
        raise LaunchError(
            f"no batch size of the study fits into the memory of {environment.device_name}, "
            f"not even {min(spec.batch_sizes)}",
            hint="set space.max_micro_batch_size, or a smaller model",
        )


def default_at(spec: StudySpec, batch_size: int) -> StepTimeRequest:
    """Return the request to time the default configuration at another batch size."""
    micro, accumulation = split_batch(batch_size, spec.space.max_micro_batch_size)
    configuration = replace(
        spec.default_configuration,
        batch_size=batch_size,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
    )
    return StepTimeRequest(configuration=configuration, threads=spec.executor.threads)


def _probe(spec: StudySpec, executor: Executor, batch_size: int, known: Mapping[int, ProbeRecord]) -> ProbeRecord:
    request = default_at(spec, batch_size)
    full_limit = spec.budget.trial_train_seconds
    micro = request.configuration.micro_batch_size
    if any(probe.out_of_memory and probe.micro_batch_size <= micro for probe in known.values()):
        return probe_record(StepTime.where_memory_ran_out(request.configuration), full_limit)
    return probe_record(executor.measure_step_time(request), full_limit)
