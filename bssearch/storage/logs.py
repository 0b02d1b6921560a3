"""What the workers of trials printed last."""

from __future__ import annotations

from sqlalchemy import select, update

from bssearch.storage.database import Database, patiently
from bssearch.storage.lookups import trial_id_of
from bssearch.storage.models import LogRow
from bssearch.storage.statements import insert_if_absent


class Logs(Database):
    """The part of the store that keeps logs."""

    @patiently
    def save_log(self, study: str, number: int, text: str) -> None:
        """Store the last lines of a trial's worker, in the place of earlier ones."""
        with self._writing() as connection:
            trial_id = trial_id_of(connection, study, self._study_id(connection, study), number)
            if not insert_if_absent(connection, LogRow, {"trial_id": trial_id, "text": text}):
                connection.execute(update(LogRow).where(LogRow.trial_id == trial_id).values(text=text))

    @patiently
    def log(self, study: str, number: int) -> str | None:
        """Return the last lines of a trial's worker, None where none were stored."""
        with self._reading() as connection:
            trial_id = trial_id_of(connection, study, self._study_id(connection, study), number)
            return connection.scalar(select(LogRow.text).where(LogRow.trial_id == trial_id))
