"""An example of one exporter, as a package of your own may have it."""

from pathlib import Path

from bssearch.exchange.exporters.exports import Exported
from bssearch.storage.repository import Store


def counts(store: Store, name: str, file: str | None = None) -> Exported:
    """Write the number of a study's trials."""
    path = Path(file or f"{name}.txt")
    path.write_text(f"{len(store.trials.of(name))}\n")
    return Exported([str(path)])
