"""More devices than the search used: step times on them, then runs of the best batch sizes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bssearch.analysis.answer import OnDevices
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Environment, Phase, TrialPlan
from bssearch.records.step_times import split
from bssearch.search.calibration import COMPARING_VISITS, default_at, micro_batch_at
from bssearch.search.confirmation import CompletedRuns, repeat, verdict_of
from bssearch.search.history import History, trial_seed
from bssearch.spec import StudySpec
from bssearch.spec.parts import MOST_DEVICES
from bssearch.storage.repository import Store
from bssearch.training.course import probe_record


def untimed(spec: StudySpec, store: Store, environment: Environment) -> list[tuple[int, int, int]]:
    """(devices, batch size, micro-batch size) with fewer than `COMPARING_VISITS` visits."""
    known = store.probes.by_batch_size(spec.name, environment)
    memory = store.probes.memory_boundary(spec.name, environment)
    visits = Counter(split(one) for one in store.probes.visits(spec.name))
    return [
        (world_size, size, micro)
        for world_size in spec.executor.devices[1:]
        for size, probe in sorted(known.items())
        if probe.step_seconds is not None and size % world_size == 0
        if (micro := micro_batch_at(spec, size, memory, world_size)) is not None
        if visits[size, micro, world_size] < COMPARING_VISITS
    ]


def time_on_devices(
    spec: StudySpec, store: Store, executor: Executor, environment: Environment, check: Callable[[], None]
) -> None:
    """Time all batch sizes on the further numbers of devices, in `COMPARING_VISITS` visits.

    ``check`` runs before each measurement and write, and may raise. Batch sizes out of memory are left out.
    """
    known = store.probes.by_batch_size(spec.name, environment)
    too_large: set[tuple[int, int, int]] = set()
    for _ in range(COMPARING_VISITS):
        visit: int | None = None
        for place in untimed(spec, store, environment):
            if place in too_large:
                continue
            world_size, size, micro = place
            check()
            measured = executor.measure_step_time(default_at(spec, size, micro, world_size=world_size))
            if measured.out_of_memory:
                too_large.add(place)
                continue
            check()
            probe = probe_record(measured, spec.budget.trial_train_seconds)
            probe = replace(probe, eval_every_steps=known[size].eval_every_steps)
            visit = store.probes.add_step_time(spec.name, environment, probe, visit)


def next_run(rows: Sequence[OnDevices]) -> Callable[[History], TrialPlan | None]:
    """Function that plans the next of ``confirm.runs`` runs of each number of devices on the front."""

    def plan(history: History) -> TrialPlan | None:
        made = CompletedRuns.of(history, history.of_phase(Phase.DEVICES), as_run=lambda one: one)
        return next(_missing_runs(history, made, _configurations(history, rows)), None)

    return plan


def _missing_runs(history: History, made: CompletedRuns, chosen: Sequence[Configuration]) -> Iterator[TrialPlan]:
    # Fresh seeds for each number of devices: the runs also tell more of the steps.
    for index in range(history.spec.confirm.runs):
        for one in chosen:
            seed = trial_seed(history.spec.seed, Phase.DEVICES, index * MOST_DEVICES + one.world_size)
            if made.is_missing(one, seed):
                yield repeat(history, one, seed, Phase.DEVICES, retry_of=made.retried(one, seed))


def _configurations(history: History, rows: Sequence[OnDevices]) -> list[Configuration]:
    verdict = verdict_of(history, history.of_phase(Phase.CONFIRM))
    if verdict is None:
        return []
    wanted = [one for one in rows if one.on_front and one.world_size > history.spec.executor.world_size]
    return [
        verdict.by_batch[one.batch_size].configuration.on_devices(one.world_size, one.micro_batch_size)
        for one in wanted
        if one.batch_size in verdict.by_batch
    ]
