"""Step times by batch size from a table or the probe's JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bssearch.errors import require
from bssearch.exchange.importers.imported_run import integer, number
from bssearch.exchange.importers.logs import table_rows
from bssearch.records import ProbeRecord
from bssearch.spec.reader import shortened

COLUMNS = ("batch_size", "step_seconds", "micro_batch_size")
SHORTEST_S, LONGEST_S = 1e-9, 1e6
SHOWN_COLUMNS, LONGEST = 8, 40


def read_step_times(path: Path) -> dict[int, ProbeRecord]:
    """Read step times. ``micro_batch_size`` defaults to the batch size. Rows with null ``step_seconds`` are skipped."""
    found: dict[int, ProbeRecord] = {}
    for line, row in table_rows(path):
        place = f"{path}:{line}"
        missing = [name for name in COLUMNS[:2] if name not in row]
        require(
            not missing,
            f"{place} has no {' and no '.join(missing)}, only "
            f"{', '.join(shortened(one, LONGEST) for one in [*row][:SHOWN_COLUMNS])}",
            hint=f"give columns {', '.join(COLUMNS)}, or the output of `bssearch probe step-time SPEC --format json`",
        )
        if row["step_seconds"] is not None:
            probe = _step_time(place, row)
            require(
                probe.batch_size not in found, f"{place}: batch_size {probe.batch_size} occurs twice; delete one row"
            )
            found[probe.batch_size] = probe
    require(found, f"{path} has no step times; add rows with batch_size and step_seconds")
    return found


def _step_time(place: str, row: Mapping[str, Any]) -> ProbeRecord:
    size = integer(str(row["batch_size"]), "batch_size", place, low=1)
    given = row.get("micro_batch_size")
    micro = size if given in (None, "") else integer(str(given), "micro_batch_size", place, low=1)
    require(size % micro == 0, f"{place}: micro_batch_size = {micro} must divide batch_size = {size}")
    seconds = number(str(row["step_seconds"]))
    require(
        SHORTEST_S <= seconds <= LONGEST_S,
        f"{place}: step_seconds = {shortened(row['step_seconds'], LONGEST)} must be a number of seconds "
        f"from {SHORTEST_S:g} to {LONGEST_S:g}",
    )
    return ProbeRecord(
        batch_size=size,
        micro_batch_size=micro,
        step_seconds=seconds,
        evaluation_seconds=None,
        steps_timed=0,
        peak_memory_bytes=None,
        eval_every_steps=None,
    )
