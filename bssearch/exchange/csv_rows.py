"""CSV rows without spreadsheet formulas."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

from bssearch.records.text import visible

Row = Mapping[str, Any]
# First characters of formulas (https://owasp.org/www-community/attacks/CSV_Injection).
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(file: TextIO, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write a header and rows, without unknown columns; lists and mappings as JSON."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_csv_cell, columns))
    for row in rows:
        writer.writerow(_csv_cell(row.get(column)) for column in columns)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, datetime):
        return value.isoformat()
    if not isinstance(value, str):
        return value
    text = visible(value.replace("\r\n", "\n").replace("\r", "\n"))  # the csv module does not quote \r
    return f"'{text}" if value.startswith(FORMULA) else text
