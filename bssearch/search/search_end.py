"""How a study's search ended, as stored beside its answer."""

from __future__ import annotations

from contextlib import suppress

from pydantic import BaseModel, ValidationError

from bssearch.spec.parts import BudgetSpec
from bssearch.storage.repository import Store


class SearchEnd(BaseModel):
    """Why a search ended; its ``spent`` trials and ``budget``."""

    reason: str
    spent: int
    budget: BudgetSpec


def stored_end(store: Store, name: str) -> SearchEnd | None:
    """How the search ended; None if it did not, or if what is stored cannot be read."""
    with suppress(ValidationError):
        return SearchEnd.model_validate((store.findings.last(name) or {}).get("search_end"))
    return None
