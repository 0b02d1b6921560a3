"""A study with everything in one file, to be taken into another database with `import study`."""

from __future__ import annotations

from pathlib import Path

from bssearch.commands.transfer.exported import Exported
from bssearch.storage.repository import Store
from bssearch.storage.transfer.study_file import SUFFIX


def export_study(store: Store, name: str, file: str | None = None) -> Exported:
    """Write a whole study into one file, by default ``NAME.bssearch.jsonl.gz``.

    The same study makes the same bytes. Running trials are left out: their leases belong to this database. Raises what
    `Store.write_study` raises.
    """
    path = Path(file or f"{name}{SUFFIX}")
    running = store.write_study(name, path)
    note = f"note: left out {len(running)} running trials; export the study again when they have ended"
    return Exported([str(path)], [note] if running else [])
