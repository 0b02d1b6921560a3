"""What was decided for a stored study whose training settings leave open how steps are computed."""

from __future__ import annotations

from contextlib import suppress

from bssearch.commands.agreement import check_question
from bssearch.errors import BSSearchError
from bssearch.records import Environment
from bssearch.spec import StudySpec
from bssearch.storage.repository import open_store


def decided_environment(spec: StudySpec, db: str | None) -> Environment | None:
    """Return the environment of the stored study of a spec that leaves something open.

    It is None where there is no study of that name and question, where that has not begun, and where the spec leaves
    nothing open.
    """
    if not spec.training.record.leave_open:
        return None
    with suppress(BSSearchError), open_store(db, write=False) as store:  # there may be no database yet
        study = store.find_study(spec.name)
        if study is not None:
            check_question(spec, study)
            return study.environment
    return None


def decided_mode(spec: StudySpec, db: str | None) -> str | None:
    """Return how the steps of the stored study of a spec are computed, as `decided_environment` does."""
    environment = decided_environment(spec, db)
    return None if environment is None else environment.compile_mode


def decided_otherwise(spec: StudySpec, db: str | None, found: Environment) -> str | None:
    """Return the mode that another driver decided on for a study, in the place of this driver's on such a device.

    It is None where they agree, and where the study's device or precision is another one.
    """
    stored = decided_environment(spec, db)
    if stored is None or (stored.device_name, stored.precision) != (found.device_name, found.precision):
        return None
    return None if stored.compile_mode == found.compile_mode else stored.compile_mode
