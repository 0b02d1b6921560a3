"""Imported runs, the parsing of their values and batch sizes, and the interface of importers."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from bssearch.errors import NotFoundError, UsageError, require
from bssearch.files import is_sqlite
from bssearch.records import Configuration, Crossing, Observation, ParameterValue, SecondsBasis, TrialState
from bssearch.records.text import plural
from bssearch.registry import Option
from bssearch.spec import TRAINING_PARAMETERS
from bssearch.spec.space.domains import LIMITS

if TYPE_CHECKING:
    from bssearch.storage.studies import FinishedStudy
    from bssearch.storage.transfer.study_copy import Copy

LARGEST = 2**31 - 1  # Largest integer of every database's integer column

MOST_BYTES = 2**26

UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path) -> str:
    """Return the text of a file of at most 64 MiB, unpacked if the name ends in ``.gz``."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no file {str(path)!r}", hint="check the path") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            hint="correct the file or its permissions",
        ) from None
    require(
        len(data) <= MOST_BYTES,
        f"{path} has more than {MOST_BYTES:,} bytes",
        hint="remove data that the import does not need",
    )
    encoding = "UTF-16" if data[:2] in UTF_16_MARKS else "UTF-8"
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line} is not {encoding} text: byte 0x{data[error.start]:02x}", hint="save the file as UTF-8"
        ) from None


def parsed_json(text: str, origin: str, *, line: int = 1, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError) as error:
        line += error.lineno - 1 if isinstance(error, json.JSONDecodeError) else 0
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UsageError(f"{origin}:{line} is not valid JSON: {why}", hint="correct the file") from None


def integer(text: str, label: str, origin: str, *, low: int, high: int = LARGEST) -> int:
    """Parse an integer, also ``120.0``. Raises `UsageError` for invalid text and for integers outside [low, high]."""
    value = number(text)
    try:
        found = int(text) if "_" not in text else None
    except ValueError:
        found = int(value) if value.is_integer() else None
    if found is None or not low <= found <= high:
        raise UsageError(
            f"{label} = {text!r:.60} must be an integer in [{low}, {high}] ({origin})", hint=comma_hint(text)
        )
    return found


def comma_hint(text: str) -> str | None:
    return "write decimals with a point, and thousands without a separator" if "," in text else None


def parameter_value(text: str, label: str, origin: str) -> ParameterValue:
    """Parse a boolean or a number, else return the text. Raises `UsageError` for NaN and infinity."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = number(text)
    if math.isnan(value) and text.lower().lstrip("+-") != "nan":
        return text
    if not math.isfinite(value):
        raise UsageError(f"{label} = {text!r} must be finite ({origin})", hint="leave out unknown values")
    try:
        return int(text)
    except ValueError:
        return value


def csv_rows(text: str, source: str, *, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield each non-blank row with the number of the row's first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{source}:{line} is not valid CSV: {error}", hint="correct this line") from None


def number(text: str) -> float:
    """Parse a number, or return NaN for invalid text and for underscores."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


TYPED = ("learning_rate", *TRAINING_PARAMETERS, "optimizer")  # Parameters whose configuration field cannot be empty

POWER = "mean_power_watts"

SPLIT = ("micro_batch_size", "accumulation_steps", "world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """An imported run. Unknown values are None."""

    origin: str  # the place, such as runs.csv:12
    configuration: Configuration  # with a placeholder for unknown parameters
    seed: int | None = None
    reached: bool = True
    missed: TrialState = TrialState.EXHAUSTED  # the state of a miss
    steps: int | None = None  # to the target, or to the end of a miss
    last_miss_step: int | None = None  # the last evaluation before the target
    train_seconds: float | None = None  # to the target, or to the end of a miss
    final_metric: float | None = None
    device: str | None = None
    precision: str | None = None
    mean_power_watts: float | None = None
    curve: tuple[Observation, ...] = ()
    crossing: Crossing | None = None  # of the target by the curve; if None, steps and train_seconds give the crossing
    seconds_basis: SecondsBasis | None = None


@dataclass(frozen=True, slots=True)
class RunTable:
    """Runs in the order of a table, and notes.

    ``unclear`` says why steps and seconds might not end at the target.
    """

    runs: tuple[ImportedRun, ...]
    notes: tuple[str, ...]
    unclear: str = ""
    columns: tuple[str, ...] = ()


_UNKNOWN = {"learning_rate": 1.0, **dict.fromkeys(TRAINING_PARAMETERS, 0.0), "optimizer": "unknown"}


def make_configuration(
    batch: Mapping[str, int], values: Mapping[str, ParameterValue], origin: str, label: Callable[[str], str] = str
) -> Configuration:
    """Build a configuration with placeholders for missing `TYPED` parameters."""
    given = {name: value for name, value in values.items() if value is not None}
    typed: dict[str, Any] = {**_UNKNOWN, **batch}
    for name in (one for one in TYPED if one in given):
        value = given[name]
        typed[name] = str(value) if name == "optimizer" else _within_limits(name, value, label(name), origin)
    own = {name: value for name, value in values.items() if name not in (*TYPED, *SPLIT, "batch_size")}
    return Configuration(parameters={**own, **{name: None for name in TYPED if name not in given}}, **typed)


def _within_limits(name: str, value: ParameterValue, label: str, origin: str) -> float:
    low, high, rule = LIMITS.get(name, (1e-100, 1e100, "must be > 0 (1e-100 to 1e100)"))
    if isinstance(value, str | bool | None) or not (low <= value <= high and math.isfinite(value)):
        number = "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number and "
        raise UsageError(f"{label} = {value!r} {rule.replace('must be ', f'must be {number}')} ({origin})")
    return float(value)


BATCH, MICRO, ACCUMULATION, WORLD = "batch_size", "micro_batch_size", "accumulation_steps", "world_size"
STEP_BATCH = "effective_batch_size"

_ALIASES = {
    MICRO: (
        "micro_batch",
        "micro_bs",
        "micro_bsz",
        "per_device_train_batch_size",
        "per_device_batch_size",
        "per_gpu_train_batch_size",
        "per_gpu_batch_size",
        "train_micro_batch_size_per_gpu",
        "batch_size_per_device",
        "batch_size_per_gpu",
        "device_batch_size",
        "local_batch_size",
    ),
    ACCUMULATION: (
        "gradient_accumulation_steps",
        "gradient_accumulation",
        "grad_accumulation_steps",
        "grad_accumulation",
        "grad_accum_steps",
        "grad_accum",
        "accum_steps",
        "accumulation",
        "accumulate_grad_batches",
        "num_accumulation_steps",
        "gradient_accumulation_step",
        "accumulate_steps",
        "acc_steps",
        "ga_steps",
        "ga",
        "gas",
        "update_freq",
    ),
    WORLD: (
        "num_devices",
        "n_devices",
        "num_gpus",
        "n_gpus",
        "n_gpu",
        "ngpus",
        "ngpu",
        "num_processes",
        "data_parallel_size",
        "data_parallel",
        "dp_size",
        "devices",
        "gpus",
        "nproc_per_node",
        "gpus_per_node",
        "num_gpus_per_node",
    ),
    STEP_BATCH: ("global_batch_size", "total_batch_size", "total_train_batch_size", "step_batch_size"),
}
# Numbers of machines; on several machines, a number of devices may be per machine.
_NODES = ("nodes", "num_nodes", "n_nodes", "nnodes", "num_machines")
# Accelerate's switch: the batch of the loader is shared among devices instead of repeated on each.
_SHARED = "split_batches"

_INDICES = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")  # of devices, such as [0, 1]

# Ray's processes; elsewhere, num_workers counts a loader's processes.
_RAY_WORKERS = re.compile(r"scaling_config[./]num_workers$")

BATCH_PARTS = {name: ours for ours, theirs in _ALIASES.items() for name in (ours, *theirs)}


@cache
def part_of_batch(name: str) -> str | None:
    return WORLD if _RAY_WORKERS.search(name) else BATCH_PARTS.get(_plain(name))


def may_divide_batch(name: str) -> bool:
    return _plain(name) in (*_NODES, _SHARED)


def is_about_batch(name: str) -> bool:
    return name == BATCH or part_of_batch(name) is not None or may_divide_batch(name)


@cache
def _plain(name: str) -> str:
    return re.split(r"[./]", name)[-1].lower().replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBatch:
    """The batch size of a run. ``parts`` and ``labels`` map bssearch's names to values and to the file's names."""

    origin: str
    parts: Mapping[str, int]
    labels: Mapping[str, str]

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str, label: Callable[[str], str] = str) -> GivenBatch:
        parts: dict[str, int] = {}
        labels: dict[str, str] = {}
        for name, value in values.items():
            if _plain(name) in _NODES and str(value) not in ("", "1", "1.0", "None"):
                raise UsageError(
                    f"{label(name)} = {value}: the total number of devices is unknown, because the number of devices "
                    f"may be per node ({origin})",
                    hint=f"give the total number as {WORLD}, without {label(name)}",
                )
            if _plain(name) == _SHARED and str(value).lower() in ("true", "1", "1.0", "yes"):
                raise UsageError(
                    f"{label(name)} = {value}: the devices may share one batch instead of having separate batches "
                    f"({origin})",
                    hint=f"give {STEP_BATCH}, the samples of an optimizer step, without {WORLD} and {label(name)}",
                )
            ours = BATCH if name == BATCH else part_of_batch(name)
            if ours is None or value is None or value == "":
                continue
            text = str(value)
            if ours == WORLD and _INDICES.fullmatch(text):
                text = str(text.count(",") + 1)
            number = integer(text, label(name), origin, low=1)
            if parts.get(ours, number) != number:
                raise UsageError(
                    f"{labels[ours]} = {parts[ours]} and {label(name)} = {number} differ; delete the wrong value "
                    f"({origin})"
                )
            parts[ours], labels[ours] = number, label(name)
        return cls(origin=origin, parts=parts, labels=labels)

    @property
    def is_known(self) -> bool:
        return bool({BATCH, MICRO, STEP_BATCH} & self.parts.keys())

    @property
    def factor(self) -> int:
        """Micro-batches per step over all devices. An unknown factor counts as 1."""
        return self.parts.get(ACCUMULATION, 1) * self.parts.get(WORLD, 1)

    @property
    def is_open(self) -> bool:
        """True if the batch size is unclear: per device or per step."""
        return BATCH in self.parts and not {MICRO, STEP_BATCH} & self.parts.keys()

    def in_words(self, *names: str) -> str:
        return " and ".join(f"{self.labels[name]} = {self.parts[name]}" for name in names if name in self.parts)


def step_batches(given: Sequence[GivenBatch], rename: str, add: str = "") -> tuple[list[dict[str, int]], list[str]]:
    """Return each run's batch size, micro-batch size, accumulation steps and world size, and notes.

    ``rename`` is a hint with the fields ``{theirs}`` and ``{ours}``. ``add`` is a hint with a field for a missing
    factor.
    """
    open_ones = [one for one in given if one.is_open]
    per_device, why = _is_per_device(open_ones, rename)
    known = {name for one in given for name in one.parts}
    made = {id(one): _batch(one, known, per_device) for one in {id(one): one for one in given}.values()}
    notes = []
    if why and per_device:
        notes.append(
            f"assuming that batch_size is per device, because {why}; a step has batch_size × {_factors(open_ones)} "
            f"samples; if batch_size is per step, {_renamed(open_ones[0], rename, STEP_BATCH)}"
        )
    elif why:
        notes.append(
            f"assuming that batch_size is per step, because {why}; "
            f"if batch_size is per device, {_renamed(open_ones[0], rename, MICRO)}"
        )
    if products := [one for one in given if not {BATCH, STEP_BATCH} & one.parts.keys()]:
        assumed = [name for name in (ACCUMULATION, WORLD) if name not in known]
        notes.append(
            f"batch_size = {MICRO} × {ACCUMULATION} × {WORLD} in {len(products)} of {len(given)} runs"
            + (f", with {' and '.join(assumed)} = 1, because no run has a value" if assumed else "")
            + (f"; for another value, add {' '.join(map(add.format, assumed))}" if assumed and add else "")
        )
    return [made[id(one)] for one in given], notes


def _is_per_device(given: Sequence[GivenBatch], rename: str) -> tuple[bool, str]:
    several = [one for one in given if one.factor > 1]
    if not several:
        return False, ""
    for one in several:
        if one.parts[BATCH] % one.factor:
            words = f"{_factors([one])} = {one.factor}"
            return True, f"{one.in_words(BATCH)} is not a multiple of {words} ({one.origin})"
    sizes, factors = {one.parts[BATCH] for one in given}, {one.factor for one in given}
    if len(sizes) == 1 and len(factors) > 1:
        return True, f"batch_size is {min(sizes)} in all runs, and {_factors(several)} varies"
    micro = {one.parts[BATCH] // one.factor for one in given}
    if len(micro) == 1 and len(factors) > 1:
        return False, f"batch_size divided by {_factors(several)} is {min(micro)} in all runs"
    first = several[0]
    raise UsageError(
        f"{first.in_words(BATCH)} may be per device or per step, with "
        f"{first.in_words(ACCUMULATION, WORLD)} ({first.origin})",
        hint=f"if the batch size is per device, {_renamed(first, rename, MICRO)}; if the batch size is per step, "
        f"{_renamed(first, rename, STEP_BATCH)}",
    )


def _renamed(one: GivenBatch, rename: str, ours: str) -> str:
    return rename.format(theirs=one.labels[BATCH], ours=ours)


def _factors(given: Iterable[GivenBatch]) -> str:
    labels = dict.fromkeys(one.labels[name] for one in given for name in (ACCUMULATION, WORLD) if name in one.parts)
    return " × ".join(labels)


def _batch(one: GivenBatch, known: set[str], per_device: bool) -> dict[str, int]:
    parts = one.parts
    micro = parts.get(MICRO, parts.get(BATCH) if per_device and one.is_open else None)
    batch = None if micro is not None and MICRO not in parts else parts.get(STEP_BATCH, parts.get(BATCH))
    if batch is None:
        micro = micro or parts[MICRO]
        for name in (ACCUMULATION, WORLD):
            require(
                name not in known or name in parts,
                f"the batch size is unknown because {name} is missing; add {name} ({one.origin})",
            )
        batch = micro * one.factor
        require(
            batch <= LARGEST,
            f"batch_size = {batch} must be <= {LARGEST}: "
            f"{one.in_words(BATCH, MICRO, ACCUMULATION, WORLD)} ({one.origin})",
        )
        return _whole_split(batch, micro, parts)
    if STEP_BATCH in parts and BATCH in parts and micro is None and parts[BATCH] != batch:
        micro = parts[BATCH]  # beside a batch per step, the batch size is per device
    found = _whole_split(batch, micro, parts)
    require(
        found[MICRO] * found[ACCUMULATION] * found[WORLD] == batch and parts.get(BATCH, batch) in (batch, micro),
        f"{one.in_words(STEP_BATCH, BATCH, MICRO, ACCUMULATION, WORLD)} do not fit: the batch size per step must be "
        f"{' × '.join([MICRO, ACCUMULATION, WORLD])} ({one.origin})",
        hint="correct or remove the wrong value",
    )
    return found


def _whole_split(batch: int, micro: int | None, parts: Mapping[str, int]) -> dict[str, int]:
    world = parts.get(WORLD)
    if micro is None:
        micro = batch // (parts.get(ACCUMULATION, 1) * (world or 1))
    accumulation = parts.get(ACCUMULATION) or max(1, batch // (micro * (world or 1) or 1))
    return {
        BATCH: batch,
        MICRO: micro,
        ACCUMULATION: accumulation,
        WORLD: world or max(1, batch // (micro * accumulation or 1)),
    }


@dataclass(frozen=True, slots=True)
class Studies:
    """Imported studies, and notes. If ``dry_run``, the caller stores no study."""

    studies: tuple[FinishedStudy, ...]
    notes: tuple[str, ...]
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class WholeStudies:
    """Whole studies. ``name`` renames the first study if it is new. If ``dry_run``, the caller stores no study."""

    copies: Sequence[Copy]
    notes: Sequence[str]
    name: str | None
    dry_run: bool


# The option of importers that make studies.
StudyName = Annotated[str | None, Option("Name of the study.", shown_default="the file's")]


class Importer(Protocol):
    """A registered function that makes studies from a file.

    The function's docstring is the help text. Parameters annotated with `Option` become the command's arguments and
    options.
    """

    def __call__(self, file: Path, *, name: str | None = None) -> Studies | WholeStudies:
        """Return the studies, of which the caller stores all or none."""


def import_study(
    file: Annotated[
        list[str],
        Option(
            "Files of `bssearch export STUDY --to study`, and databases, which bssearch only reads.",
            metavar="FILE|URL…",
        ),
    ],
    *,
    name: Annotated[
        str | None,
        Option("Name of the first study, if the study is new.", shown_default="unchanged", flag="--as"),
    ] = None,
    studies: Annotated[
        list[str] | None,
        Option("Name of a study to import; may be repeated.", metavar="NAME", shown_default="all", flag="--study"),
    ] = None,
    dry_run: Annotated[bool, Option("Print the imports, but store no study.", flag="--dry-run")] = False,
) -> WholeStudies:
    """Import whole studies, or the new parts of stored studies.

    An import stores all studies or no study. A second import of the same file has no effect. The import fails if
    a trial differs from the stored trial.
    """
    from bssearch.spec import check_study_name
    from bssearch.storage.transfer.study_copy import read_study

    if name is not None:
        check_study_name(name)
    copies: list[Copy] = []
    notes: list[str] = []
    for source in file:
        url = _url_of(source)
        copies += [read_study(Path(source))] if url is None else _of_database(url, studies, notes)
    if studies:
        copies = [copy for copy in copies if copy.name in studies]
        for missing in {*studies} - {copy.name for copy in copies}:
            raise NotFoundError(f"no study {missing!r} in {', '.join(map(_shown, file))}; correct --study")
    notes += [
        f"study {copy.name} of {copy.source}: skipped {plural(len(copy.running), 'running trial')}; import the study "
        "again after these trials end"
        for copy in copies
        if copy.running
    ]
    return WholeStudies(copies, notes, name, dry_run)


def _url_of(source: str) -> str | None:
    if "://" in source:
        return source
    with suppress(OSError):  # `read_study` names the fault
        return f"sqlite:///{source}" if is_sqlite(Path(source)) else None
    return None


def _of_database(url: str, names: Collection[str] | None, notes: list[str]) -> list[Copy]:
    from bssearch.storage.connection.engine import parse_url, sqlite_file
    from bssearch.storage.repository import open_store

    file = sqlite_file(parse_url(url))
    require(file is None or file.exists(), f"no file {_shown(url)}; correct the URL", error=NotFoundError)
    with open_store(url, write=False) as store:
        there = {one.name: one for one in store.studies.summaries()}
        if names:
            return store.transfer.read([name for name in there if name in names], _shown(url))
        archived = sorted(name for name, one in there.items() if one.archived_at is not None)
        notes += [
            f"{_shown(url)}: skipped archived study {name}; import the study with --study {name}" for name in archived
        ]
        return store.transfer.read(None, _shown(url))


def _shown(source: str) -> str:
    from bssearch.storage.connection.engine import masked, parse_url

    return masked(parse_url(source)) if "://" in source else source
