"""Where the logs of an executor's slots lie: in a folder that is kept, or in one that goes with the executor."""

from __future__ import annotations

import tempfile
from pathlib import Path


class LogFolder:
    """A folder of logs, one file per slot; without a ``folder`` it is a temporary one, and nothing of it is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.is_kept = folder is not None
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="bssearch-logs-", ignore_cleanup_errors=True)
            folder = Path(self._temporary.name)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def file_of(self, slot: int) -> Path:
        """Return the log of a slot."""
        return self._folder / f"slot-{slot}.log"

    def close(self) -> None:
        """Remove a temporary folder; a second time does nothing."""
        if self._temporary is not None:
            self._temporary.cleanup()
