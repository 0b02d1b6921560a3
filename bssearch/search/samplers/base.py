"""A sampler chooses the next configuration of a search from the search's history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from bssearch import registry
from bssearch.analysis.objectives.base import objective_of
from bssearch.records import Configuration, ParameterValue
from bssearch.search.history import History
from bssearch.spec import StudySpec
from bssearch.spec.parts import made_with

StartupTrials = Annotated[int, Field(ge=1)]
STARTUP_TRIALS = 6
"""Trials that a sampler of Optuna's chooses at random before it has a model."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration to try, with its coordinates in the space; None if it is outside the space.

    ``uncapped``: no other trial's time ends it early. ``expected_improvement`` is the share of the incumbent's time
    that a further trial is expected to gain, None if unknown.
    """

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    uncapped: bool = False
    expected_improvement: float | None = None


class Sampler(ABC):
    """Chooses the trials of a search one by one. A choice follows from the history and the study's seed alone.

    It is made from the spec. The further parameters of its constructor are the options that a spec may give.
    ``models_time``: it chooses batch sizes by a model of time, so that evidence trials are chosen beside it.
    """

    models_time = False

    @abstractmethod
    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        """Return the next configuration, at a batch size if one is given; None if there is nothing left to try."""

    def contenders(self, history: History) -> Sequence[int]:
        """Return the batch sizes that may be as good as the best, if the sampler has a model of them."""
        return ()

    def ending(self, history: History) -> str | None:
        """Say why no choice is left; None while there is one."""
        return None


def make_sampler(spec: StudySpec) -> Sampler:
    """Return the sampler that a spec names, with its options: `auto` is TPE if it has no model of the objective.

    Raises `UsageError` for an unknown name or option, and an option out of its bounds.
    """
    models_time = objective_of(spec).trials_race
    name = "tpe" if spec.sampler.name == "auto" and not models_time else spec.sampler.name
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
    """Return the choice of coordinates at a batch size."""
    return Choice(spec.space.decode(batch_size, sampled), sampled, uncapped, expected_improvement)


def default_choice(spec: StudySpec) -> Choice:
    """Return the default configuration, the baseline of every speed-up."""
    default = spec.default_configuration
    return Choice(default, spec.space.encode(default), uncapped=True)
