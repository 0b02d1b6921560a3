"""Text of a file as values: whole files, rows of CSV, whole numbers, parameters; errors name line, value and bound."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import ParameterValue

LARGEST = 2**31 - 1
"""The largest whole number that every database's integer column holds."""

MOST_BYTES = 2**26
"""Bytes of a file of runs at most: a choice."""


def read_text(path: Path) -> str:
    """Return a file's text; raise `NotFoundError` where it is not there, `UsageError` where it is no UTF-8 text."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no file {str(path)!r}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES:,} bytes", hint="import it as several files")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line} is not UTF-8 text: byte 0x{data[error.start]:02x}") from None


def integer(text: str, label: str, origin: str, *, low: int, high: int = LARGEST) -> int:
    """Return an integer, also one written as ``120.0``; raise `UsageError` where it is none or out of its bounds."""
    value = number(text)
    try:
        found = int(text) if "_" not in text else None
    except ValueError:
        found = int(value) if value.is_integer() else None
    if found is None or not low <= found <= high:
        raise UsageError(f"{label} = {text!r} must be an integer in [{low}, {high}] ({origin})")
    return found


def parameter_value(text: str, label: str, origin: str) -> ParameterValue:
    """Return what a text stands for: a boolean (true, false), a number, or itself; infinities and NaN are refused."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = number(text)
    if math.isnan(value) and text.lower().lstrip("+-") != "nan":
        return text
    if not math.isfinite(value):
        raise UsageError(
            f"{label} = {text!r} must be a finite number or a text ({origin})", hint="leave unknown cells empty"
        )
    try:
        return int(text)
    except ValueError:
        return value


def csv_rows(text: str, source: str, *, skipinitialspace: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank, with the line on which it begins; raise `UsageError` for what is no CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=skipinitialspace, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"{source}:{line} is not valid CSV: {error}") from None
        if cells is None:
            return
        if cells:
            yield line, cells


def number(text: str) -> float:
    """Return the number that a text is, NaN where it is none; digits grouped by underscores are none."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan
