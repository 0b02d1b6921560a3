"""An example of one kind of log, as a package of your own may have it."""

from collections.abc import Iterator
from pathlib import Path

from bssearch.exchange.importers.logs import Log, LogKind


def read(folder: Path) -> Iterator[Log]:
    """Yield the log of a file with a batch size, and an accuracy for each step."""
    size, *accuracies = (folder / "accuracy.curve").read_text().split()
    rows = [{"step": step, "val_acc": float(one)} for step, one in enumerate(accuracies, 1)]
    yield Log(origin=str(folder), rows=rows, settings={"batch_size": size})


CURVE = LogKind(("*.curve",), read)
