"""Training logs of other tools, found in files and folders: tables of evaluations, and what each tool writes for a run.

Nothing in a log is executed: of pickles and YAML only plain values are read.
"""

import itertools
import json
import math
import pickletools
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bssearch.errors import NotFoundError, UsageError
from bssearch.exchange.importers.columns import fraction, seconds
from bssearch.exchange.importers.imported_run import MOST_BYTES, csv_rows, number, read_text
from bssearch.exchange.trial_rows import flat_row
from bssearch.spec.reader import TAGS, Loader

MOST_LOGS = 10_000  # runs of one import

LARGEST_FLOAT = int(sys.float_info.max)  # JSON's integers have no bound

SPREAD_SECONDS = "train_runtime less evaluations, spread over the steps (too short after a resume)"
"""Seconds of a Trainer's training, which its log tells as a whole and of the last launch alone."""

CLOCK = "_timestamp"
"""Seconds since 1970, as Weights & Biases calls them; other tools' clocks get this name."""

RUN_NAMES = ("run", "run_id", "run_name", "trial", "trial_id", "run id", "run name", "experiment", "name", "id")
"""Columns of a table that tell runs apart."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A run's log: ``rows`` of logged values by name, in order, and ``settings``, its hyperparameters by name.

    ``first_step`` is the number that the tool gives the first optimizer step.
    """

    origin: str
    rows: Sequence[Row]
    settings: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 1


def logs_in(places: Iterable[Path], run: str | None = None) -> list[Log]:
    """Logs of files and folders, in the order of their names; ``run`` names a table's column of runs."""
    found: list[Log] = []
    for place in dict.fromkeys(one.resolve() for one in places):
        if not place.exists():
            raise NotFoundError(f"no file or folder {str(place)!r}")
        if not place.is_dir() and not place.is_file():
            raise UsageError(f"{place} is neither a file nor a folder")
        here = list(_of_folder(place) if place.is_dir() else _of_file(place, run))
        if not here:
            raise UsageError(
                f"{place} has no training log",
                hint=f"a log is a table (.csv, .tsv, .jsonl) or one of {', '.join(sorted(_FOLDERS))}",
            )
        known = {log.origin for log in found}
        found += [log for log in here if log.origin not in known]  # a folder may hold another one
        if len(found) > MOST_LOGS:
            raise UsageError(f"more than {MOST_LOGS:,} runs in {place}", hint="import them as several studies")
    return found


def _of_folder(folder: Path) -> Iterator[Log]:
    if known := [(name, read) for name, read in _FOLDERS.items() if any(folder.glob(name))]:
        yield from known[0][1](folder)
        return
    for inner in sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()):
        yield from _of_folder(inner)
    for file in sorted(folder.iterdir()):
        if file.is_file() and _SUFFIX.search(file.name):
            yield from _of_file(file, None)


_SUFFIX = re.compile(r"\.(?:csv|tsv|jsonl)(?:\.gz)?$")


def _lightning(folder: Path) -> Iterator[Log]:
    # A CSVLogger's folder. Lightning counts the steps from 0.
    rows = [row for _, row in _table(folder / "metrics.csv")]
    yield Log(origin=str(folder), rows=rows, settings=_yaml(folder / "hparams.yaml"), first_step=0)


def _trainer(folder: Path) -> Iterator[Log]:
    # The Trainer of transformers, in its output folder or in the newest checkpoint.
    files = [*folder.glob("trainer_state.json"), *sorted(folder.glob("checkpoint-*/trainer_state.json"))]
    states = [found for one in files if isinstance(found := _json(one), dict)]
    state = max(states, key=lambda one: number_in(one.get("global_step")), default={})
    logged = state.get("log_history")
    history = [one for one in logged if isinstance(one, dict)] if isinstance(logged, list) else []
    rates = [one["learning_rate"] for one in history if isinstance(one.get("learning_rate"), int | float)]
    settings: dict[str, Any] = {"per_device_train_batch_size": state.get("train_batch_size")}
    if rates:
        settings["learning_rate"] = max(rates)
    for arguments in sorted(folder.glob("**/training_args.bin"))[-1:]:
        settings |= _pickled(arguments)
    yield Log(origin=str(folder), rows=[*_with_seconds(history)], settings=settings)


_ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay", "seed"),
    *("warmup_steps", "warmup_ratio", "label_smoothing_factor", "max_grad_norm"),
)
_NO_VALUE = ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")


def _pickled(file: Path) -> dict[str, Any]:
    """Plain numbers by the names of `_ARGUMENTS` in a pickle of `torch.save`, whose code is not run."""
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            with archive.open(name) as opened:
                codes = [
                    argument
                    for code, argument, _ in pickletools.genops(opened.read(MOST_BYTES))
                    if code.name not in _NO_VALUE
                ]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return {}  # of another version
    pairs = itertools.pairwise(codes)
    return {key: value for key, value in pairs if key in _ARGUMENTS and isinstance(value, int | float)}


def _with_seconds(history: Sequence[dict[str, Any]]) -> Iterator[Row]:
    # A Trainer logs the seconds of the whole training, evaluations included, and those of each evaluation.
    def total(name: str) -> float:
        return math.fsum(one for row in history if not math.isnan(one := number_in(row.get(name))))

    steps = max((one for row in history if not math.isnan(one := number_in(row.get("step")))), default=0.0)
    seconds = total("train_runtime") - total("eval_runtime")
    for row in history:
        yield {**row, SPREAD_SECONDS: seconds / steps * number_in(row.get("step"))} if steps and seconds > 0 else row


def _ray(folder: Path) -> Iterator[Log]:
    # Ray Tune's folder of a trial: a JSON object per report
    rows = [row for _, row in _json_lines(read_text(folder / "result.json"), str(folder / "result.json"))]
    settings = _flat(rows[-1].get("config") or {}) if rows else {}
    parameters = folder / "params.json"
    settings = settings or (_flat(_json(parameters)) if parameters.exists() else {})
    yield Log(origin=str(folder), rows=[_flat(one) for one in rows], settings=settings)


def _mlflow(folder: Path) -> Iterator[Log]:
    # A run's folder in MLflow's file store: a file per parameter, and per metric a line of time, value and step
    settings = {one.name: read_text(one).strip() for one in sorted((folder / "params").glob("*")) if one.is_file()}
    rows = []
    for file in sorted((folder / "metrics").glob("**/*")):
        name = file.relative_to(folder / "metrics").as_posix()
        for line in read_text(file).splitlines() if file.is_file() else ():
            time, value, step = (*line.split(), "", "", "")[:3]
            rows.append({"step": step, CLOCK: number(time) / 1000, name: value})
    yield Log(origin=str(folder), rows=rows, settings=settings)


def _tensorboard(folder: Path) -> Iterator[Log]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UsageError(
            f"{folder} holds TensorBoard's events, and tensorboard is not installed", hint="pip install tensorboard"
        ) from None
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    by_step: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        for one in events.Scalars(tag):
            by_step.setdefault(one.step, {"step": one.step, CLOCK: one.wall_time})[tag] = one.value
    rows = [by_step[step] for step in sorted(by_step)]
    settings = _yaml(folder / "hparams.yaml")  # of Lightning
    yield Log(origin=str(folder), rows=rows, settings=settings, first_step=0 if settings else 1)


_FOLDERS: dict[str, Callable[[Path], Iterator[Log]]] = {
    "metrics.csv": _lightning,
    "trainer_state.json": _trainer,
    "checkpoint-*/trainer_state.json": _trainer,
    "result.json": _ray,
    "metrics/*": _mlflow,
    "events.out.tfevents.*": _tensorboard,
}


def _of_file(file: Path, run: str | None) -> Iterator[Log]:
    if file.name == "metrics.csv" and (file.parent / "hparams.yaml").exists():
        yield from _lightning(file.parent)
        return
    by_run: dict[str, list[tuple[int, Row]]] = {}
    column = None
    for line, row in _table(file):
        if not by_run:
            column = run if run is not None else next((one for one in row if one.lower() in RUN_NAMES), None)
            if run is not None and run not in row:
                raise UsageError(f"--run {run}: no column {run!r} in {file}; there are {', '.join(row)}")
        by_run.setdefault(str(row.get(column, "")) if column else "", []).append((line, row))
    for name, rows in by_run.items():
        origin = f"{file}:{rows[0][0]}" + (f" ({column} {name})" if column else "")
        yield Log(origin=origin, rows=[row for _, row in rows], settings=_constant([row for _, row in rows]))


def _constant(rows: Sequence[Row]) -> dict[str, Any]:
    # Cells that every row has, always the same
    return {
        name: value
        for name, value in rows[0].items()
        if value not in (None, "") and all(name in row and row[name] == value for row in rows)
    }


def _table(file: Path) -> Iterator[tuple[int, Row]]:
    text = read_text(file)
    if text.lstrip()[:1] in ("{", "["):
        yield from _json_lines(text, str(file))
        return
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv_rows(text, str(file), delimiter=separator)
    _, header = next(rows, (1, []))
    names = [cell.strip() for cell in header]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UsageError(f"the column {twice[0]!r} is there twice ({file}:1)")
    has_commas = False
    if separator != ",":  # such tables may have decimal commas, and points between thousands
        found = list(rows)
        has_commas = any(_DECIMAL.fullmatch(cell.strip()) for _, cells in found for cell in cells)
        rows = iter(found)
    for line, cells in rows:
        if len(cells) != len(names):
            raise UsageError(f"the row has {len(cells)} cells, the header {len(names)} ({file}:{line})")
        texts = [sys.intern(cell.strip()) for cell in cells]  # most cells repeat others
        if has_commas:
            texts = [
                one.replace(".", "").replace(",", ".") if _DECIMAL.fullmatch(one) or _THOUSANDS.fullmatch(one) else one
                for one in texts
            ]
        yield line, dict(zip(names, texts, strict=True))


_DECIMAL = re.compile(r"[+-]?(?:\d{1,3}(?:\.\d{3})+|\d+)?,\d+(?:[eE][+-]?\d+)?%?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+")


def _json_lines(text: str, origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if text.lstrip()[:1] == "[":
        found = _parsed(text, origin)
        rows = list(enumerate(found if isinstance(found, list) else [], 1))
    else:
        rows = [
            (line, _parsed(one, f"{origin}:{line}")) for line, one in enumerate(text.splitlines(), 1) if one.strip()
        ]
    for line, row in rows:
        if not isinstance(row, dict):
            raise UsageError(f"{origin}:{line} must be a JSON object, the values logged at one step")
        yield line, row


def _json(file: Path) -> Any:
    return _parsed(read_text(file), str(file))


def _parsed(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not JSON: {error}") from None


class _PlainLoader(Loader):
    """Reads plain values; an object of another kind, such as one of Python, becomes None and is not made."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return super().construct_object(node, deep) if node.tag in TAGS else None


def _yaml(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = yaml.load(read_text(file), _PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())[:200]}") from None
    return _flat(found)


def _flat(found: Any) -> dict[str, Any]:
    return flat_row(found) if isinstance(found, Mapping) else {}


def number_in(value: Any) -> float:
    """Number of a logged value, also of ``97%`` and ``0:01:30``; NaN if not a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= LARGEST_FLOAT else math.inf if value > 0 else -math.inf
    if not isinstance(value, str) or not value:
        return math.nan
    if (plain := number(value)) == plain:
        return plain
    found = fraction(value)
    return seconds(value) if math.isnan(found) else found
