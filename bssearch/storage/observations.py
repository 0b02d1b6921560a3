"""What trials leave: the observation of each evaluation, by step, and the last lines that each printed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import DatabaseError
from bssearch.records import Observation
from bssearch.storage.database import Database, patiently
from bssearch.storage.lookups import trial_id_of, trial_ids_of
from bssearch.storage.models import LogRow, ObservationRow, TrialRow
from bssearch.storage.revisions import mark_observed
from bssearch.storage.rows import from_columns, to_columns
from bssearch.storage.statements import EVALUATIONS, OBSERVATIONS, insert_if_absent

_OBSERVED = insert(ObservationRow.__table__)
_EVALUATIONS = EVALUATIONS.where(
    TrialRow.study_id == bindparam("study_id"), TrialRow.number.in_(bindparam("numbers", expanding=True))
)


class Observations(Database):
    """The part of the store that keeps observations and logs."""

    @patiently
    def append_observations(self, study: str, rows: Sequence[tuple[int, Observation]]) -> None:
        """Store observations with the numbers of their trials, all or none; for a trial that runs that is no change.

        Raises `DatabaseError` for a step twice, unless all are stored already as they are: an earlier try made it.
        """
        if not rows:
            return
        numbers = list(dict(rows))
        try:
            with self._writing() as connection:
                study_id = self._lock_study(connection, study)
                ids = trial_ids_of(connection, study, study_id, numbers)
                connection.execute(_OBSERVED, [{"trial_id": ids[number], **to_columns(one)} for number, one in rows])
                mark_observed(connection, study_id, numbers)
        except DatabaseError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            curves = self.curves(study, numbers)
            stored = {(number, one.step): one for number, curve in curves.items() for one in curve}
            if all(stored.get((number, one.step)) == one for number, one in rows):
                return  # an earlier try was committed although its connection broke
            keys = [(number, one.step) for number, one in rows]
            twice = [key for key in keys if key in stored or keys.count(key) > 1]
            if not twice:
                raise
            number, step = twice[0]
            raise DatabaseError(f"trial {number} of {study!r} already has an observation at step {step}") from error

    @patiently
    def observations(self, study: str, number: int) -> list[Observation]:
        """Return the observations of one trial by step; raise `NotFoundError` for a trial that is not."""
        with self._reading() as connection:
            trial_id_of(connection, study, self._study_id(connection, study), number)
        return self.curves(study, [number])[number]

    @patiently
    def curves(self, study: str, numbers: Collection[int]) -> dict[int, list[Observation]]:
        """Return the observations of some trials, by trial and step; a trial without any has an empty list."""
        found: dict[int, list[Observation]] = {number: [] for number in numbers}
        with self._reading() as connection:
            query = OBSERVATIONS.where(
                TrialRow.study_id == self._study_id(connection, study), TrialRow.number.in_(found)
            )
            for row in connection.execute(query).mappings():
                found[row["number"]].append(from_columns(Observation, row))
        return found

    @patiently
    def evaluations(self, study: str, numbers: Collection[int]) -> dict[int, list[tuple[float, float]]]:
        """Return (train seconds, metric) of each evaluation of some trials, by trial and step: what pruning asks of."""
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
        with self._looking() as connection:
            of = {"study_id": self._study_id(connection, study), "numbers": list(found)}
            for number, train_seconds, metric in connection.execute(_EVALUATIONS, of):
                found[number].append((train_seconds, metric))
        return found

    @patiently
    def observation_count(self, study: str) -> int:
        """Return how many observations a study has."""
        with self._reading() as connection:
            query = select(func.count()).select_from(ObservationRow).join(TrialRow)
            study_id = self._study_id(connection, study)
            return connection.execute(query.where(TrialRow.study_id == study_id)).scalar_one()

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
