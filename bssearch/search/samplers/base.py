"""The sampler interface."""

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from bssearch import registry
from bssearch.analysis.objectives import objective_of
from bssearch.errors import require
from bssearch.records import Configuration, ParameterValue
from bssearch.records.text import plural
from bssearch.search.history import History
from bssearch.spec import StudySpec
from bssearch.spec.parts import made_with

StartupTrials = Annotated[int, Field(ge=1)]
STARTUP_TRIALS = 6  # random trials before Optuna's model


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration to try. ``sampled`` has the coordinates, or is None outside the space.

    ``uncapped``: True if the pruner does not pause, prune or cap this trial. ``expected_improvement``: the largest
    expected gain of a further trial, as a share of the incumbent's time.
    """

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    uncapped: bool = False
    expected_improvement: float | None = None


class Sampler(ABC):
    """Chooses trials from the history and the study's seed alone.

    Constructor parameters after the spec are options. ``models_time``: True if the sampler models the time of each
    batch size, so that the planner adds evidence trials.
    """

    models_time = False

    @abstractmethod
    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        """Return the next configuration, at ``batch_size`` if given, or None if no configuration is left."""

    def contenders(self, history: History) -> Sequence[int]:
        """Return the batch sizes that may be as fast as the best; no size unless the sampler models times."""
        return ()

    def ending(self, history: History) -> str | None:
        """Return the reason if no configuration is left, else None."""
        return None


def make_sampler(spec: StudySpec) -> Sampler:
    """Create the spec's sampler. `auto` is TPE unless trials race to the target."""
    name = "tpe" if spec.sampler.name == "auto" and not objective_of(spec).trials_race else spec.sampler.name
    kind: Callable[..., Sampler] = registry.load_class("samplers", name, Sampler)  # type: ignore[type-abstract]
    return made_with(kind, spec.sampler.options, "sampler.options", spec)


def decoded(
    spec: StudySpec,
    batch_size: int,
    sampled: Mapping[str, ParameterValue],
    *,
    uncapped: bool = False,
    expected_improvement: float | None = None,
) -> Choice:
    return Choice(spec.space.decode(batch_size, sampled), sampled, uncapped, expected_improvement)


def default_choice(spec: StudySpec, *, uncapped: bool = True) -> Choice:
    default = spec.default_configuration
    return Choice(default, spec.space.encode(default), uncapped=uncapped)


MOST_CELLS = 1_000_000  # limit of combinations per batch size, because memory has all combinations


class Grid(Sampler):
    """Runs all combinations of the space's values, in a random order from the study's seed."""

    def __init__(self, spec: StudySpec) -> None:
        dimensions = spec.space.dimensions()
        # the learning rate's coordinate has the prefix "reference_"
        ranges = [one.name.removeprefix("reference_") for one in dimensions if not one.choices]
        require(not ranges, f"sampler = grid cannot use the ranges of {', '.join(ranges)}; list values instead")
        each = math.prod(len(one.choices) for one in dimensions)
        require(
            each <= MOST_CELLS,
            f"sampler = grid has {each} combinations at each batch size, more than {MOST_CELLS}; list fewer values",
        )
        names = [dimension.name for dimension in dimensions]
        cells = [
            dict(zip(names, cell, strict=True)) for cell in itertools.product(*(one.choices for one in dimensions))
        ]
        choices = [decoded(spec, size, cell) for cell in cells for size in spec.space.rungs]
        self._choices = list({one.configuration.in_micro_batches(1).key: one for one in choices}.values())
        random.Random(spec.seed).shuffle(self._choices)

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        fitting = self._fitting(history)
        if batch_size is not None:
            fitting = [one for one in fitting if one.configuration.batch_size == batch_size]
        return next((one for one in fitting if not history.tried(one.configuration)), None)

    def ending(self, history: History) -> str | None:
        if self.choose(history) is not None:
            return None
        fitting = self._fitting(history)
        where = "" if len(fitting) == len(self._choices) else " at feasible batch sizes"
        return f"trials ran all {plural(len(fitting), 'combination')} of the grid{where}"

    def _fitting(self, history: History) -> list[Choice]:
        feasible = history.feasible
        return [one for one in self._choices if one.configuration.batch_size in feasible]
