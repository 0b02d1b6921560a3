"""Training logs of other tools: tables of evaluations, and the files of a run.

bssearch runs no code in a log, and reads only plain values from pickles and YAML.
"""

import itertools
import json
import math
import pickletools
import re
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from bssearch import registry
from bssearch.errors import NotFoundError, UsageError, require
from bssearch.exchange.importers.columns import fraction, seconds
from bssearch.exchange.importers.imported_run import MOST_BYTES, csv_rows, number, parsed_json, read_text
from bssearch.exchange.trial_rows import flat_row
from bssearch.records import grouped
from bssearch.records.text import plural
from bssearch.spec.reader import TAGS, Loader

MOST_LOGS = 10_000  # runs of one import

DAMAGED = "copy the log again from its source, or export the run as a table (.csv, .jsonl)"

LARGEST_FLOAT = int(sys.float_info.max)  # JSON's integers have no bound

# Seconds of a Trainer's steps; the Trainer's log has only the total of the last launch.
SPREAD_SECONDS = "train_runtime minus evaluations, spread over the steps (too short after a resume)"

CLOCK = "_timestamp"  # Weights & Biases' name of the seconds since 1970, also given to other tools' clocks

# Columns of a table that name runs
RUN_NAMES = frozenset(
    {"run", "run_id", "run_name", "trial", "trial_id", "run id", "run name", "experiment", "exp", "name", "id"}
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A run's log. ``rows`` hold logged values by name, and ``settings`` hold hyperparameters by name.

    ``first_step`` is the number that the tool gives the first optimizer step. ``mentioned`` holds values from a text
    log, which count only under a setting's usual name.
    """

    origin: str
    rows: Sequence[Row]
    settings: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 1
    mentioned: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class LogKind:
    """A tool's logs, in folders with a file that matches one of ``patterns``.

    If ``has_choices``, ``read`` also takes the name of an experiment or workload, or "".
    """

    patterns: tuple[str, ...]
    read: Callable[..., Iterator[Log]]
    has_choices: bool = False

    def __call__(self, folder: Path, choice: str = "") -> Iterator[Log]:
        require(self.has_choices or not choice, f"{folder} has no experiment or workload {choice!r}; omit #{choice}")
        return self.read(folder, choice) if self.has_choices else self.read(folder)


def logs_in(places: Iterable[str], run: str | None = None) -> list[Log]:
    """Return the logs at files, folders and URLs. ``run`` is the column of a table that names runs."""
    found: list[Log] = []
    for place in dict.fromkeys(one if "://" in one else str(Path(one).resolve()) for one in places):
        here = list(_of_place(place, run)) or [
            *_texts(sorted(one for one in Path(place).rglob("*.*") if _is_text(one)))
        ]
        if not here:
            raise UsageError(
                f"{place} has no training log",
                hint="name a table (.csv, .tsv, .jsonl), or a folder with a log such as "
                + ", ".join(sorted(one for kind in _kinds() for one in kind.patterns)),
            )
        known = {log.origin for log in found}
        found += [log for log in here if log.origin not in known]  # a folder may hold another folder with logs
        require(
            len(found) <= MOST_LOGS,
            f"the import has more than {MOST_LOGS:,} runs ({place})",
            hint="import the runs as several studies",
        )
    return found


def _of_place(place: str, run: str | None) -> Iterator[Log]:
    path, choice = Path(place), ""
    if "://" in place:
        return _mlflow_server(place) if place.startswith("http") else _mlflow_database(place)
    if not path.exists():
        before, _, choice = place.partition("#")
        path = Path(before)
    require(path.exists(), f"no file or folder {place!r}; check the path", error=NotFoundError)
    require(path.is_dir() or path.is_file(), f"{place} is neither a file nor a folder; name a file or folder")
    return _of_folder(path, choice) if path.is_dir() else _of_file(path, run, choice)


def _kinds() -> list[LogKind]:
    return [registry.load("logs", name) for name in registry.names("logs")]


def _of_folder(folder: Path, choice: str = "") -> Iterator[Log]:
    for kind in _kinds():
        if any(any(folder.glob(name)) for name in kind.patterns):
            yield from kind(folder, choice)
            return
    require(not choice, f"{folder} has no experiment or workload {choice!r}; omit #{choice}")
    for inner in sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()):
        if not inner.name.startswith("."):  # MLflow keeps deleted experiments in .trash
            yield from _of_folder(inner)
    files = sorted(one for one in folder.iterdir() if one.is_file())
    tables = [one for one in files if _SUFFIX.search(one.name)] or [one for one in files if _HISTORY.search(one.name)]
    for file in tables:
        yield from _of_file(file, None)


def _is_text(file: Path) -> bool:
    return file.suffix in (".out", ".log") and file.is_file()


def _texts(files: Iterable[Path]) -> Iterator[Log]:
    from bssearch.exchange.importers.slurm import read_file  # imports this module

    return itertools.chain.from_iterable(map(read_file, files))


_SUFFIX = re.compile(r"\.(?:csv|tsv|jsonl)(?:\.gz)?$")
_HISTORY = re.compile(r"(?:history|metrics|log|scalars)\.json(?:\.gz)?$")  # other .json files rarely have a log


def _lightning(folder: Path) -> Iterator[Log]:
    # A CSVLogger's folder. Lightning counts the steps from 0.
    rows = [row for _, row in table_rows(folder / "metrics.csv")]
    first = 0 if (folder / "hparams.yaml").exists() else 1
    yield Log(origin=str(folder), rows=rows, settings=_settings_beside(folder), first_step=first)


_SETTINGS = ("hparams", "config", "args", "params", "hyperparameters", ".hydra/config")


def _settings_beside(folder: Path) -> dict[str, Any]:
    files = (folder / f"{name}{suffix}" for name in _SETTINGS for suffix in (".yaml", ".yml", ".json"))
    file = next((one for one in files if one.is_file()), None)
    found = {} if file is None else _flat(_json(file)) if file.suffix == ".json" else _yaml(file)
    return {name.removesuffix(".value"): value for name, value in found.items()}  # in W&B's config.yaml


def _trainer(folder: Path) -> Iterator[Log]:
    # The Trainer of transformers, in its output folder or in the newest checkpoint.
    files = [*folder.glob("trainer_state.json"), *sorted(folder.glob("checkpoint-*/trainer_state.json"))]
    states = [found for one in files if isinstance(found := _json(one), dict)]
    state = max(states, key=lambda one: number_in(one.get("global_step")), default={})
    logged = state.get("log_history")
    history = [one for one in logged if isinstance(one, dict)] if isinstance(logged, list) else []
    settings: dict[str, Any] = {"per_device_train_batch_size": state.get("train_batch_size")}
    for arguments in sorted(folder.glob("**/training_args.bin"))[-1:]:
        settings |= _pickled(arguments)
    yield Log(origin=str(folder), rows=[*_with_seconds(history)], settings=settings)


_ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay", "seed"),
    *("warmup_steps", "warmup_ratio", "label_smoothing_factor", "max_grad_norm"),
)
_NO_VALUE = ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")


def _pickled(file: Path) -> dict[str, Any]:
    # Plain numbers by the names of `_ARGUMENTS` in a pickle of `torch.save`, whose code is not run
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            with archive.open(name) as opened:
                codes = [
                    argument
                    for code, argument, _ in pickletools.genops(opened.read(MOST_BYTES))
                    if code.name not in _NO_VALUE
                ]
    except Exception:  # a damaged archive or pickle raises any exception
        return {}
    pairs = itertools.pairwise(codes)
    return {key: value for key, value in pairs if key in _ARGUMENTS and isinstance(value, int | float)}


def _with_seconds(history: Sequence[dict[str, Any]]) -> Iterator[Row]:
    # A Trainer logs the seconds of the whole training, evaluations included, and the seconds of each evaluation.
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


def _mlflow_run(folder: Path) -> Iterator[Log]:
    # A run's folder in MLflow's file store: a file per parameter, and per metric a line of time, value and step
    about = _yaml(folder / "meta.yaml")
    if about.get("lifecycle_stage") == "deleted" or "model_id" in about:  # a model has a copy of its run's metrics
        return
    settings = {one.name: read_text(one).strip() for one in sorted((folder / "params").glob("*")) if one.is_file()}
    rows = []
    for file in sorted((folder / "metrics").glob("**/*")):
        name = file.relative_to(folder / "metrics").as_posix()
        for line in read_text(file).splitlines() if file.is_file() else ():
            time, value, step = (*line.split(), "", "", "")[:3]
            rows.append({"step": step, CLOCK: number(time) / 1000, name: value})
    rows.sort(key=itemgetter(CLOCK))
    yield Log(origin=str(folder), rows=rows, settings=settings)


_MLFLOW_RUNS = """
    SELECT run_uuid, experiments.name FROM runs JOIN experiments ON experiments.experiment_id = runs.experiment_id
    WHERE runs.lifecycle_stage = 'active' ORDER BY start_time, run_uuid
"""


def _mlflow_database(address: str) -> Iterator[Log]:
    # Runs in MLflow's tables. The name of an experiment may follow the address, after a #.
    from bssearch.storage.connection.engine import opened_engine, parse_url, reading, shown  # loads SQLAlchemy

    address, _, experiment = address.partition("#")
    place = shown(parse_url(address))
    with opened_engine(address, write=False) as engine, reading(engine) as connection:
        of_experiments = grouped((name, run) for run, name in connection.exec_driver_sql(_MLFLOW_RUNS))
        params = connection.exec_driver_sql("SELECT run_uuid, key, value FROM params").all()
        metrics = connection.exec_driver_sql(
            "SELECT run_uuid, key, value, is_nan, step, timestamp FROM metrics ORDER BY timestamp, step"
        ).all()
    settings = grouped((run, (str(key), value)) for run, key, value in params)
    rows = grouped(
        (run, {"step": step, CLOCK: number_in(time) / 1000, str(key): math.nan if is_nan else value})
        for run, key, value, is_nan, step, time in metrics
    )
    for run in chosen(of_experiments, experiment, place, "experiments")[1]:
        yield Log(origin=f"{place}: run {run}", rows=rows.get(run, ()), settings=dict(settings.get(run, ())))


def _mlflow_server(address: str) -> Iterator[Log]:
    # Runs of a tracking server. The name of an experiment may follow the address, after a #.
    address, _, experiment = address.partition("#")
    client, failure = _library("mlflow", address).MlflowClient(address), _library("mlflow.exceptions", address)
    runs: list[Any] = []
    try:
        names = {one.experiment_id: one.name for one in client.search_experiments()}
        token: str | None = ""
        while token is not None:
            page = client.search_runs([*names], page_token=token or None, order_by=["attributes.start_time"])
            runs, token = [*runs, *page], page.token or None
        of_experiments = grouped((names[one.info.experiment_id], one) for one in runs)
        for run in chosen(of_experiments, experiment, address, "experiments")[1]:
            histories = (client.get_metric_history(run.info.run_id, key) for key in run.data.metrics)
            rows = [
                {"step": one.step, CLOCK: one.timestamp / 1000, one.key: one.value}
                for one in itertools.chain(*histories)
            ]
            rows.sort(key=itemgetter(CLOCK))
            yield Log(origin=f"{address}: run {run.info.run_id}", rows=rows, settings=run.data.params)
    except failure.MlflowException as error:
        raise UsageError(
            f"{address} cannot be read: {str(error).partition(': ')[0][:200]}", hint="check the URL"
        ) from None


def chosen(found: Mapping[str, list[Any]], name: str, place: str, what: str) -> tuple[str, list[Any]]:
    """Return the entry called ``name``, or the only entry. Returns an empty entry if ``found`` is empty."""
    if found and name not in (found if len(found) > 1 else ("", *found)):
        raise UsageError(
            f"{place} has the {what} {', '.join(map(str, found))}" + (f", not {name!r}" if name else ""),
            hint=f"choose a name, as in {place}#{next(iter(found))}",
        )
    return (name, found[name]) if name in found else next(iter(found.items()), ("", []))


def _wandb(folder: Path) -> Iterator[Log]:
    # The binary files of W&B's runs, in their folders or their parent's. A resumed run has a file per launch.
    found = {one.resolve() for pattern in ("run-*.wandb", "*/run-*.wandb") for one in folder.glob(pattern)}
    files = sorted(found, key=lambda one: one.parent.name.removeprefix("offline-"))
    for name, launches in grouped((one.name, one) for one in files).items():
        settings: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        for record in (record for file in launches for record in wandb_records(file)):
            items = (*record.run.config.update, *record.config.update, *record.history.item)
            try:
                values = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items}
            except (ValueError, RecursionError) as error:
                raise UsageError(f"the values of {name} in {folder} are not JSON: {error}", hint=DAMAGED) from None
            if record.HasField("history"):
                rows.append(values)
            else:
                settings |= values
            if device := record.environment.gpu_type or record.environment.cpu.model:
                settings["device"] = device
        calls = [number_in(row.get("_step")) for row in rows]
        if any(later - earlier > 1 for earlier, later in itertools.pairwise(calls)):  # else `_step` may count calls
            rows = [{"step": row.get("_step"), **row} for row in rows]
        settings.pop("_wandb", None)
        yield Log(origin=str(launches[0].parent), rows=rows, settings=_flat(settings))


_WANDB_HEADER, _BLOCK_BYTES, _PARTS = b":W&B\xe1\xbe\0", 32 * 1024, (2, 3)


def _message(kind: Any, content: bytes, place: str) -> Any:
    try:
        return kind.FromString(content)
    except _library("google.protobuf.message", place).DecodeError:
        raise UsageError(f"a record is damaged: {place}", hint=DAMAGED) from None


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the complete records of a ``.wandb`` file, a LevelDB log of protocol buffers."""
    # wandb 0.31 has the records' classes, but no reader of the file
    record_of = _library("wandb.proto.wandb_internal_pb2", file).Record
    whole = b""
    with file.open("rb") as opened:
        require(
            opened.read(len(_WANDB_HEADER)) in (_WANDB_HEADER, b""),
            f"{file} is not a W&B run's file, or has an unknown version",
            hint=DAMAGED,
        )
        while True:
            left = _BLOCK_BYTES - opened.tell() % _BLOCK_BYTES
            if left < 7:
                opened.seek(left, 1)
            head = opened.read(7)
            if len(head) < 7:
                return
            checksum, length, kind = struct.unpack("<IHB", head)
            part = opened.read(length)
            if len(part) < length:
                return
            if zlib.crc32(head[6:] + part) != checksum:
                raise UsageError(f"{file} is damaged before byte {opened.tell():,}", hint=DAMAGED)
            whole += part
            if kind not in _PARTS:
                yield _message(record_of, whole, f"{file}, before byte {opened.tell():,}")
                whole = b""


def _library(module: str, place: Path | str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UsageError(f"{place} needs {name}, which cannot be imported", hint=f"pip install {name}") from None


_EVENTS = "events.out.tfevents.*"
_PARTS_OF_RUN = ("train", "validation", "val", "eval")  # folders that Keras and others put beside each other


def _tensorboard(folder: Path) -> Iterator[Log]:
    array = _library("tensorboard.util.tensor_util", folder).make_ndarray
    of_tensorflow = set[str]()  # tags of TensorFlow 2's scalars, which are tensors
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    inner = sorted(folder.glob(f"*/{_EVENTS}"))  # PyTorch's writer puts hyperparameters there
    for file in (*sorted(folder.glob(_EVENTS)), *inner):
        for at, one in ((event, one) for event in _events(file) for one in event.summary.value):
            settings |= dict(_hyperparameters(one, folder))
            if one.metadata.plugin_data.plugin_name == "scalars":
                of_tensorflow.add(one.tag)
            is_tensor = one.tag in of_tensorflow and one.HasField("tensor")
            part = file.parent.name if file.parent != folder else ""
            if part in ("", *_PARTS_OF_RUN) and (is_tensor or one.HasField("simple_value")):
                try:
                    value = array(one.tensor).item() if is_tensor else one.simple_value
                except (TypeError, ValueError):
                    raise UsageError(f"{file} has a tensor for {one.tag!r}; expected a number", hint=DAMAGED) from None
                rows.append({"step": at.step, CLOCK: at.wall_time, f"{part}/{one.tag}" if part else one.tag: value})
    of_lightning = _yaml(folder / "hparams.yaml")
    settings |= of_lightning
    rows.sort(key=itemgetter(CLOCK))
    yield Log(origin=str(folder), rows=rows, settings=settings, first_step=0 if of_lightning else 1)


def _events(file: Path) -> Iterator[Any]:
    # Yield the events of a file; the last event may be incomplete
    raw = _library("tensorboard.backend.event_processing.event_file_loader", file).RawEventFileLoader
    event_of = _library("tensorboard.compat.proto.event_pb2", file).Event
    checksum = _library("tensorboard.compat.tensorflow_stub.pywrap_tensorflow", file).masked_crc32c
    read = 0
    for record in raw(str(file)).Load():  # with the right checksum
        read += len(record) + 16  # with its length and two checksums
        yield _message(event_of, record, f"{file}, before byte {read:,}")
    with file.open("rb") as opened:
        opened.seek(read)
        head = opened.read(12)
    if len(head) == 12:  # the loader ends without an error at a damaged record, too
        length, expected = struct.unpack("<QI", head)
        require(
            checksum(head[:8]) == expected and read + 16 + length > file.stat().st_size,
            f"{file} is damaged after byte {read:,}",
            hint=DAMAGED,
        )


def _hyperparameters(value: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    if value.tag == "_hparams_/session_start_info":
        kind = _library("tensorboard.plugins.hparams.plugin_data_pb2", folder).HParamsPluginData
        message = _message(kind, value.metadata.plugin_data.content, f"the hyperparameters of {folder}")
        for name, one in message.session_start_info.hparams.items():
            if (field_name := one.WhichOneof("kind")) is not None:
                yield name, getattr(one, field_name)


LIGHTNING = LogKind(("metrics.csv",), _lightning)
TRAINER = LogKind(("trainer_state.json", "checkpoint-*/trainer_state.json"), _trainer)
RAY = LogKind(("result.json",), _ray)
MLFLOW_RUN = LogKind(("metrics/*",), _mlflow_run)
MLFLOW = LogKind(
    ("mlflow.db",), lambda folder, experiment: _mlflow_database(f"sqlite:///{folder / 'mlflow.db'}#{experiment}"), True
)
TENSORBOARD = LogKind((_EVENTS, *(f"{part}/{_EVENTS}" for part in _PARTS_OF_RUN[1:])), _tensorboard)
WANDB = LogKind(("run-*.wandb", "*run-*/run-*.wandb"), _wandb)


def _of_file(file: Path, run: str | None, choice: str = "") -> Iterator[Log]:
    if file.suffix == ".db":
        yield from _mlflow_database(f"sqlite:///{file}#{choice}")
        return
    if _is_text(file) and not _TABLE.match(read_text(file)):
        yield from _texts([file])
        return
    known = [kind for kind in _kinds() if any("/" not in name and file.match(name) for name in kind.patterns)]
    if known and (known != [LIGHTNING] or (file.parent / "hparams.yaml").exists()):
        yield from known[0](file.parent, choice)
        return
    by_run: dict[str, list[tuple[int, Row]]] = {}
    column = None
    for line, row in table_rows(file):
        if not by_run:
            column = run if run is not None else next((one for one in row if one.lower() in RUN_NAMES), None)
            require(
                run is None or run in row, f"--run {run}: no column {run!r} in {file}; choose from {', '.join(row)}"
            )
        by_run.setdefault(str(row.get(column, "")) if column else "", []).append((line, row))
    beside = _settings_beside(file.parent) if len(by_run) == 1 else {}
    for name, rows in by_run.items():
        origin = f"{file}:{rows[0][0]}" + (f" ({column} {name})" if column else "")
        rows, header = _without_header(rows)
        settings = {**beside, **header, **_constant([row for _, row in rows])}
        yield Log(origin=origin, rows=[row for _, row in rows], settings=settings)


# Two lines with commas between names, then between numbers, as of Keras's CSVLogger
_TABLE = re.compile(r"[\w/. -]+(?:,[\w/. -]+)+\r?\n[-+\w.]*(?:,[-+\w.]*)+\r?\n")


def _without_header(rows: list[tuple[int, Row]]) -> tuple[list[tuple[int, Row]], Row]:
    # Rows after the first, and its values, if later rows lack most of their names: the settings of a run
    (_, first), *later = rows
    names = {name for _, row in later for name in row}
    own = {name: value for name, value in first.items() if name not in names}
    return (later, own) if later and 2 * len(own) > len(first) else (rows, {})


def _constant(rows: Sequence[Row]) -> dict[str, Any]:
    # Cells that every row has, always the same
    return {
        name: value
        for name, value in rows[0].items()
        if value not in (None, "") and all(name in row and row[name] == value for row in rows)
    }


def table_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield numbered rows of CSV or JSON, without repeated headers or a partial last row."""
    text = read_text(file)
    if text.lstrip()[:1] in ("{", "["):
        yield from ((line, _flat(row)) for line, row in _json_lines(text, str(file)))
        return
    text = re.sub(r"^sep=.[\r\n]+", "", text, count=1)  # as Excel writes it
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv_rows(text, str(file), delimiter=separator)
    _, header = next(rows, (1, []))
    names = [cell.strip() for cell in header]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UsageError(f"the column {twice[0]!r} occurs twice; rename one column ({file}:1)")
    if separator == ";":
        rows = iter(_with_points([*rows], str(file)))
    for line, cells in rows:
        if cells == header:
            continue  # a resumed run's
        if len(cells) < len(names) and text[-1:] != "\n" and line > text.count("\n"):
            return  # a killed run wrote a part of the last row
        if len(cells) != len(names):
            raise UsageError(
                f"the row has {plural(len(cells), 'cell')}, but the header has {plural(len(names), 'column')} "
                f"({file}:{line})",
                hint=f"put a cell with {separator!r} in quotes" if len(cells) > len(names) else "add the missing cells",
            )
        texts = [sys.intern(cell.strip()) for cell in cells]  # most cells repeat other cells
        yield line, dict(zip(names, texts, strict=True))


def _with_points(rows: list[tuple[int, list[str]]], place: str) -> list[tuple[int, list[str]]]:
    # Rows with decimal points; if a cell has a decimal comma, points are between thousands
    texts = {cell.strip() for _, cells in rows for cell in cells}
    commas = sorted(filter(_DECIMAL.fullmatch, texts))
    points = sorted(one for one in filter(_POINT.fullmatch, texts) if not _THOUSANDS.fullmatch(one))
    require(
        not commas or not points,
        f"{place} has {''.join(commas[:1])} with a comma and {''.join(points[:1])} with a point; write all numbers "
        "with decimal points and without commas",
    )
    if not commas:
        return rows
    return [(line, [_with_point(cell.strip()) for cell in cells]) for line, cells in rows]


def _with_point(cell: str) -> str:
    is_number = _DECIMAL.fullmatch(cell) or _THOUSANDS.fullmatch(cell)
    return cell.replace(".", "").replace(",", ".") if is_number else cell


_DECIMAL = re.compile(r"[+-]?(?:\d{1,3}(?:\.\d{3})+|\d+)?,\d+(?:[eE][+-]?\d+)?%?")
_POINT = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?%?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+")


def _json_lines(text: str, origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, Any]]
    if text.lstrip()[:1] == "[":
        found = parsed_json(text, origin)
        rows = list(enumerate(found if isinstance(found, list) else [], 1))
    elif (whole := _whole_object(text)) is not None:
        rows = list(enumerate(_rows_of(whole), 1))
    else:
        lines = [(line, one) for line, one in enumerate(text.splitlines(), 1) if one.strip()]
        if len(lines) > 1 and text[-1:] != "\n" and lines[-1][1].strip()[-1] != "}":
            lines.pop()  # a killed run wrote a part
        rows = [(line, parsed_json(one, origin, line=line)) for line, one in lines]
    for line, row in rows:
        if not isinstance(row, dict):
            raise UsageError(f"{origin}:{line} must be a JSON object, not {row!r:.60}")
        yield line, row


def _whole_object(text: str) -> dict[str, Any] | None:
    # A file that is one JSON object; None if the file has an object in each line
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _rows_of(whole: Mapping[str, Any]) -> list[Any]:
    # Rows of a history: a list of objects, or lists of one length by name; other values go into each row
    flat = flat_row(whole)
    for name, rows in flat.items():
        if isinstance(rows, list) and rows and all(isinstance(one, dict) for one in rows):
            about = {other: value for other, value in flat.items() if other != name and not isinstance(value, list)}
            return [{**about, **one} for one in rows]
    lists = {name: one for name, one in flat.items() if isinstance(one, list) and one}
    length = max(map(len, lists.values()), default=0)
    of_length = {name: one for name, one in lists.items() if len(one) == length}
    is_one_part = len({name.rpartition(".")[0] for name in of_length}) == 1  # as in history.step and history.loss
    columns = {name.rpartition(".")[2] if is_one_part else name: one for name, one in of_length.items()}
    if length < 2 or len(columns) < 2:
        return [whole]
    about = {name: value for name, value in flat.items() if not isinstance(value, list)}
    return [{**about, **dict(zip(columns, cells, strict=True))} for cells in zip(*columns.values(), strict=True)]


def _json(file: Path) -> Any:
    return parsed_json(read_text(file), str(file))


class _PlainLoader(Loader):
    # Reads plain values; a node with another tag becomes None, and no code runs

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return super().construct_object(node, deep) if node.tag in TAGS else None


def _yaml(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = yaml.load(read_text(file), _PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(
            f"{file} is not YAML: {' '.join(str(error).split())[:200]}", hint="correct or remove the file"
        ) from None
    return _flat(found)


def _flat(found: Any) -> dict[str, Any]:
    return flat_row(found) if isinstance(found, Mapping) else {}


_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")


def number_in(value: Any) -> float:
    """Parse a number, a percentage, a duration into seconds or a date into seconds since 1970, or return NaN."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) <= LARGEST_FLOAT else math.inf if value > 0 else -math.inf
    if isinstance(value, float):
        return value
    if not isinstance(value, str) or not value:
        return math.nan
    if (plain := number(value)) == plain:
        return plain
    if _INSTANT.match(value):
        try:
            instant = datetime.fromisoformat(value)
            return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return math.nan
    found = fraction(value)
    return seconds(value) if math.isnan(found) else found
