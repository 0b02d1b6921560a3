"""Step times by batch size from CSV or the probe's JSON."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any

from bssearch.errors import UsageError, require
from bssearch.exchange.importers.imported_run import csv_rows, integer, number, parsed_json, read_text
from bssearch.records import ProbeRecord

COLUMNS = ("batch_size", "step_seconds", "micro_batch_size")
REQUIRED = frozenset(COLUMNS[:2])
SHORTEST_S, LONGEST_S = 1e-9, 1e6

SHOWN_COLUMNS = 8
LONGEST_INTEGER = 300  # Digits that fit a float

_brief = Repr()
_brief.maxstring = 40


def read_step_times(path: Path) -> dict[int, ProbeRecord]:
    """Read CSV (batch_size, step_seconds) or the probe's JSON; raise `UsageError` with the place.

    ``micro_batch_size`` defaults to the batch size.
    """
    text = read_text(path)
    rows = list(_json_rows(path, text) if text.lstrip()[:1] in {"{", "["} else _csv_rows(path, text))
    require(rows, f"{path} has no step times; add rows with batch_size and step_seconds")
    found: dict[int, ProbeRecord] = {}
    for place, row in rows:
        probe = _step_time(place, row)
        if probe.batch_size in found:
            raise UsageError(f"{place}: batch_size {probe.batch_size} occurs twice; delete one")
        found[probe.batch_size] = probe
    return found


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = ((f"{path}:{line}", cells) for line, cells in csv_rows(text, str(path), skipinitialspace=True))
    columns = [name.strip() for name in next(rows, ("", []))[1]]
    if missing := REQUIRED - {*columns}:
        there = ", ".join(map(_brief.repr, columns[:SHOWN_COLUMNS])) or "none"
        raise UsageError(
            f"{path} has no column {' and no '.join(sorted(missing))}: it has {there}",
            hint=f"the columns are {', '.join(COLUMNS)}, separated by commas",
        )
    for place, cells in rows:
        if len(cells) > len(columns):
            raise UsageError(
                f"{place}: the row has {len(cells)} cells, but the header has {len(columns)} columns",
                hint="commas separate columns; decimals take a point",
            )
        yield place, dict(zip(columns, cells, strict=False))


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    document = parsed_json(
        text, str(path), parse_int=lambda digits: int(digits) if len(digits) <= LONGEST_INTEGER else digits
    )
    rows = document.get("probes") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise UsageError(
            f"{path} has no list 'probes'; expected the output of `bssearch probe step-time SPEC --format json`"
        )
    for count, row in enumerate(rows, start=1):
        place = f"{path}, probe {count}"
        if not isinstance(row, dict):
            raise UsageError(f"{place}: {_brief.repr(row)} is not an object with batch_size and step_seconds")
        if row.get("step_seconds") is not None:
            yield place, row


def _step_time(place: str, row: Mapping[str, Any]) -> ProbeRecord:
    size = integer(str(row.get("batch_size")), "batch_size", place, low=1)
    given = row.get("micro_batch_size")
    micro = size if given in (None, "") else integer(str(given), "micro_batch_size", place, low=1)
    require(size % micro == 0, f"{place}: micro_batch_size = {micro} must divide batch_size = {size}")
    return ProbeRecord(
        batch_size=size,
        micro_batch_size=micro,
        step_seconds=_seconds(place, row.get("step_seconds")),
        evaluation_seconds=None,
        steps_timed=0,
        peak_memory_bytes=None,
        eval_every_steps=None,
    )


def _seconds(place: str, value: Any) -> float:
    seconds = number(str(value))
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise UsageError(
            f"{place}: step_seconds = {_brief.repr(value)} must be a finite number of seconds > 0, "
            f"from {SHORTEST_S:g} to {LONGEST_S:g}"
        )
    return seconds
