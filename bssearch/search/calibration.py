"""Time the isolated steps of all batch sizes, each in the largest micro-batch that fits.

A visit is a round over batch sizes, with `SECONDS_LIMIT` train seconds for each batch size.
"""

import functools
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bssearch.analysis.objectives import kind_of
from bssearch.errors import BSSearchError, LaunchError, WorkloadError, with_hint
from bssearch.executors.base import Executor, TimesSideBySide
from bssearch.records import (
    FLAT_RATIO,
    Environment,
    MemoryRequest,
    MemoryUse,
    ProbeRecord,
    StepTime,
    StepTimeRequest,
    TrialRecord,
    TrialState,
    grouped,
)
from bssearch.records.step_times import split
from bssearch.records.text import gib
from bssearch.spec import MemoryBoundary, StudySpec, choose_micro_batch, problem_with
from bssearch.storage.repository import Store
from bssearch.training.course import probe_record

SECONDS_LIMIT = 0.25  # train seconds per visit and batch size

FIRST_VISITS = 1  # visits before the search, for step times within 10 %

COMPARING_VISITS = 3  # visits of compared batch sizes before confirmation

MOST_VISITS = 6

STANDARD_ERRORS = 2  # step times may be equal if the difference is smaller

TOLERANCE = 1.1  # largest plausible ratio of a timed step to an uncontended trial's step


def missing_step_times(
    spec: StudySpec,
    store: Store,
    environment: Environment,
    visits: int = FIRST_VISITS,
    *,
    trials: Iterable[TrialRecord],
    compared: Collection[int] | None = None,
) -> list[int]:
    """The batch sizes with fewer than ``visits`` visits in the largest micro-batch that may fit.

    Only ``compared`` sizes (default: all) need more than `FIRST_VISITS` visits. If ``visits`` exceeds this number,
    `doubtful` compared sizes need `MOST_VISITS`. Batch sizes at which the user's code failed need no visit.
    """
    known = store.probes.by_batch_size(spec.name, environment)
    memory = store.probes.memory_boundary(spec.name, environment)
    doubted = doubtful(spec, known, trials) if visits > FIRST_VISITS else set()

    def is_missing(size: int) -> bool:
        micro = _micro_batch_at(spec, size, memory)
        if size in known and known[size].step_seconds is None:
            return False  # the user's code fails at this batch size
        if size not in known or (micro is not None and micro > known[size].micro_batch_size):
            return True
        if micro is None or micro < known[size].micro_batch_size:
            return False  # a new visit would time other micro-batches
        error = known[size].error
        had = 1 if error is None else error.visits
        if compared is not None and size not in compared:
            return had < FIRST_VISITS
        return had < visits or (size in doubted and had < MOST_VISITS)

    return [size for size in spec.batch_sizes if is_missing(size)]


def doubtful(spec: StudySpec, probes: Mapping[int, ProbeRecord], trials: Iterable[TrialRecord]) -> set[int]:
    """The batch sizes without accumulation that have an implausible step time.

    Two adjacent sizes are doubtful if the smaller size's step takes longer by more than `STANDARD_ERRORS` standard
    errors. A size is also doubtful if uncontended trials of the same kind (`kind_of`) were more than `TOLERANCE` times
    as fast.
    """
    whole = [probe for _, probe in sorted(probes.items()) if probe.is_whole]
    timed = [probe for probe in whole if probe.step_seconds is not None and probe.error is not None]
    found: set[int] = set()
    for smaller, larger in itertools.pairwise(timed):
        assert smaller.step_seconds and larger.step_seconds and smaller.error and larger.error
        error = math.hypot(smaller.error.own, larger.error.own)
        if math.log(smaller.step_seconds / larger.step_seconds) > STANDARD_ERRORS * error:
            found |= {smaller.batch_size, larger.batch_size}
    ended = [(kind_of(trial.configuration), trial.outcome) for trial in trials if trial.outcome is not None]
    alone = [(kind, one.train_seconds / one.steps) for kind, one in ended if one.steps and not one.contended]
    paces = {kind: statistics.median(seconds) for kind, seconds in grouped(alone).items()}
    for probe in timed:
        ran_at = paces.get(kind_of(default_at(spec, probe.batch_size, probe.micro_batch_size).configuration))
        if ran_at is not None and probe.step_seconds is not None and probe.step_seconds > TOLERANCE * ran_at:
            found.add(probe.batch_size)
    return found


def measure_step_times(
    spec: StudySpec,
    store: Store,
    executor: Executor,
    environment: Environment,
    check: Callable[[], None],
    visits: int = FIRST_VISITS,
    *,
    trials: Collection[TrialRecord],
    compared: Collection[int] | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> None:
    """Measure and store the `missing_step_times`, after a second test of micro-batches that ran out of memory once.

    Later visits of several sizes use all GPUs of a node if the GPUs are equally fast. Trials skip a batch size at which
    the user's code fails. ``check`` runs before each measurement and write, and may raise.

    Raises:
        LaunchError: If no batch size fits into memory.
        WorkloadError: If the user's code fails at the default batch size or at a batch size with a step time.
    """
    cadences = {
        trial.configuration.batch_size: trial.eval_every_steps
        for trial in trials
        if trial.state is not TrialState.QUEUED
    }
    timer = _Timer(spec, store, executor, environment, check, tell, cadences)
    _confirm_out_of_memory(spec, store, executor, environment, check, trials=trials, tell=tell)
    default = spec.default_configuration.batch_size

    @functools.cache
    def devices_that_agree() -> TimesSideBySide | None:
        alone = store.probes.by_batch_size(spec.name, environment)[default]
        request = default_at(spec, default, alone.micro_batch_size)
        return _devices_that_agree(executor, request, alone, tell, is_cpu=environment.device_type == "cpu")

    for _ in range(MOST_VISITS):
        missing = missing_step_times(spec, store, environment, visits, trials=trials, compared=compared)
        if not missing:
            break
        known = store.probes.by_batch_size(spec.name, environment)
        devices = devices_that_agree() if len(missing) > 1 and {default, *missing} <= known.keys() else None
        if devices is None:
            timer.visit(missing, default)
        else:
            timer.visit_side_by_side(missing, devices)
        refuse_where_nothing_fits(spec, store, environment)


@dataclass(frozen=True, slots=True)
class _Timer:
    # Times batch sizes for `measure_step_times`; ``cadences`` are the steps between evaluations of started trials.

    spec: StudySpec
    store: Store
    executor: Executor
    environment: Environment
    check: Callable[[], None]
    tell: Callable[[str], None]
    cadences: Mapping[int, int]

    def visit(self, sizes: Sequence[int], default: int) -> None:
        spec, store = self.spec, self.store
        visit = None
        waiting = deque(sizes)
        while waiting:
            size = waiting.popleft()
            self.check()
            memory = store.probes.memory_boundary(spec.name, self.environment)
            try:
                probe = measure_step_time_at(spec, self.executor, size, memory, self._save_too_large)
            except WorkloadError as error:
                if size == default or size in store.probes.by_batch_size(spec.name, self.environment):
                    raise
                if default in waiting:
                    waiting.append(size)
                    continue
                probe = _refused(spec, size, memory, with_hint(error))
                self.tell(
                    f"left out batch size {size}, because training fails: {with_hint(error)}; "
                    f"to try again, run `bssearch probe step-time {spec.name}`"
                )
            if probe is None:
                break
            probe = replace(probe, eval_every_steps=self.cadences.get(size, probe.eval_every_steps))
            self.check()
            visit = store.probes.add_step_time(spec.name, self.environment, probe, visit)

    def visit_side_by_side(self, sizes: Sequence[int], devices: TimesSideBySide) -> None:
        spec = self.spec
        visit = None
        memory = self.store.probes.memory_boundary(spec.name, self.environment)
        splits = [(size, _micro_batch_at(spec, size, memory)) for size in sizes]
        requests = [default_at(spec, size, micro) for size, micro in splits if micro is not None]
        for first in range(0, len(requests), devices.slots):
            self.check()
            for measured in devices.measure_step_times(requests[first : first + devices.slots]):
                if measured.out_of_memory:
                    self._save_too_large(_too_large(measured))
                    continue
                self.check()
                probe = probe_record(measured, spec.budget.trial_train_seconds, self.cadences.get(measured.batch_size))
                visit = self.store.probes.add_step_time(spec.name, self.environment, probe, visit)

    def _save_too_large(self, memory: MemoryUse) -> None:
        self.check()
        self.store.probes.save_memory(self.spec.name, self.environment, memory)


def _too_large(measured: StepTime) -> MemoryUse:
    reason = measured.reason or f"ran out of memory while timing steps of batch size {measured.batch_size}"
    return MemoryUse(micro_batch_size=measured.micro_batch_size, fits=False, peak_memory_bytes=None, reason=reason)


def _confirm_out_of_memory(
    spec: StudySpec,
    store: Store,
    executor: Executor,
    environment: Environment,
    check: Callable[[], None],
    *,
    trials: Iterable[TrialRecord],
    tell: Callable[[str], None],
) -> None:
    # Retry the smallest micro-batch size that ran out of memory in only one trial, in a fresh process. If the size
    # fits, trials use the size until a second trial runs out of memory. External programs need no retry, because their
    # processes were fresh.
    out = [trial.configuration for trial in trials if trial.state is TrialState.OOM]
    tried = [one for one in out if not one.grows and problem_with(spec, one, in_bounds=False) is None]
    counts = Counter(one.micro_batch_size for one in tried)
    once = {one.micro_batch_size: one for one in tried if counts[one.micro_batch_size] == 1}
    while not spec.is_program and (size := store.probes.memory_boundary(spec.name, environment).too_large) in once:
        if any(not use.fits and use.micro_batch_size <= size for use in store.probes.memory(spec.name, environment)):
            break
        check()
        ran_out = once.pop(size)
        # with accumulation, gradients and the second micro-batch's activations share the memory
        alone = replace(ran_out, batch_size=min(2, ran_out.accumulation_steps) * size).in_micro_batches(size)
        try:
            found = executor.measure_memory(
                MemoryRequest(configuration=alone, threads=spec.executor.threads, reserve=True)
            )
        except BSSearchError as error:
            tell(f"the second test of a micro-batch of {size} failed, so trials use smaller micro-batches: {error}")
            break
        check()
        store.probes.save_memory(spec.name, environment, found)
        if found.fits:
            tell(
                f"a micro-batch of {size} ran out of memory in a trial, but fits in a new process; trials use "
                f"micro-batches of {size} again"
            )


def _refused(spec: StudySpec, batch_size: int, memory: MemoryBoundary, reason: str) -> ProbeRecord:
    micro = _micro_batch_at(spec, batch_size, memory)
    assert micro is not None, "a tried batch size has a micro-batch size"
    return ProbeRecord(
        batch_size=batch_size,
        micro_batch_size=micro,
        world_size=spec.executor.world_size,
        step_seconds=None,
        evaluation_seconds=None,
        steps_timed=0,
        peak_memory_bytes=None,
        reason=reason,
        eval_every_steps=None,
    )


def measure_step_time_at(
    spec: StudySpec,
    executor: Executor,
    batch_size: int,
    memory: MemoryBoundary,
    on_too_large: Callable[[MemoryUse], None] = lambda memory: None,
    seconds_limit: float = SECONDS_LIMIT,
) -> ProbeRecord | None:
    """Time a batch size in the largest micro-batch that fits; None if no micro-batch fits."""
    while (micro := _micro_batch_at(spec, batch_size, memory)) is not None:
        measured = executor.measure_step_time(default_at(spec, batch_size, micro, seconds_limit))
        if not measured.out_of_memory:
            return probe_record(measured, spec.budget.trial_train_seconds)
        on_too_large(_too_large(measured))
        memory = memory.without(micro)
    return None


def _micro_batch_at(
    spec: StudySpec, batch_size: int, memory: MemoryBoundary, world_size: int | None = None
) -> int | None:
    # The micro-batch on each of `world_size` devices (default: the search's); None if no size fits
    share = batch_size // (world_size or spec.executor.world_size)
    return choose_micro_batch(share, spec.space.max_micro_batch_size, memory)


def default_at(
    spec: StudySpec,
    batch_size: int,
    micro_batch_size: int,
    seconds_limit: float = SECONDS_LIMIT,
    world_size: int | None = None,
) -> StepTimeRequest:
    default = spec.space.with_all_regularisation(spec.default_configuration)
    devices = world_size or default.world_size
    return StepTimeRequest(
        configuration=replace(default, batch_size=batch_size).on_devices(devices, micro_batch_size),
        threads=spec.executor.threads,
        trial_train_seconds=spec.budget.trial_train_seconds,
        seconds_limit=seconds_limit,
    )


def refuse_where_nothing_fits(spec: StudySpec, store: Store, environment: Environment) -> None:
    if store.probes.memory_boundary(spec.name, environment).nothing_fits:
        raise nothing_fits(environment, store.probes.memory(spec.name, environment))


def nothing_fits(environment: Environment, uses: Sequence[MemoryUse]) -> LaunchError:
    tried = ", ".join(str(use.micro_batch_size) for use in uses if not use.fits)
    reason = next((use.reason for use in uses if use.micro_batch_size == 1 and use.reason), None)
    memory = environment.device_memory_bytes
    return LaunchError(
        f"not even a micro-batch of one sample fits into the memory of {environment.device_name}"
        + ("" if memory is None else f" ({gib(memory)})")
        + (f"; these sizes ran out of memory: {tried}" if tried else "")
        + (f" ({reason})" if reason else ""),
        hint="use a smaller model, evaluate in smaller batches, or use a device with more memory "
        "(see executor.memory_limit_gib)",
    )


def _devices_that_agree(
    executor: Executor, request: StepTimeRequest, alone: ProbeRecord, tell: Callable[[str], None], *, is_cpu: bool
) -> TimesSideBySide | None:
    # `executor`, if its devices agree with each other and with `alone` within `FLAT_RATIO` in simultaneous steps. Slots
    # of the same CPU never time steps simultaneously.
    if is_cpu or not isinstance(executor, TimesSideBySide) or not executor.slots_apart or executor.slots < 2:
        return None
    try:
        found = executor.step_times_by_device(request)
    except LaunchError as error:
        tell(f"measuring step times on one device, because another device failed: {error}")
        return None
    seconds = {device: one.step_seconds for device, one in found.items() if one.step_seconds and not one.contended}
    if len(seconds) < len(found) or alone.step_seconds is None:
        return None
    usual = statistics.median(seconds.values())
    for device, ratio in _apart(seconds, usual).items():
        tell(f"measuring step times on one device, because a step on {device} takes {ratio:.3g} times as long as usual")
    slower = _apart({"all": usual}, alone.step_seconds)
    if slower:
        tell(
            f"measuring step times on one device, because simultaneous steps take {slower['all']:.3g} times as long as "
            "separate steps"
        )
    return None if slower or _apart(seconds, usual) else executor


def _apart(seconds: Mapping[str, float], usual: float) -> dict[str, float]:
    ratios = {name: one / usual for name, one in seconds.items()}
    return {name: ratio for name, ratio in ratios.items() if max(ratio, 1 / ratio) > FLAT_RATIO}


def untimed_on_devices(spec: StudySpec, store: Store, environment: Environment) -> list[tuple[int, int, int]]:
    """The (devices, batch size, micro-batch size) triples that need visits, except on the search's devices."""
    known = store.probes.by_batch_size(spec.name, environment)
    memory = store.probes.memory_boundary(spec.name, environment)
    visits = Counter(split(one) for one in store.probes.visits(spec.name))
    return [
        (world_size, size, micro)
        for world_size in spec.executor.devices[1:]
        for size, probe in sorted(known.items())
        if probe.step_seconds is not None and size % world_size == 0
        if (micro := _micro_batch_at(spec, size, memory, world_size)) is not None
        if visits[size, micro, world_size] < COMPARING_VISITS
    ]


def time_on_devices(
    spec: StudySpec, store: Store, executor: Executor, environment: Environment, check: Callable[[], None]
) -> None:
    known = store.probes.by_batch_size(spec.name, environment)
    too_large: set[tuple[int, int, int]] = set()
    for _ in range(COMPARING_VISITS):
        visit: int | None = None
        for place in untimed_on_devices(spec, store, environment):
            if place in too_large:
                continue
            world_size, size, micro = place
            check()
            measured = executor.measure_step_time(default_at(spec, size, micro, world_size=world_size))
            if measured.out_of_memory:
                too_large.add(place)
                continue
            check()
            probe = probe_record(measured, spec.budget.trial_train_seconds, known[size].eval_every_steps)
            visit = store.probes.add_step_time(spec.name, environment, probe, visit)
