"""Read a study's short answer and search end without importing the analysis."""

import math
from contextlib import suppress

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from bssearch.records.text import number
from bssearch.spec import BudgetSpec
from bssearch.storage.repository import Store


class SearchEnd(BaseModel):
    """The end of a search after ``spent`` trials."""

    reason: str
    spent: int
    budget: BudgetSpec


def stored_end(store: Store, name: str) -> SearchEnd | None:
    """The last stored end of the search, even after a resume; None if missing or invalid."""
    with suppress(ValidationError):
        return SearchEnd.model_validate(store.findings.last(name).get("search_end"))
    return None


class _Figure(BaseModel):
    median: FiniteFloat


class _Optimal(BaseModel):
    batch_size: int
    time_to_target_s: _Figure | None = None


class _Batch(BaseModel):
    batch_size: int
    objective_value: _Figure | None = None


class ShortAnswer(BaseModel):
    """An answer's summary for lists of studies; see `bssearch.analysis.answer.Answer`."""

    optimal: _Optimal
    batches: list[_Batch]
    provisional: bool
    within_5_percent: float | None = Field(default=None, ge=0, le=1)

    @property
    def seconds(self) -> float | None:
        return None if self.optimal.time_to_target_s is None else self.optimal.time_to_target_s.median

    @property
    def medians(self) -> dict[int, float]:
        """The known median objective values, by batch size."""
        return {one.batch_size: one.objective_value.median for one in self.batches if one.objective_value is not None}

    @property
    def in_words(self) -> str:
        """Such as ``batch 64, 0.131 s, 93 % sure``. An unknown probability reads ``final`` or ``provisional``."""
        seconds = "" if self.seconds is None else f", {number(self.seconds)} s"
        sure = "provisional" if self.provisional else "final"
        if self.within_5_percent is not None:
            sure = f"{math.floor(100 * self.within_5_percent)} % sure"
        return f"batch {self.optimal.batch_size}{seconds}, {sure}"


def short_answer(store: Store, name: str) -> ShortAnswer | None:
    with suppress(ValidationError):
        return ShortAnswer.model_validate(store.findings.last(name).get("answer"))
    return None
