"""The specs by which trials were started: budget, slots, pruner and executor of a study may change while it goes on."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import JSON, Connection, ForeignKey, Integer, select
from sqlalchemy.orm import Mapped, mapped_column

from bssearch.records import spec_digest
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import Base, TrialRow
from bssearch.storage.statements import insert_if_absent


class SpecRow(Base):
    """A spec of a study, whole; append-only. ``digest`` is that of its content (`bssearch.records.spec_digest`)."""

    __tablename__ = "bss_spec"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[Mapping[str, object]] = mapped_column(JSON)


class Specs(Database):
    """The part of the store that keeps the specs of trials."""

    def keep_spec(self, study: str, spec: Mapping[str, object]) -> str:
        """Keep a spec by which trials of a study are started, once; return its digest, for `Lease.spec`."""
        digest = spec_digest(spec)

        def keep(connection: Connection, study_id: int) -> None:
            insert_if_absent(connection, SpecRow, {"study_id": study_id, "digest": digest, "spec": dict(spec)})

        self._on_study(study, keep)
        return digest

    @patiently
    def spec_at(self, study: str, number: int) -> Mapping[str, object] | None:
        """Return the spec by which a trial was started, as JSON values; None where it was not kept."""
        with self._reading() as connection:
            query = (
                select(SpecRow.spec)
                .join(TrialRow, (TrialRow.study_id == SpecRow.study_id) & (TrialRow.spec_digest == SpecRow.digest))
                .where(SpecRow.study_id == self._study_id(connection, study), TrialRow.number == number)
            )
            found: Mapping[str, object] | None = connection.scalar(query)
            return found
