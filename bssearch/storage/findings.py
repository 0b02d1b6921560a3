"""The answer of a study as it stood when a trial ended: read while nothing has changed since."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select, update

from bssearch.storage.clock import now
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import FindingRow, ProbeRow, StudyRow, TrialRow, VisitRow
from bssearch.storage.revisions import mark_probed
from bssearch.storage.statements import insert_if_absent


class Findings(Database):
    """The part of the store that keeps findings. A finding counts as long as its stamp equals the study's."""

    @patiently
    def stamp(self, study: str) -> str:
        """Return a digest of what an answer is made of: it changes with every trial, probe and change of the spec."""
        with self._reading() as connection:
            return _stamp(connection, self._study_id(connection, study))

    def save_finding(self, study: str, stamp: str, answer: Mapping[str, object], *, is_news: bool = False) -> None:
        """Store an answer, as JSON values, in the place of an earlier one; ``stamp`` was taken before it was made.

        Drivers are told of one that ``is_news``, as they are of a measurement.
        """

        def save(connection: Connection, study_id: int) -> None:
            fields = {"stamp": stamp, "found_at": now(connection), "answer": answer}
            if not insert_if_absent(connection, FindingRow, {"study_id": study_id, **fields}):
                connection.execute(update(FindingRow).where(FindingRow.study_id == study_id).values(**fields))
            if is_news:
                mark_probed(connection, study_id)

        self._on_study(study, save)

    @patiently
    def seconds_since_finding(self, study: str) -> float:
        """Return how long ago an answer was stored, by the database's clock; infinite where none was."""
        with self._looking() as connection:
            query = select(FindingRow.found_at).where(FindingRow.study_id == self._study_id(connection, study))
            found_at = connection.scalar(query)
            return math.inf if found_at is None else (now(connection) - found_at).total_seconds()

    @patiently
    def last_finding(self, study: str) -> Mapping[str, Any] | None:
        """Return what was stored last, whatever has changed since; None where there is nothing."""
        with self._looking() as connection:
            query = select(FindingRow.answer).where(FindingRow.study_id == self._study_id(connection, study))
            last: Mapping[str, Any] | None = connection.scalar(query)
            return last

    @patiently
    def finding(self, study: str) -> Mapping[str, Any] | None:
        """Return the answer that was stored; None where there is none, or something has changed since."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            stored = connection.execute(
                select(FindingRow.stamp, FindingRow.answer).where(FindingRow.study_id == study_id)
            ).first()
            if stored is None or stored.stamp != _stamp(connection, study_id):
                return None
            answer: Mapping[str, Any] = stored.answer
            return answer


def _stamp(connection: Connection, study_id: int) -> str:
    study = connection.execute(
        select(StudyRow.name, StudyRow.spec, StudyRow.environment_id).where(StudyRow.id == study_id)
    ).one()
    trials = connection.execute(
        select(TrialRow.state, func.count(), func.max(TrialRow.id), func.max(TrialRow.ended_at))
        .where(TrialRow.study_id == study_id)
        .group_by(TrialRow.state)
        .order_by(TrialRow.state)
    ).all()
    probes = connection.execute(
        select(func.count(), func.max(ProbeRow.id), func.max(ProbeRow.measured_at)).where(ProbeRow.study_id == study_id)
    ).all()
    visits = connection.execute(select(func.count(), func.max(VisitRow.id)).where(VisitRow.study_id == study_id)).all()
    parts = [tuple(study), *([tuple(row) for row in rows] for rows in (trials, probes, visits))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
