"""An example of one importer, as a package of your own may have it."""

import csv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from bssearch.exchange.importers.imported_run import Studies, StudyName
from bssearch.exchange.importers.runs import import_runs
from bssearch.registry import Option


def lines(
    file: Annotated[Path, Option("A batch size and its seconds a line.", metavar="FILE.txt")],
    *,
    name: StudyName = None,
    steps: Annotated[int, Option("Steps of each run.", min=1)] = 10,
) -> Studies:
    with TemporaryDirectory() as folder, (Path(folder) / "runs.csv").open("w+", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["batch_size", "train_seconds", "reached", "steps", "final_metric"])
        rows.writerows([*line.split(), "true", steps, 1.0] for line in file.read_text().splitlines())
        table.flush()
        return import_runs(Path(table.name), name=name or file.stem)
