"""Whole studies out of a store and into it. What that takes is imported as it is used: most commands do not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from bssearch.errors import UsageError
from bssearch.storage.database import Database
from bssearch.storage.models import StudyRow

if TYPE_CHECKING:
    from bssearch.storage.transfer.joining import Joined
    from bssearch.storage.transfer.staging import Staged, Staging
    from bssearch.storage.transfer.study_file import Line


class _NothingIsStored(Exception):  # noqa: N818 - it ends a transaction, and is no failure
    """The end of a transaction that only tells what it would do."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """Studies that have been read and checked, to be joined with those of a database; close their ``staging`` after."""

    staging: Staging
    studies: Sequence[Staged]

    def close(self) -> None:
        """Forget them."""
        self.staging.close()


class Transfers(Database):
    """The part of the store that gives and takes whole studies."""

    def write_study(self, study: str, path: Path) -> Sequence[int]:
        """Write a study with everything into a file, and return the numbers of its trials that run: they are left out.

        The file is of one state of the database, and appears whole or not at all. Raises `NotFoundError`, `UsageError`
        where it cannot be written, `DatabaseError` for rows that bssearch has not stored so.
        """
        from bssearch.storage.transfer.rows import counts, running, travelling
        from bssearch.storage.transfer.study_file import write_study

        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            write_study(path, study, counts(connection, study_id), travelling(connection, study_id, study))
            return running(connection, study_id)

    def stage_studies(self, names: Collection[str] | None, source: str) -> tuple[Incoming, dict[str, Sequence[int]]]:
        """Read studies, those named or all that are not archived, to be joined with another database's.

        ``source`` is what messages call this database. Returns with the studies the numbers of the trials of each that
        run, and so stay here. Raises `NotFoundError` for a name that is not there, else what `write_study` raises.
        """
        from bssearch.storage.transfer.rows import running
        from bssearch.storage.transfer.staging import Staging

        staging = Staging()
        try:
            with self._reading() as connection:
                left_out, staged = {}, []
                for name in self._names(connection) if names is None else dict.fromkeys(names):
                    study_id = self._study_id(connection, name)
                    staged.append(staging.add(source, self._lines(connection, study_id, name, source)))
                    left_out[name] = running(connection, study_id)
            return Incoming(staging, staged), left_out
        except BaseException:
            staging.close()
            raise

    def join_studies(self, incoming: Incoming, *, name: str | None = None) -> list[Joined]:
        """Join studies with those of this database, all or none, and return what became of each.

        The first one is called ``name`` where it is new here; one that is here keeps its name. Raises `UsageError` for
        what contradicts (`bssearch.storage.transfer.rules`), and where another study has the name.
        """
        return self._join_all([incoming], name, dry_run=False)

    def try_joining(self, sources: Sequence[Incoming]) -> list[Joined]:
        """Return what would become of the studies of several sources, joined one after the other; nothing is stored.

        Raises what `join_studies` would.
        """
        return self._join_all(sources, None, dry_run=True)

    def _join_all(self, sources: Sequence[Incoming], name: str | None, *, dry_run: bool) -> list[Joined]:
        from bssearch.storage.transfer.joining import join, wait_for_others

        studies = [(one.staging, staged) for one in sources for staged in one.studies]

        def once() -> list[Joined]:
            done: list[Joined] = []
            try:
                with self._writing() as connection:
                    wait_for_others(connection)
                    for number, (staging, staged) in enumerate(studies):
                        done.append(join(connection, staging, staged, name if number == 0 else None))
                    if dry_run:
                        raise _NothingIsStored
            except _NothingIsStored:
                pass
            return done

        return self._patience.run(once)

    def _lines(self, connection: Connection, study_id: int, name: str, source: str) -> Iterator[Line]:
        from bssearch.storage.transfer.rows import travelling
        from bssearch.storage.transfer.study_file import Line

        for kind, row in travelling(connection, study_id, name):
            yield Line(f"study {name!r} of {source}", kind, row)

    def _names(self, connection: Connection) -> list[str]:
        query = select(StudyRow.name).where(StudyRow.archived_at.is_(None)).order_by(StudyRow.id)
        return list(connection.scalars(query))


def read_study(path: Path) -> Incoming:
    """Read a file that `Transfers.write_study` has written.

    Raises `NotFoundError` where there is none, and `UsageError` that names the line for anything else than such a file.
    """
    from bssearch.storage.transfer.layout import shown
    from bssearch.storage.transfer.staging import Staging
    from bssearch.storage.transfer.study_file import StudyFile

    file, staging = StudyFile(path), Staging()
    try:
        staged = staging.add(str(path), file.lines(), complete=file.header.is_complete)
        if staged.name != file.header.study:
            raise UsageError(f"{path}, line 1: study = {shown(file.header.study)} is not its row's, {staged.name!r}")
        return Incoming(staging, [staged])
    except BaseException:
        staging.close()
        raise
    finally:
        file.close()
