"""Creates, binds, renames, archives and deletes studies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import OtherDeviceError, UsageError
from bssearch.records import Environment, StudyRecord
from bssearch.storage.columns import now, to_columns
from bssearch.storage.leases import check_idle
from bssearch.storage.models import StudyRow
from bssearch.storage.statements import STUDY, insert_if_absent, study_record


def create(connection: Connection, study: StudyRecord, *, again: bool) -> None:
    """Store a study; ``again``: an earlier try may have stored it. Raises `UsageError` if the name is taken."""
    if insert_if_absent(connection, StudyRow, to_columns(study)):
        return
    stored = connection.execute(STUDY.where(StudyRow.name == study.name)).mappings().first()
    if not again or stored is None or study_record(stored) != study:
        raise _taken(study.name)


def rename(connection: Connection, study_id: int, *, old: str, new: str) -> None:
    """Raise `UsageError` if the name is invalid or taken, or the study is running."""
    check_name(new)
    check_idle(connection, study_id, old, "renamed")
    if connection.scalar(select(StudyRow.id).where(StudyRow.name == new, StudyRow.id != study_id)) is not None:
        raise _taken(new)
    spec = connection.execute(select(StudyRow.spec).where(StudyRow.id == study_id)).scalar_one()
    try:
        connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(name=new, spec={**spec, "name": new}))
    except IntegrityError:  # another process created it in the meantime
        raise _taken(new) from None


def update_spec(connection: Connection, study_id: int, *, spec: Mapping[str, object]) -> None:
    """Replace the spec."""
    connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(spec=dict(spec)))


def bind(connection: Connection, study_id: int, environment: Environment, environment_id: int, *, again: bool) -> None:
    """Bind a study to a kind of device; raise `OtherDeviceError` for another kind.

    ``again`` rebinds it to another environment of the same kind.
    """
    study = study_record(connection.execute(STUDY.where(StudyRow.id == study_id)).mappings().one())
    same_kind = study.environment is not None and study.environment.fingerprint == environment.fingerprint
    if study.environment is None or (again and same_kind):
        connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(environment_id=environment_id))
    elif not same_kind:
        raise OtherDeviceError(
            f"the study {study.name!r} was measured on {study.environment.fingerprint}, this is "
            f"{environment.fingerprint}; different devices are never pooled",
            hint="give the spec another name for this device",
        )


def archive(connection: Connection, study_id: int, *, name: str, archived: bool) -> None:
    """Archive a study, or undo it; archiving twice keeps the first time. Raises `UsageError` if it is running."""
    if archived:
        check_idle(connection, study_id, name, "archived")
    put_away = update(StudyRow).where(StudyRow.id == study_id)
    if archived:
        connection.execute(put_away.where(StudyRow.archived_at.is_(None)).values(archived_at=now(connection)))
    else:
        connection.execute(put_away.values(archived_at=None))


def delete_all(connection: Connection, study_id: int, *, name: str) -> None:
    """Delete a study; raise `UsageError` if it is running."""
    check_idle(connection, study_id, name, "deleted")
    connection.execute(delete(StudyRow).where(StudyRow.id == study_id))


def check_name(name: str) -> None:
    """Raise `UsageError` for an invalid name."""
    from pydantic import TypeAdapter, ValidationError

    from bssearch.spec import StudySpec

    try:
        TypeAdapter(Annotated[str, StudySpec.model_fields["name"]]).validate_python(name)
    except ValidationError:
        raise UsageError(
            f"invalid study name {name!r}",
            hint="use letters, digits, '.', '_' and '-'; start with a letter or digit; use at most 100 characters",
        ) from None


def _taken(name: str) -> UsageError:
    return UsageError(f"study {name!r} already exists", hint="continue it, or choose another name")
