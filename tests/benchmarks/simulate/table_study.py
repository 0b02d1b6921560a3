"""A recorded table as a study: its combinations of parameters are the search space, its trials the trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import PrivateAttr

from bssearch.records import Configuration, ParameterValue, ProbeRecord, TrialPlan
from bssearch.spec import Dimension, SearchSpace, StudySpec
from bssearch.spec.parts import ConfirmSpec, DefaultSpec, ExecutorSpec, PrunerSpec, SamplerSpec, TargetSpec
from tests.benchmarks.simulate.cells import CellCandidates
from tests.benchmarks.simulate.draws import LEAST_IMPROVEMENT, unbounded_budget
from tests.benchmarks.simulate.replay import Replay
from tests.benchmarks.simulate.table_space import BATCH_SIZE, LEARNING_RATE, TableSpace

PROBE_STEPS = 20  # steps charged for timing a batch size, the fewest that a study's probe takes


class TableSearchSpace(SearchSpace):
    """The combinations of parameters in a table."""

    _table: TableSpace = PrivateAttr()

    @classmethod
    def of(cls, table: TableSpace) -> TableSearchSpace:
        """Return the space of a table."""
        rates = sorted({_rate(table, point) for point in range(len(table.cells))})
        space = cls(batch_size=tuple(table.seconds_by_batch_size), learning_rate=tuple(rates))
        space._table = table
        return space

    def dimensions(self) -> tuple[Dimension, ...]:
        named = zip(self._table.names, self._table.grid, strict=True)
        return tuple(Dimension(name, choices=values) for name, values in named if name != BATCH_SIZE)

    def cells(self, batch_sizes: Sequence[int]) -> list[tuple[int, dict[str, ParameterValue]]]:
        points = range(len(self._table.cells))
        return [self.coordinates(point) for point in points if self._table.batch_size(point) in batch_sizes]

    def candidates(self, batch_sizes: Sequence[int]) -> CellCandidates:
        return CellCandidates(self.cells(batch_sizes))

    def coordinates(self, point: int) -> tuple[int, dict[str, ParameterValue]]:
        """Return a cell's batch size and its other parameters."""
        values = dict(zip(self._table.names, self._table.cells[point], strict=True))
        del values[BATCH_SIZE]
        return self._table.batch_size(point), values

    def configuration(self, point: int) -> Configuration:
        """Return the configuration of a cell."""
        size, values = self.coordinates(point)
        rate = values.pop(LEARNING_RATE, 1.0)
        assert isinstance(rate, int | float)
        return Configuration(batch_size=size, micro_batch_size=size, learning_rate=float(rate), parameters=values)

    def point_of(self, configuration: Configuration) -> int:
        """Return the cell of a configuration."""
        wanted = configuration.in_micro_batches(configuration.batch_size)
        points = (point for point in range(len(self._table.cells)) if self.configuration(point) == wanted)
        return next(points)

    def decode(self, batch_size: int, sampled: Mapping[str, ParameterValue]) -> Configuration:
        """Return the configuration of the cell at a batch size that agrees with most of the coordinates."""
        points = [point for point in range(len(self._table.cells)) if self._table.batch_size(point) == batch_size]
        return self.configuration(max(points, key=lambda point: self._agreement(point, sampled)))

    def encode(self, configuration: Configuration) -> dict[str, ParameterValue]:
        return self.coordinates(self.point_of(configuration))[1]

    def nearest(self, configuration: Configuration) -> tuple[int, dict[str, ParameterValue]]:
        return self.coordinates(self.point_of(configuration))

    def at_edge(self, configuration: Configuration) -> bool:
        """False: a list has no searchable end."""
        return False

    def _agreement(self, point: int, sampled: Mapping[str, ParameterValue]) -> tuple[int, int]:
        """Return the number of equal coordinates of a cell, and the negative distance of the others on the grid."""
        near = steps = 0
        for name, values, own in zip(self._table.names, self._table.grid, self._table.cells[point], strict=True):
            if name in sampled:
                near += own == sampled[name]
                steps += abs(values.index(own) - values.index(sampled[name])) if sampled[name] in values else 0
        return near, -steps


class TableStudySpec(StudySpec):
    """The spec of a study over a table."""

    _default: Configuration = PrivateAttr()

    @property
    def default_configuration(self) -> Configuration:
        return self._default


def table_study(
    table: TableSpace,
    *,
    default: int,
    sampler: str = "auto",
    pruner: PrunerSpec,
    workers: int = 1,
    seed: int = 0,
    budget: float,
    least_improvement: float = LEAST_IMPROVEMENT,
    confirm: ConfirmSpec,
) -> tuple[TableStudySpec, TableSearchSpace]:
    """Return the spec of a study over a table, and its space; ``budget`` in train seconds of all workers."""
    space, target = TableSearchSpace.of(table), table.target
    configuration = space.configuration(default)
    spec = TableStudySpec(
        schema_version=1,
        name="simulated",
        workload="recorded",
        target=TargetSpec(metric=target.metric, value=target.value, goal=target.goal),
        space=space,
        default=DefaultSpec(batch_size=configuration.batch_size, learning_rate=configuration.learning_rate),
        sampler=SamplerSpec.model_validate({"name": sampler}),
        pruner=pruner,
        confirm=confirm,
        budget=unbounded_budget(table.limit, budget / workers, least_improvement),
        seed=seed,
        executor=ExecutorSpec(slots=workers),
    )
    spec._default = configuration
    return spec, space


def table_probes(table: TableSpace) -> dict[int, ProbeRecord]:
    """Return the step time of each batch size, with the steps between evaluations."""
    return {
        size: ProbeRecord(
            batch_size=size,
            micro_batch_size=size,
            step_seconds=seconds,
            evaluation_seconds=0.0,
            steps_timed=PROBE_STEPS,
            peak_memory_bytes=None,
            eval_every_steps=table.cadence.get(size, 1),
        )
        for size, seconds in table.step_seconds.items()
    }


def probes_cost(probes: Mapping[int, ProbeRecord]) -> float:
    """Return the train seconds charged for timing every batch size."""
    return sum(PROBE_STEPS * (probe.step_seconds or 0.0) for probe in probes.values())


class TableRows:
    """The recorded trial of a planned trial: one of its cell's trials, by its seed."""

    def __init__(self, table: TableSpace, space: TableSearchSpace) -> None:
        self._table = table
        self._space = space

    def __call__(self, plan: TrialPlan) -> Replay:
        """Return the recorded trial of a plan's cell that its seed picks."""
        trials = self._table.trials[self._space.point_of(plan.configuration)]
        return trials[plan.seed % len(trials)]


def _rate(table: TableSpace, point: int) -> float:
    if LEARNING_RATE not in table.names:
        return 1.0
    rate = table.cells[point][table.names.index(LEARNING_RATE)]
    assert isinstance(rate, int | float)
    return float(rate)
