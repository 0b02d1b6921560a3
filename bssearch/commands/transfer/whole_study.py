"""A study with everything in one file, to be taken into another database with `import study`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bssearch.commands.transfer.exported import Exported
from bssearch.storage.repository import Store
from bssearch.storage.transfer.study_file import SUFFIX


def export_study(store: Store, name: str, file: str | None = None) -> Exported:
    """Write a study with everything into one file, ``NAME.bssearch.jsonl.gz`` where none is given.

    The same study makes the same bytes. Trials that run are left out, since their leases are this database's. Raises
    what `Store.write_study` raises.
    """
    path = Path(file or f"{name}{SUFFIX}")
    running = store.write_study(name, path)
    left_out = f"note: {_trials(running)}, left out: export the study again afterwards, and import that too"
    return Exported([str(path)], [left_out] if running else [])


def _trials(numbers: Sequence[int]) -> str:
    return f"trial {numbers[0]} runs" if len(numbers) == 1 else f"{len(numbers)} trials run"
