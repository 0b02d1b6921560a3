"""The branches of longer runs that `bssearch probe branch` has trained."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import Connection, UniqueConstraint, select
from sqlalchemy.orm import Mapped

from bssearch.records import BranchMeasurement, Environment
from bssearch.storage.clock import now
from bssearch.storage.columns import not_negative, positive
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import Base, EnvironmentId, Id, StudyId
from bssearch.storage.rows import column_types, from_columns, to_columns
from bssearch.storage.statements import insert_if_absent


class BranchRow(Base, holds=(BranchMeasurement,)):
    """A branch in an environment; append-only. Its ``digest`` is that of all that decides how it ends."""

    __tablename__ = "bss_branch"
    __table_args__ = (
        UniqueConstraint("study_id", "environment_id", "digest"),
        *positive("batch_size", "micro_batch_size", "samples", "learning_rate"),
        *not_negative("start_samples"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    measured_at: Mapped[datetime]
    digest: Mapped[str]


class Branches(Database):
    """The part of the store that keeps branches."""

    def save_branch(self, study: str, environment: Environment, branch: BranchMeasurement) -> None:
        """Store a branch; one of the same digest in the same environment stays as it is."""

        def save(connection: Connection, study_id: int) -> None:
            place = {"study_id": study_id, "environment_id": self._environment_id(connection, environment)}
            insert_if_absent(connection, BranchRow, {**to_columns(branch), **place, "measured_at": now(connection)})

        self._on_study(study, save)

    @patiently
    def branches(
        self, study: str, environment: Environment, digests: Collection[str] | None = None
    ) -> list[BranchMeasurement]:
        """Return a study's branches in an environment in the order of measuring, those of some digests or all."""
        columns = [BranchRow.__table__.c[name] for name in column_types(BranchMeasurement)]
        with self._reading() as connection:
            query = (
                select(*columns).where(BranchRow.study_id == self._study_id(connection, study)).order_by(BranchRow.id)
            )
            if digests is not None:
                query = query.where(BranchRow.digest.in_(digests))
            return [from_columns(BranchMeasurement, row) for row in connection.execute(query).mappings()]
