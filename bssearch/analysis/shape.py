"""Base models of an answer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from bssearch.records import Configuration
from bssearch.spec.space import TRAINING_PARAMETERS

Parameters = dict[str, bool | int | float | str | None]


class Model(BaseModel):
    """Part of an answer: numbers are finite, missing values null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Interval(Model):
    """A figure with its 95 % interval, null if runs are too few."""

    value: float
    low: float | None
    high: float | None


class Notice(Model):
    """A caveat: a code and a sentence."""

    code: str
    message: str


def parameters_of(configuration: Configuration) -> Parameters:
    """Parameters except batch sizes."""
    named: Parameters = {"learning_rate": configuration.learning_rate}
    named |= {name: getattr(configuration, name) for name in TRAINING_PARAMETERS}
    return {**named, "optimizer": configuration.optimizer, **configuration.parameters}
