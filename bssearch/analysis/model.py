"""What every part of an answer has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """A part of the answer: numbers are finite, missing is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
