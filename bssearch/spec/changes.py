"""The fields in which two specs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed_fields(old: Any, new: Any, path: str = "") -> dict[str, tuple[object, object]]:
    """Return the dotted fields in which two JSON values differ, each with its (old, new) values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[object, object]] = {}
        for key in sorted({*old, *new}):
            found |= changed_fields(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if old == new else {path: (old, new)}
