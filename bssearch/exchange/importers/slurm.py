"""Text logs, such as Slurm's ``slurm-*.out``, whose lines hold steps, metrics and settings in known patterns."""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from bssearch.errors import UsageError
from bssearch.exchange.importers.columns import scale
from bssearch.exchange.importers.imported_run import read_text
from bssearch.exchange.importers.logs import CLOCK, Log, LogKind
from bssearch.exchange.trial_rows import flat_row
from bssearch.records import grouped

PATTERNS = {
    "pairs": "step 100 loss 2.3 val_acc 0.91 time 12.3s, also with = or :",
    "object": '{"step": 100, "val_acc": 0.91}, in JSON or Python',
}
COUNTERS = frozenset({"step", "steps", "global_step", "train_step", "iter", "iteration", "iters", "epoch"})
_RESULT = re.compile("acc|loss|err|f1|auc|ppl|perplexity|bleu|rouge|wer|mse|mae|map|score|val|eval|test", re.IGNORECASE)
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_NAMESPACE = re.compile(r"\b(\w{1,64})=('[^']*'|\"[^\"]*\"|[^,()\s]+)")
_FLAG = re.compile(r"(?:^| )--([a-zA-Z][\w.-]*)[= ]([^ -][^ ]*|-\d[^ ]*)")
_QUALIFIER = (
    "train|training|val|valid|validation|test|eval|evaluation|dev|avg|average|mean|global|elapsed|wall|total|best|max|"
    "min|final|ema"
)
_NUMBER = r"[-+]?(?:\d+(?:,\d+)*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf)\b"
_PAIR = re.compile(
    rf"(?<![\w/.@-])(?P<name>(?:(?:{_QUALIFIER}|batch|learning|weight|world|per device):? )*[a-z][\w/.@-]{{0,63}}?)"
    rf"(?: ?[=:] ?| )\[? ?(?P<value>\d+:\d\d(?::\d\d)?(?:\.\d+)?|{_NUMBER})"
    r"(?: ?/ ?(?P<of>\d+))?(?: ?(?P<unit>%|ms|sec|seconds|s|min|h))?(?=[ ,;|)\]}]|[:.](?: |$)|$)",
    re.IGNORECASE,
)
LONGEST_LINE = 10_000  # characters


def read_file(file: Path) -> Iterator[Log]:
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    mentioned: dict[str, Any] = {}
    used: set[str] = set()
    for line in _COLORS.sub("", read_text(file)).splitlines():
        text = " ".join(line.split())[:LONGEST_LINE]
        pattern, found = "object", _object(text)
        if not found:
            pattern, found = "pairs", dict(reversed([*pairs(text)]))  # the first of a name counts
        if found.keys() & COUNTERS or (rows and any(map(_RESULT.search, found))):
            rows.append({**_clock(text), **found})
            used.add(pattern)
        elif not rows:
            settings |= {**(found if pattern == "object" else {}), **dict(_FLAG.findall(text))}
            settings |= {name: value.strip("'\"") for name, value in _NAMESPACE.findall(text) if "(" in text}
            mentioned |= found if pattern == "pairs" else {}
    if not rows:
        known = "; ".join(f"{name}, as in {example}" for name, example in PATTERNS.items())
        raise UsageError(
            f"{file} has no line with a step or epoch in a known pattern: {known}",
            hint="log a table (.csv, .jsonl) instead",
        )
    for name, values in grouped((name, value) for row in rows for name, value in row.items()).items():
        if len(set(map(str, values))) == 1:
            mentioned.setdefault(name, values[0])
    note = f"reading text lines: {' and '.join(f'{name}, as in {PATTERNS[name]}' for name in sorted(used))}"
    yield Log(origin=str(file), rows=rows, settings=settings, mentioned=mentioned, note=note)


def _read(folder: Path) -> Iterator[Log]:
    for file in sorted(folder.glob("slurm-*.out")):
        yield from read_file(file)


def _object(text: str) -> Mapping[str, Any]:
    inside = text[text.find("{") : text.rfind("}") + 1]
    for parse in (json.loads, ast.literal_eval) if inside[:1] == "{" else ():
        try:
            with warnings.catch_warnings(action="ignore"):
                found = parse(inside)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return flat_row({str(key): value for key, value in found.items()}) if isinstance(found, dict) else {}
    return {}


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and numbers in a line. A time with a unit becomes seconds."""
    for one in _PAIR.finditer(text):
        name, value, unit = re.sub(":? ", "_", one["name"]), one["value"], one["unit"] or ""
        counter = re.sub("^train(ing)?_", "", name.lower())
        is_plain = re.fullmatch(r"[-+.\deE]+", value) is not None
        if counter in COUNTERS:
            name, value = counter, value.replace(",", "")
        elif is_plain and (whole := float(one["of"] or 0)):
            value = str(float(value) / whole)
        elif unit and unit != "%" and is_plain:
            value = str(float(value) * scale(unit))
        else:
            value += unit
        yield name, value


def _clock(text: str) -> dict[str, float]:
    if (stamp := _STAMP.match(text)) is None:
        return {}
    try:
        return {CLOCK: datetime.fromisoformat(f"{stamp[1]}+00:00").timestamp() + float(f"0.{stamp[2] or 0}")}
    except ValueError:
        return {}


SLURM = LogKind(("slurm-*.out",), _read)
