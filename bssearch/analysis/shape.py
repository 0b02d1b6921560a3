"""What all parts of an answer are made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from bssearch.records import Configuration
from bssearch.spec.space import TRAINING_PARAMETERS

Parameters = dict[str, bool | int | float | str | None]
"""The parameters of a configuration, by name."""


class Model(BaseModel):
    """A part of the answer: numbers are finite, missing is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Interval(Model):
    """A figure with its 95 % interval, null where the runs are too few for one."""

    value: float
    low: float | None
    high: float | None


class Notice(Model):
    """A caveat of a result: a code for programs and a sentence for people."""

    code: str
    message: str


def parameters_of(configuration: Configuration) -> Parameters:
    """Return everything of a configuration but its batch sizes, by name."""
    named: Parameters = {"learning_rate": configuration.learning_rate}
    named |= {name: getattr(configuration, name) for name in TRAINING_PARAMETERS}
    return {**named, "optimizer": configuration.optimizer, **configuration.parameters}
