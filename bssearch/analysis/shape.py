"""What all parts of an answer are made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Parameters = dict[str, bool | int | float | str | None]
"""The parameters of a configuration, by name."""


class Model(BaseModel):
    """A part of the answer: numbers are finite, missing is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
