"""A study that bssearch has stored elsewhere, with everything: what `export --to study` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bssearch.importers.importer import WholeStudies
from bssearch.options import Option


def import_study(
    file: Annotated[Path, Option("What `bssearch export STUDY --to study` has written.", metavar="FILE")],
    *,
    name: Annotated[
        str | None,
        Option("Name of the study, where it is not in the database yet.", shown_default="the file's", flag="--as"),
    ] = None,
) -> WholeStudies:
    """Take in a study with everything, or what is new of one that is here already.

    The same file again changes nothing; that of an earlier state of the study nothing but maybe its spec, where budget,
    slots, pruner or another setting that may change has changed since.
    """
    from bssearch.storage.keeping import check_name
    from bssearch.storage.transfer.transfers import read_study

    if name is not None:
        check_name(name)
    return WholeStudies(read_study(file), name)
