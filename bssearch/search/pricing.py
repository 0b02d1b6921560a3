"""Step times from a file, and a stored study at them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bssearch.analysis.answer import Answer
from bssearch.analysis.reprice import reprice
from bssearch.errors import UsageError
from bssearch.records import ProbeRecord
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

LARGEST = 2**31 - 1


def price(store: Store, study: str, step_times: Path, device_name: str | None = None) -> Answer:
    """Return the answer of a stored study with the step times of a file; see `reprice`.

    The device's name is by default the file's. Raises what `read_step_times` and `reprice` raise, and `NotFoundError`.
    """
    record = store.study(study)
    times = read_step_times(step_times)
    return reprice(
        record, StudySpec.model_validate(record.spec), store.trials(study), times, device_name or step_times.stem
    )


def read_step_times(path: Path) -> dict[int, ProbeRecord]:
    """Read step times by batch size: CSV with columns batch_size and step_seconds, or what the probe prints as JSON.

    ``micro_batch_size`` may be given too (default: the batch size). Raises `UsageError` naming file, row, value, bound.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--step-times {path} cannot be read: {reason}") from None
    rows = list(_json_rows(path, text) if text.lstrip()[:1] in {"{", "["} else _csv_rows(path, text))
    if not rows:
        raise UsageError(f"{path} holds no step times")
    found: dict[int, ProbeRecord] = {}
    for place, row in rows:
        probe = _step_time(place, row)
        if probe.batch_size in found:
            raise UsageError(f"{place}: batch_size {probe.batch_size} is there twice")
        found[probe.batch_size] = probe
    return found


def _csv_rows(path: Path, text: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    missing = {"batch_size", "step_seconds"} - set(reader.fieldnames or ())
    if missing:
        there = ", ".join(reader.fieldnames or ["none"])
        raise UsageError(f"{path} has no column {' and no '.join(sorted(missing))}: it has {there}")
    for row in reader:
        yield f"{path}:{reader.line_num}", row


def _json_rows(path: Path, text: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno} is no JSON: {error.msg}") from None
    rows = document.get("probes") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise UsageError(
            f"{path} has no list 'probes': what `bssearch probe step-time SPEC --format json` prints has one"
        )
    for number, row in enumerate(rows):
        place = f"{path}, probe {number + 1}"
        if not isinstance(row, dict):
            raise UsageError(f"{place}: {row!r} is no object with batch_size and step_seconds")
        if row.get("step_seconds") is not None:
            yield place, row


def _step_time(place: str, row: Mapping[str, Any]) -> ProbeRecord:
    size = _count(place, "batch_size", row.get("batch_size"))
    given = row.get("micro_batch_size")
    micro = size if given in (None, "") else _count(place, "micro_batch_size", given)
    if size % micro:
        raise UsageError(f"{place}: micro_batch_size = {micro} must divide batch_size = {size}")
    return ProbeRecord(
        batch_size=size,
        micro_batch_size=micro,
        step_seconds=_seconds(place, row.get("step_seconds")),
        evaluation_seconds=None,
        steps_timed=0,
        peak_memory_bytes=None,
        eval_every_steps=None,
    )


def _count(place: str, name: str, value: Any) -> int:
    number = _number(value)
    if number is None or number != int(number) or not 1 <= number <= LARGEST:
        raise UsageError(f"{place}: {name} = {value!r} must be a whole number in [1, {LARGEST}]")
    return int(number)


def _seconds(place: str, value: Any) -> float:
    number = _number(value)
    if number is None or number <= 0:
        raise UsageError(f"{place}: step_seconds = {value!r} must be a finite number of seconds > 0")
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
