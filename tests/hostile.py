"""Hostile input: texts, rows and messages changed at random.

Each kind makes a case from a random generator and tries it. bssearch takes the input or raises `BSSearchError`.
"""

import gzip
import io
import json
import random
import re
import shutil
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from bssearch import BSSearchError, Store, UsageError, open_store
from bssearch.cli.app import app
from bssearch.commands.report import svg_of
from bssearch.commands.trials import configuration_of, status
from bssearch.exchange.importers.curves import import_curves
from bssearch.exchange.importers.optuna_runs import import_optuna
from bssearch.exchange.importers.rcp import import_rcp
from bssearch.exchange.importers.runs import import_runs
from bssearch.exchange.trial_rows import trial_table
from bssearch.executors.base import LineSplitter, decode_reply
from bssearch.executors.programs.command import ReportedTrial
from bssearch.executors.programs.reports import ReportReader
from bssearch.records import Configuration, Observation, Target, TrialState, to_json
from bssearch.search.finding import compute_answer
from bssearch.settings import shipped_studies
from bssearch.spec import load_spec, parse_value
from bssearch.spec.templates import load_templates
from bssearch.storage.models import METADATA
from tests.exchange.importers.test_curves import HAND_MADE, event_files, mlflow_database, wandb_runs, zeus
from tests.factories import make_request, make_spec
from tests.postgres import Postgres
from tests.schema import execute

DATA = Path(__file__).parent / "data"

TOKENS = (
    *(
        "!!int x",
        "!!python/object:os.system",
        "&a",
        "*a",
        "<<: *a",
        "? [a, b]\n: 1",
        "2026-99-99",
        "\t",
        "\0",
        "\x1b[31m",
    ),
    *("1e999", "-1e999", "1e308", "-1", "0", ".inf", "nan", "NaN", "Infinity", "9" * 5000, "1_000", "0x10", "1e-320"),
    *("[", "]", "{", "}", "[" * 200, "{a: " * 200, "a." * 200, ": ", "- ", "| ", '"', "'", '"\\ud800"', "\u2028", "𝕏"),
    *(
        "=cmd|'/c calc'!A1",
        "@SUM(1)",
        "null",
        "true",
        "~",
        "",
        ",",
        ";",
        "\n",
        "\r\n",
        "\ufeff",
        "#",
        "%",
        "a: &a [*a]",
    ),
    "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: &d [*c, *c, *c]\ne: [*d, *d, *d]",
)
"""Tokens that mutations put into a text."""

MANY = "WITH RECURSIVE many(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many WHERE n < 100000) SELECT"
VALUES: tuple[str, ...] = (
    *("'text'", "''", "X'00ff'", "NULL", "9e999", "-9e999", "1e308", "-1e308", "-1", "0", "1", "2.5"),
    *("printf('%.*c', 10000000, 'x')", "replace(printf('%.*c', 5000000, 'w'), 'ww', 'w ')"),
    "replace(printf('%.*c', 2000000, 'x'), 'x', char(27))",
    f"({MANY} json_group_object('p' || n, n) FROM many)",
    f"({MANY} json_group_array(n) FROM many)",
    *("json_object('p', printf('%.*c', 1000000, 'x'))", "printf('%.*c', 100000, '[')"),
    *("9223372036854775807", "'[1]'", "'{}'", "'null'", '\'{"a": [1, {"b": null}]}\'', "'2026-99-99'", "1e-320"),
)
"""SQL values that mutations put into a row."""

SERVER_VALUES: tuple[str, ...] = (
    *("''", "'text'", "NULL", "'NaN'", "'Infinity'", "'-Infinity'", "'1e308'", "'-1e308'", "'1e-320'", "'-1'", "'0'"),
    *("'1'", "'2.5'", "'2147483647'", "'9223372036854775807'", "'true'", "'false'", "'infinity'", "'-infinity'"),
    *("'9999-12-31'", "'294276-12-31'", "'0001-01-01 BC'", "'{}'", "'[]'", "'[1]'", "'null'", "'\"x\"'", "'[[1]]'"),
    *('\'{"a": [1, {"b": null}]}\'', "'{\"a\": 1e999}'", '\'{"a": "\\ud800"}\'', '\'{"a": "\\u0000"}\''),
    *("repeat('x', 10000000)", "repeat('w ', 5000000)", "repeat(chr(27), 2000000)", "repeat(chr(10) || 'w', 1000000)"),
    *("(SELECT json_object_agg('p' || n, n) FROM generate_series(1, 100000) AS n)",),
    *("(SELECT json_agg(n) FROM generate_series(1, 1000000) AS n)", "json_build_object('p', repeat('x', 1000000))"),
    *("(repeat('[', 6000) || repeat(']', 6000))::json", "(repeat('{\"a\":', 100) || '1' || repeat('}', 100))::json"),
    *("'running'", "'queued'", "'reached'", "'paused'", "'failed'", "'waiting'", "'search'", "chr(65534) || chr(8238)"),
)
"""SQL values that mutations put into a row on a server, which refuses many of the values."""


def mutated(rng: random.Random, text: str) -> str:
    """Text with one to four places deleted, doubled or replaced by a token."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((0, 1, 3, 10, 40, 200)))
        kind = rng.choice(("token", "token", "token", "delete", "double", "character"))
        if kind == "token":
            inside = rng.choice(TOKENS)
        elif kind == "character":
            inside = chr(rng.choice((rng.randint(0, 127), rng.randint(128, 0x2FFF), rng.randint(0x1F300, 0x1F6FF))))
        else:
            inside = text[start:end] * (2 if kind == "double" else 0)
        text = text[:start] + inside + text[end:]
    return text


def in_bytes(rng: random.Random, text: str) -> bytes:
    """Encoded text, sometimes with a byte that is not UTF-8."""
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        place = rng.randint(0, len(content))
        content = content[:place] + bytes([rng.randint(128, 255)]) + content[place:]
    return content


@dataclass(frozen=True)
class Kind:
    """A kind of input; ``attempt`` makes one case in a folder and tries it."""

    name: str
    attempt: Callable[[random.Random, Path], None]
    seconds: list[float] | None = None
    """CPU seconds of each query of a case with several queries."""

    def fails(self, seed: int, folder: Path) -> BaseException | None:
        """Unexpected error of a case, or None."""
        try:
            self.attempt(random.Random(seed), folder)
        except BSSearchError:
            return None
        except Exception as error:
            return error
        return None


def _spec(rng: random.Random, folder: Path) -> None:
    is_toml = rng.random() < 0.3
    text = TOML if is_toml else rng.choice(sorted(shipped_studies().items()))[1].read_text(encoding="utf-8")
    file = folder / ("spec.toml" if is_toml else "spec.yaml")
    file.write_bytes(in_bytes(rng, mutated(rng, text)))
    load_spec(file, [mutated(rng, rng.choice(OVERRIDES))] if rng.random() < 0.3 else [])


def _enqueued(rng: random.Random, folder: Path) -> None:
    pairs = [mutated(rng, text).partition("=") for text in [rng.choice(SETTINGS) for _ in range(rng.randint(1, 4))]]
    configuration_of(make_spec(), {name: parse_value(value, name) for name, _, value in pairs})


def _runs(rng: random.Random, folder: Path) -> None:
    file = folder / "runs.csv"
    file.write_bytes(in_bytes(rng, mutated(rng, RUNS)))
    made = import_runs(file, name="toy")
    if rng.random() < 0.02:
        database = folder / "runs.db"
        database.unlink(missing_ok=True)
        with open_store(f"sqlite:///{database}") as store:
            store.transfer.import_finished(made.studies)
            for one in made.studies:
                with suppress(BSSearchError):
                    compute_answer(store, one.study.name)


def _training_logs(name: str, rng: random.Random, folder: Path) -> None:
    kept = folder / f"logs-{name}"
    if not kept.exists():
        kept.mkdir()
        LOGS[name](kept)
    file = rng.choice(sorted(one for one in kept.rglob(LIBRARY_FILES.get(name, "*")) if one.is_file()))
    whole = file.read_bytes()
    if name == "mlflow_database":
        change_database(rng, file, whole)
    elif name in LIBRARY_LOGS and rng.random() < 0.7:
        file.write_bytes(change_records(rng, whole, is_wandb=name == "wandb_runs"))
    else:
        unpacked = gzip.decompress(whole) if file.suffix == ".gz" else whole
        if name in LIBRARY_LOGS or file.suffix == ".bin":
            damaged = mutated(rng, unpacked.decode("latin-1")).encode("latin-1", "replace")
        else:
            damaged = in_bytes(rng, mutated(rng, unpacked.decode("utf-16" if name == "semicolons" else "utf-8")))
        file.write_bytes(gzip.compress(damaged) if file.suffix == ".gz" and rng.random() < 0.9 else damaged)
    try:
        place = f"{kept}/trace#cifar/net" if name == "zeus" else str(kept)
        import_curves([place], target=0.255, epoch_samples=6400 if name == "zeus" else None)
    finally:
        file.write_bytes(whole)


def change_database(rng: random.Random, file: Path, whole: bytes) -> None:
    """Change values that the import of MLflow's runs reads, or bytes of the schema or near such values."""
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            (table, columns), value = rng.choice(sorted(MLFLOW_COLUMNS.items())), rng.choice(VALUES)
            with suppress(sqlite3.Error):
                put(file, table, rng.choice(columns), value, one_row="0000" in value or rng.random() < 0.5)
        return
    known = [0, *(one.start() for one in re.finditer(b"val_acc|micro_batch_size|active", whole))]
    damaged = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        place = max(0, rng.choice(known) + rng.randint(-300, 300))
        for offset in range(place, min(place + rng.choice((1, 1, 2, 8, 40)), len(damaged))):
            damaged[offset] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
    file.write_bytes(damaged)


def change_records(rng: random.Random, whole: bytes, *, is_wandb: bool) -> bytes:
    """Change some records of a W&B file or an event file, and their checksums, so that the records are read."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    damaged = bytearray(whole)
    records = [*(wandb_places(whole) if is_wandb else event_places(whole))]
    for start, end in rng.sample(records, min(rng.randint(1, 3), len(records))):
        for _ in range(rng.choice((1, 1, 3, 10))):
            damaged[rng.randrange(start, end)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        if is_wandb:
            struct.pack_into("<I", damaged, start - 7, zlib.crc32(damaged[start - 1 : end]))
        else:
            struct.pack_into("<I", damaged, end, masked_crc32c(bytes(damaged[start:end])))
    return bytes(damaged)


def wandb_places(whole: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each record's bytes."""
    at = 7
    while at + 7 < len(whole):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
        start = at + 7
        at = start + int(struct.unpack_from("<H", whole, at + 4)[0])
        yield start, at


def event_places(whole: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each record's bytes."""
    at = 0
    while at < len(whole):
        start = at + 12
        end = start + int(struct.unpack_from("<Q", whole, at)[0])
        yield start, end
        at = end + 4


MLFLOW_COLUMNS = {
    "experiments": ("experiment_id", "name"),
    "runs": ("run_uuid", "lifecycle_stage", "start_time", "experiment_id"),
    "params": ("run_uuid", "key", "value"),
    "metrics": ("run_uuid", "key", "value", "is_nan", "step", "timestamp"),
}
LIBRARY_LOGS = {one.__name__: one for one in (wandb_runs, event_files, mlflow_database)}
LIBRARY_FILES = {"wandb_runs": "*.wandb", "event_files": "*tfevents*"}
LOGS = {one.__name__: one for one in (*HAND_MADE, zeus)} | LIBRARY_LOGS


def _reference_points(rng: random.Random, folder: Path) -> None:
    file = folder / "rcps.json"
    source = rng.choice(sorted((DATA / "mlperf-rcp").glob("*.json")))
    file.write_bytes(in_bytes(rng, mutated(rng, source.read_text(encoding="utf-8")[: rng.choice((1500, 10**6))])))
    import_rcp(file)


def _message(rng: random.Random, folder: Path) -> None:
    lines = LineSplitter()
    content = in_bytes(rng, mutated(rng, rng.choice(REPLIES))) + b"\n"
    with suppress(ValueError):  # ends the worker
        for line in lines.feed(content):
            decode_reply(line)


def _program_reports(rng: random.Random, folder: Path) -> None:
    reader = ReportReader(rng.choice(({}, EXPRESSIONS)))
    request = make_request(
        number=1,
        configuration=Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1),
        seed=0,
        target=Target(metric="accuracy", value=0.9),
        train_seconds_limit=100.0,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=1,
    )
    trial = ReportedTrial(request, _as_json, 0.0)
    content = in_bytes(rng, mutated(rng, rng.choice(PROGRAM_LOGS))) + b"\n"
    content = content.replace(b"PAD", rng.choice((b"", b"x" * 70_000, b'{"a":' * 10_000, bytes(1000))))
    try:
        for index, start in enumerate(range(0, len(content), piece := rng.choice((7, 100, 1 << 16)))):
            for report in reader.feed(content[start : start + piece]):
                trial.take(report, index / 10)
        trial.left(0)
    except UsageError as error:
        to_json(trial.failed(TrialState.FAILED, str(error)))
        raise
    to_json(trial.outcome())


def _as_json(observation: Observation) -> None:
    json.dumps(asdict(observation), allow_nan=False)


@dataclass(frozen=True)
class StoredRows:
    """Rows of a study in a SQLite file with one changed value."""

    database: Path
    study: str
    seconds: list[float] = field(default_factory=list)
    """CPU seconds of each query."""

    def attempt(self, rng: random.Random, folder: Path) -> None:
        """Change one value, in one row or all rows, and read the study in every way."""
        columns = [(table.name, column.name) for table in METADATA.sorted_tables for column in table.columns]
        place, value = rng.choice(columns), rng.choice(VALUES)
        is_large = "0000" in value  # in all rows of a curve, the value would fill the disk
        self.try_one(folder, *place, value, one_row=is_large or rng.random() < 0.5)

    def try_one(self, folder: Path, table: str, column: str, value: str, *, one_row: bool) -> None:
        """Put a value into a column and run all queries of the study."""
        copy = folder / "study.db"
        for left in folder.glob("study.db*"):
            left.unlink()
        shutil.copy(self.database, copy)
        put(copy, table, column, value, one_row=one_row)
        for ask in ASKED:
            # Each in a separate store, because closing a store judges the errors.
            began = time.process_time()
            with suppress(BSSearchError), open_store(f"sqlite:///{copy}", write=False) as store:
                json.dumps(ask(store, self.study), default=str, allow_nan=False)
            self.seconds.append(time.process_time() - began)
        ask_on_the_command_line(f"sqlite:///{copy}", self.study, folder, self.seconds)


@dataclass
class ServerRows:
    """Rows of a study and of the queue on a PostgreSQL server with one changed value."""

    server: Postgres
    database: str
    study: str
    seconds: list[float] = field(default_factory=list)
    """CPU seconds of each command."""
    changed: int = 0
    """Cases in which the server accepted the value."""

    def attempt(self, rng: random.Random, folder: Path) -> None:
        """Change one value, in one row or all rows, and run the commands that read it."""
        table = rng.choice([one for one in METADATA.sorted_tables if one.name in FILLED])
        column, value = rng.choice([column.name for column in table.columns]), rng.choice(SERVER_VALUES)
        if rng.random() < 0.03:
            table, column, value = METADATA.tables["bss_trial"], "retry_of", "number"
        self.try_one(folder, table.name, column, value, one_row=rng.random() < 0.5)

    def try_one(self, folder: Path, table: str, column: str, value: str, *, one_row: bool) -> None:
        """Put a value into a column of a copy of the database; run the commands if the server accepts the value."""
        import psycopg

        self.server.execute(f"CREATE DATABASE hostile TEMPLATE {self.database} STRATEGY file_copy")
        try:
            where = f" WHERE ctid = (SELECT max(ctid) FROM {table})" if one_row else ""
            try:
                self.server.execute(f'UPDATE {table} SET "{column}" = {value}{where}', database="hostile")
            except psycopg.Error:
                return
            self.changed += 1
            ask_on_the_command_line(self.server.url("hostile"), self.study, folder, self.seconds)
        finally:
            self.server.execute("DROP DATABASE hostile WITH (FORCE)")


FILLED = frozenset(
    {
        *("bss_environment", "bss_study", "bss_trial", "bss_observation", "bss_probe", "bss_finding", "bss_log"),
        *("bss_spec", "bss_submission", "bss_worker"),
    }
)
"""Tables with rows in the study of `ServerRows`."""


def ask_on_the_command_line(url: str, study: str, folder: Path, seconds: list[float]) -> None:
    """Run the commands that read a study; raise unexpected errors."""
    for words in (
        *(["study", "list"], ["study", "show", study], ["trial", "list", study], ["trial", "show", study, "3"]),
        *(["best", study], ["report", study, "--html", str(folder / "page.html")], ["queue", "list"]),
        ["trial", "list", study, "--format", "json"],
    ):
        began = time.process_time()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit, BSSearchError):
            app([*words, "--db", url])
        seconds.append(time.process_time() - began)


def put(file: Path, table: str, column: str, value: str, *, one_row: bool) -> None:
    """Put a value into a column of one row or all rows, unless a constraint forbids the value."""
    where = f" WHERE rowid = (SELECT max(rowid) FROM {table})" if one_row else ""
    with suppress(sqlite3.IntegrityError):
        execute(file, f'UPDATE {table} SET "{column}" = {value}{where}')


def _curves(store: Store, name: str) -> object:
    return store.trials.curves(name, [one.number for one in store.trials.of(name)])


ASKED: Sequence[Callable[[Store, str], object]] = (
    lambda store, name: compute_answer(store, name).model_dump(mode="json"),
    lambda store, name: str(status(store, name)),
    lambda store, name: trial_table(store.trials.of(name)),
    lambda store, name: svg_of(store, name),
    lambda store, name: store.studies.summaries(),
    _curves,
)
"""Queries of a study with changed rows."""

TOML = """
schema_version = 1
name = "toy"
workload = "digits"

[target]
metric = "accuracy"
value = 0.97

[space]
batch_size = {low = 32, high = 512}
learning_rate = {reference_batch = 64, low = 0.01, high = 1.0}

[default]
batch_size = 256
learning_rate = 0.1

[budget]
trials = 10
trial_train_seconds = 2.5
"""

OVERRIDES = ("budget.trials=5", "space.batch_size=[8, 16]", "space.learning_rate={low: 0.1, high: 1}", "a.b.c.d=1")

SETTINGS = (
    *("batch_size=64", "learning_rate=0.1", "warmup_epochs=1", "weight_decay=0.001", "dropout=0.2", "momentum=0.9"),
    *("label_smoothing=0.1", "optimizer=sgd", "horizon_samples=1000", "nesterov=true", "beta2=0.99"),
)

RUNS = """batch_size,reached,seed,steps,train_seconds,final_metric,device,precision,param.learning_rate,param.note
32,true,0,120,2.5,0.91,A100,bf16,0.1,first
32,true,1,130,2.6,0.92,A100,bf16,0.1,second
64,true,0,80,2.2,0.91,A100,bf16,0.2,
64,false,1,400,9.5,0.71,A100,bf16,0.2,"a, b"
128,true,0,70,2.9,0.93,A100,bf16,0.4,last
"""

REPLIES = (
    '{"kind": "loaded", "device": "cpu", "revision": "0123456789ab"}',
    '{"kind": "heartbeat"}',
    '{"kind": "refused", "error": "workload", "message": "no", "hint": null, "out_of_memory": false}',
    '{"kind": "trial_observed", "number": 1, "observation": {"step": 1, "samples": 32, "train_seconds": 0.5, '
    '"metric": 0.5, "loss": 1.0, "learning_rate": 0.1}}',
    '{"kind": "trial_ended", "number": 1, "outcome": {"state": "reached", "reason": "so", "steps": 5}}',
)

EXPRESSIONS = {"step": r"step (\S+)", "accuracy": r"acc=(\S+)", "seconds": r"(\S+) s$"}

PROGRAM_LOGS = (
    "".join(
        f'{{"step": {10 * i}, "accuracy": {0.1 + 0.05 * i:.2f}, "seconds": {i}.5, "loss": 1}}\nPAD' for i in range(9)
    ),
    "".join(f'{{"step": {10 * i}, "accuracy": 0.{i}}}\r\nPAD\n' for i in range(9)),
    "".join(f"PAD acc=0.{i}\nstep {10 * i}\r step {10 * i + 1} acc=0.{i} {i}.5 s\n" for i in range(9)),
)
"""Output of a program before mutations; PAD is replaced by much text."""

TEMPLATES = """templates:
  digits:
    spec: digits
    values:
      budget.trials: { type: integer, low: 1, high: 400 }
      target.value: { type: number, low: 0.9, high: 0.99 }
      space.batch_size: { type: integers, low: 4, high: 4096 }
      training.deterministic: { type: boolean }
      workload_settings.width: { choices: [16, 32] }
  other:
    spec: fashion_mnist
    values: {}
"""


def _templates(rng: random.Random, folder: Path) -> None:
    file = folder / "templates.yaml"
    file.write_bytes(in_bytes(rng, mutated(rng, TEMPLATES)))
    load_templates(file).offered()


@dataclass(frozen=True)
class OptunaDatabases:
    """Databases of Optuna with some changed values."""

    database: Path
    seconds: list[float] = field(default_factory=list)

    def attempt(self, rng: random.Random, folder: Path) -> None:
        """Change one to three values; import and store the study."""
        copy = folder / "theirs.db"
        shutil.copy(self.database, copy)
        tables = execute(copy, "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p")
        for _ in range(rng.randint(1, 3)):
            with suppress(sqlite3.Error):
                (table, column), value = rng.choice(tables), rng.choice(VALUES)
                put(copy, table, column, value, one_row="0000" in value or rng.random() < 0.5)
        began = time.process_time()
        try:
            made = import_optuna(str(copy), name="toy", metric="accuracy", target=0.9)
            target = folder / "made.db"
            target.unlink(missing_ok=True)
            with open_store(f"sqlite:///{target}") as store:
                store.transfer.import_finished(made.studies)
        finally:
            self.seconds.append(time.process_time() - began)


def make_optuna_database(file: Path) -> None:
    """Write a study of twelve trials with Optuna."""
    import optuna
    from optuna.distributions import FloatDistribution, IntDistribution

    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    made = optuna.create_study(study_name="theirs", storage=storage, direction="maximize")
    sizes, rates = IntDistribution(8, 128), FloatDistribution(1e-4, 1.0, log=True)
    for number in range(12):
        made.add_trial(
            optuna.trial.create_trial(
                params={"batch_size": 8 * 2 ** (number % 4), "lr": 0.01 * (number + 1)},
                distributions={"batch_size": sizes, "lr": rates},
                value=0.8 + number / 60,
                intermediate_values={step: 0.5 + step / 25 for step in range(1, 11)},
                user_attrs={"device": "A100", "note": "x"},
            )
        )
    storage.remove_session()
    storage.engine.dispose()


@contextmanager
def server_rows(server: Postgres, file: Path, study: str) -> Iterator[ServerRows]:
    """Rows of a SQLite file's study on a server, with a log, a submission and a worker."""
    url = server.create_database("hostile_rows")
    try:
        with open_store(f"sqlite:///{file}", write=False) as read, open_store(url) as store:
            store.transfer.join(read.transfer.read([study], "a file"))
            compute_answer(store, study)
            store.trials.save_log(study, 3, "epoch 1\nepoch 2\n")
            store.findings.save(study, store.findings.stamp(study), {"answer": None, "quick": None, "search_end": None})
        server.execute(
            "INSERT INTO bss_submission (name, template, values, tags, owner, priority, submitted_at, state, "
            "reason, served_seconds) VALUES ('mine', 'digits', '{}', 'gpu', 'ann', 1, now(), 'waiting', 'so', 2)",
            'INSERT INTO bss_worker (name, "user", host, tags, slots, templates, seen_at) '
            "VALUES ('h/1', 'ann', 'h', 'gpu', 'auto', '{\"digits\": {}}', now())",
            database="hostile_rows",
        )
        yield ServerRows(server, "hostile_rows", study)
    finally:
        server.execute("DROP DATABASE hostile_rows WITH (FORCE)")


KINDS = (
    Kind("specs", _spec),
    Kind("enqueued values", _enqueued),
    Kind("run tables", _runs),
    *(Kind(f"logs: {name}", partial(_training_logs, name)) for name in LOGS if name not in LIBRARY_LOGS),
    Kind("reference points", _reference_points),
    Kind("worker messages", _message),
    Kind("program reports", _program_reports),
    Kind("templates", _templates),
)
LIBRARY_KINDS = tuple(Kind(f"logs: {name}", partial(_training_logs, name)) for name in LIBRARY_LOGS)
"""Kinds that take seconds to make."""
