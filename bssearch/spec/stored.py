"""The spec that is stored with a study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bssearch.errors import DatabaseError, problem_in_words
from bssearch.records import StudyRecord
from bssearch.spec.model import StudySpec

NEWER = "a newer bssearch may have written it: upgrade this one"


def spec_of(study: StudyRecord) -> StudySpec:
    """Return the spec of a stored study; raise `DatabaseError` where it is none that this version knows."""
    try:
        spec = StudySpec.model_validate(study.spec)
    except ValidationError as error:
        first, *more = error.errors()
        place = ".".join(map(str, first["loc"])) or "spec"
        others = f" (and {len(more)} more)" if more else ""
        is_newer = first["type"] == "extra_forbidden" or place == "schema_version"
        raise DatabaseError(
            f"the spec stored with study {study.name!r} cannot be read: {place}: {problem_in_words(first)}{others}",
            hint=NEWER if is_newer else "other studies of this database are not concerned",
        ) from None
    if spec.name != study.name:
        raise DatabaseError(f"the spec stored with study {study.name!r} is that of {spec.name!r}")
    return spec


# The fields in which two specs differ.


def changed_fields(old: Any, new: Any, path: str = "") -> dict[str, tuple[object, object]]:
    """Return the dotted fields in which two JSON values differ, each with its (old, new) values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[object, object]] = {}
        for key in sorted({*old, *new}):
            found |= changed_fields(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if old == new else {path: (old, new)}
