"""Whole studies out of a store and into it. Its modules are imported when used: most commands need none of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import select

from bssearch.storage.database import Database
from bssearch.storage.models import StudyRow

if TYPE_CHECKING:
    from bssearch.storage.transfer.joining import Joined
    from bssearch.storage.transfer.study_copy import Copy


class Transfers(Database):
    """The part of the store that gives and takes whole studies."""

    def write_study(self, study: str, path: Path) -> Sequence[int]:
        """Write a study with everything into a file; return the numbers of its running trials, which are left out.

        The file shows one state of the database, and appears whole or not at all. Raises `NotFoundError`, `UsageError`
        if the file cannot be written, `DatabaseError` for rows that bssearch cannot have stored.
        """
        from bssearch.storage.transfer.study_file import write_study

        (copy,) = self.copy_studies([study], self.masked_url)
        write_study(path, copy)
        return copy.running

    def copy_studies(self, names: Collection[str] | None, source: str) -> list[Copy]:
        """Read some studies, or all that are not archived, without running trials, in one state of the database.

        ``source`` names this database in messages. Raises `NotFoundError`, and `DatabaseError` for rows that bssearch
        cannot have stored.
        """
        from bssearch.storage.transfer.study_copy import read_copy

        with self._reading() as connection:
            shown = select(StudyRow.name).where(StudyRow.archived_at.is_(None)).order_by(StudyRow.id)
            found = connection.scalars(shown).all() if names is None else names
            return [read_copy(connection, self._study_id(connection, name), source) for name in found]

    def join_studies(self, copies: Sequence[Copy], *, name: str | None = None, dry_run: bool = False) -> list[Joined]:
        """Insert what this database lacks of some studies, in one transaction; return what was done to each.

        The first study is called ``name`` if it is new here. With ``dry_run`` nothing is stored. Raises `UsageError` if
        a copy contradicts this database (`bssearch.storage.transfer.joining`), or another study has its name.
        """
        from bssearch.storage.transfer.joining import join, wait_for_others

        def once() -> list[Joined]:
            with self._writing() as connection:
                wait_for_others(connection)
                joined = [join(connection, copy, None if index else name) for index, copy in enumerate(copies)]
                if dry_run:
                    connection.rollback()
            return joined

        return self._patience.run(once)
