"""Before the search: the step time of every batch size, one after the other, alone on the device.

A batch size that does not fit at once is timed in the largest micro-batches that do; those are what its trials run in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bssearch.errors import LaunchError
from bssearch.executors.base import Executor
from bssearch.probes.cadence import probe_record
from bssearch.records import Environment, MemoryUse, ProbeRecord, StepTimeRequest, TrialState
from bssearch.space import MemoryBoundary, choose_micro_batch
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

SECONDS_LIMIT = 0.5
"""Seconds after which the steps at a batch size end, even where their median is not known well: a choice."""


def missing_step_times(spec: StudySpec, store: Store, environment: Environment) -> list[int]:
    """Return the batch sizes of a study that nobody has timed yet in the largest micro-batches that may fit.

    And those that were timed while something else used the device: they are timed again whenever a driver begins.
    """
    known = store.probes(spec.name, environment)
    memory = store.memory_boundary(spec.name, environment)

    def is_missing(size: int) -> bool:
        micro = choose_micro_batch(size, spec.space.max_micro_batch_size, memory)
        if size not in known or known[size].contended:
            return True
        return micro is not None and micro > known[size].micro_batch_size

    return [size for size in spec.batch_sizes if is_missing(size)]


def measure_step_times(
    spec: StudySpec, store: Store, executor: Executor, environment: Environment, before_each: Callable[[], None]
) -> None:
    """Time what is missing and store it, and with it each micro-batch size that ran out of memory.

    A batch size that has had trials keeps their cadence. ``before_each`` is called between measurements, and may raise
    to end them. Raises `LaunchError` where nothing fits.
    """
    cadences = {
        trial.configuration.batch_size: trial.eval_every_steps
        for trial in store.trials(spec.name)
        if trial.state is not TrialState.QUEUED
    }

    def on_too_large(memory: MemoryUse) -> None:
        store.save_memory(spec.name, environment, memory)

    for size in missing_step_times(spec, store, environment):
        before_each()
        memory = store.memory_boundary(spec.name, environment)
        probe = measure_step_time_at(spec, executor, size, memory, on_too_large)
        if probe is None:
            break
        probe = replace(probe, eval_every_steps=cadences.get(size, probe.eval_every_steps))
        store.save_probe(spec.name, environment, probe)
    refuse_where_nothing_fits(spec, store, environment)


def measure_step_time_at(
    spec: StudySpec,
    executor: Executor,
    batch_size: int,
    memory: MemoryBoundary,
    on_too_large: Callable[[MemoryUse], None] = lambda memory: None,
    seconds_limit: float = SECONDS_LIMIT,
) -> ProbeRecord | None:
    """Time the default configuration at a batch size, in the largest micro-batches that fit; None where nothing does.

    ``memory`` is what is known before; ``on_too_large`` gets each micro-batch size that runs out of memory now.
    """
    while (micro := choose_micro_batch(batch_size, spec.space.max_micro_batch_size, memory)) is not None:
        measured = executor.measure_step_time(default_at(spec, batch_size, micro, seconds_limit))
        if not measured.out_of_memory:
            return probe_record(measured, spec.budget.trial_train_seconds)
        reason = measured.reason or f"ran out of memory when steps of batch size {batch_size} were timed"
        on_too_large(MemoryUse(micro_batch_size=micro, fits=False, peak_memory_bytes=None, reason=reason))
        memory = memory.without(micro)
    return None


def default_at(
    spec: StudySpec, batch_size: int, micro_batch_size: int, seconds_limit: float = SECONDS_LIMIT
) -> StepTimeRequest:
    """Return the request to time the default configuration at another batch size, in micro-batches that divide it.

    The regularisation that the space can switch on is on: trials have it more often than not.
    """
    default = spec.space.with_all_regularisation(spec.default_configuration)
    configuration = replace(default, batch_size=batch_size).in_micro_batches(micro_batch_size)
    return StepTimeRequest(
        configuration=configuration,
        threads=spec.executor.threads,
        trial_train_seconds=spec.budget.trial_train_seconds,
        seconds_limit=seconds_limit,
    )


def refuse_where_nothing_fits(spec: StudySpec, store: Store, environment: Environment) -> None:
    """Raise `LaunchError` where no batch size of a study fits into memory, in whatever micro-batches."""
    if store.memory_boundary(spec.name, environment).nothing_fits:
        raise nothing_fits(environment, store.memory(spec.name, environment))


def refuse_cap_beyond_memory(spec: StudySpec, store: Store, environment: Environment) -> None:
    """Raise `LaunchError` where a study that is yet to begin asks for micro-batches known not to fit.

    One that has begun goes on in smaller ones.
    """
    cap = spec.space.max_micro_batch_size
    memory = store.memory_boundary(spec.name, environment)
    if cap is None or memory.may_fit(cap) or memory.fits is None:
        return
    if store.probes(spec.name, environment) or store.trials(spec.name):
        return
    uses = {use.micro_batch_size: use for use in store.memory(spec.name, environment)}
    failed, works = (_described(uses, size) for size in (memory.too_large, memory.fits))
    raise LaunchError(
        f"space.max_micro_batch_size = {cap} does not fit into the memory of {named(environment)}: {failed} ran out "
        f"of memory; the nearest that works is {works}",
        hint=f"set it to {memory.fits}, or leave it out: larger batch sizes accumulate micro-batches that fit",
    )


def nothing_fits(environment: Environment, uses: Sequence[MemoryUse]) -> LaunchError:
    """Return the error for a device on which not even one sample fits, with what was run there."""
    tried = ", ".join(str(use.micro_batch_size) for use in uses if not use.fits)
    reason = next((use.reason for use in uses if use.micro_batch_size == 1 and use.reason), None)
    return LaunchError(
        f"not even a micro-batch of one sample fits into the memory of {named(environment)}"
        + (f"; these ran out of it: {tried}" if tried else "")
        + (f" ({reason})" if reason else ""),
        hint="a smaller model or evaluation, or a device with more memory (see executor.memory_limit_gib)",
    )


def named(environment: Environment) -> str:
    """Return a device's name with its memory, or the limit set on it."""
    memory = environment.device_memory_bytes
    return environment.device_name + ("" if memory is None else f" ({gib(memory)})")


def gib(count: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{count / 2**30:.3g} GiB"


def _described(uses: dict[int, MemoryUse], size: int | None) -> str:
    peak = uses[size].peak_memory_bytes if size in uses else None
    return str(size) + ("" if peak is None else f" (peak {gib(peak)})")
