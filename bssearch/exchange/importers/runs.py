"""``import runs``: a CSV table with one run per row."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

from bssearch.errors import UsageError
from bssearch.exchange.importers.imported_run import (
    LARGEST,
    MICRO,
    SPLIT,
    STEP_BATCH,
    TYPED,
    GivenBatch,
    ImportedRun,
    RunTable,
    csv_rows,
    integer,
    make_configuration,
    number,
    parameter_value,
    part_of_batch,
    read_text,
    step_batches,
)
from bssearch.exchange.importers.importer import Studies, StudyName
from bssearch.exchange.recorded_curves import check_separator
from bssearch.records import LARGEST_METRIC, Goal, ParameterValue, is_metric
from bssearch.registry import Option


class FiguresAt(StrEnum):
    """When seconds and steps of a run that reached the target were taken."""

    TARGET = "target"
    END = "end"


Measure = Literal["steps", "train_seconds"]
# Relative difference of two equal ends: clocks differ, step counts do not.
TOLERANCE = {"steps": 0.0, "train_seconds": 0.01}

MOST_ROUNDING = 1.25  # Largest ratio of samples in equal epochs: the last batch may be partial or dropped

# Ratios of seconds for equal steps: at most for repeats, at least for other configurations.
SAME_PACE, OTHER_PACE = 1.05, 1.25

REMEDY = (
    "put the values at the first evaluation that met the target into the columns steps and train_seconds; if they "
    f"are, add --figures-at {FiguresAt.TARGET}"
)


def check_figures(runs: Sequence[ImportedRun], figures_at: FiguresAt | None) -> None:
    """Raise `UsageError` if steps or seconds may be of whole trainings, unless ``figures_at`` settles it."""
    if figures_at is FiguresAt.TARGET:
        return
    if figures_at is FiguresAt.END:
        raise UsageError(
            f"--figures-at {FiguresAt.END}: a table does not tell when a run reached the target before its end",
            hint=REMEDY,
        )
    measures: tuple[Measure, ...] = ("steps", "train_seconds")
    for measure in measures:
        evidence = _evidence(runs, measure)
        if evidence and not (measure == "steps" and _seconds_differ(runs)):
            raise UsageError(
                f"{measure} may be measured at the end of training instead of the target: {evidence}",
                hint=REMEDY,
            )


@dataclass(frozen=True, slots=True)
class _Group:
    batch_size: int
    reached: list[float]
    missed: list[float]
    configurations: int
    tolerance: float

    @property
    def end(self) -> float:
        return median_low(self.reached) if self.tolerance else Counter(self.reached).most_common(1)[0][0]

    def at_end(self, figures: Sequence[float]) -> int:
        return sum(math.isclose(one, self.end, rel_tol=self.tolerance, abs_tol=0.0) for one in figures)


def _evidence(runs: Sequence[ImportedRun], measure: Measure) -> str:
    """Return evidence that runs did not end at the target; "" if some ended earlier."""
    groups = list(_groups(runs, measure))
    reached = sum(len(one.reached) for one in groups)
    if reached < 2 or sum(one.at_end(one.reached) for one in groups) < 0.9 * reached:
        return ""
    if any(missed > one.end * (1 + one.tolerance) for one in groups for missed in one.missed):
        return ""  # a run that missed the target had more time than those that reached it
    with_missed = [one for one in groups if one.at_end(one.missed)]
    if with_missed:
        first = max(with_missed, key=lambda one: len(one.reached))
        return (
            f"at batch size {first.batch_size}, {_ended(first.at_end(first.reached), 'reached')} and "
            f"{_ended(first.at_end(first.missed), 'missed')} it ended at {measure} = {first.end:g}"
        )
    sizes = {one.batch_size for one in groups}
    fewest = min(len(one.reached) for one in groups)
    same = _same_budget(groups, measure) if len(sizes) > 1 else ""
    if same and (fewest > 1 or len(sizes) > 2):
        return f"all {reached} runs that reached it, at {len(sizes)} batch sizes, have {same}"
    if len(sizes) > 1 and fewest > 2 and all(one.configurations > 1 for one in groups):
        return (
            f"at each of {len(sizes)} batch sizes all runs that reached it ended at the same {measure}, whatever their "
            "parameters"
        )
    return ""


def _ended(count: int, how: str) -> str:
    return f"{count} run{'s' * (count > 1)} that {how}"


def _groups(runs: Sequence[ImportedRun], measure: Measure) -> Iterator[_Group]:
    groups: dict[tuple[int, str, str], list[ImportedRun]] = {}
    for run in runs:
        if getattr(run, measure):
            groups.setdefault(_key(run), []).append(run)
    for (batch_size, *_), group in groups.items():
        reached = [run for run in group if run.reached]
        if reached:
            yield _Group(
                batch_size=batch_size,
                reached=[getattr(run, measure) for run in reached],
                missed=[getattr(run, measure) for run in group if not run.reached],
                configurations=len({run.configuration.key for run in reached}),
                tolerance=TOLERANCE[measure],
            )


def _key(run: ImportedRun) -> tuple[int, str, str]:
    epochs = {name: value for name, value in run.configuration.parameters.items() if "epoch" in name.lower()}
    return run.configuration.batch_size, run.device or "", repr(sorted(epochs.items()))


def _seconds_differ(runs: Sequence[ImportedRun]) -> bool:
    """True if seconds differ by configuration: equal steps may then be a setting."""
    seconds: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        if run.reached and run.train_seconds:
            sizes = seconds.setdefault(run.configuration.batch_size, {})
            sizes.setdefault(run.configuration.key, []).append(run.train_seconds)
    repeated = [list(one.values()) for one in seconds.values() if any(len(times) > 1 for times in one.values())]
    noise = max((max(times) / min(times) for one in repeated for times in one), default=math.inf)
    apart = max((max(map(min, one)) / min(map(max, one)) for one in repeated), default=1.0)
    return noise < SAME_PACE and apart > OTHER_PACE


def _same_budget(groups: Sequence[_Group], measure: Measure) -> str:
    ends = [one.end for one in groups]
    if max(ends) <= min(ends) * (1 + TOLERANCE[measure]):
        return f"{measure} = {ends[0]:g}"
    if measure == "steps" and _are_same_epochs({one.batch_size: int(one.end) for one in groups}):
        samples = [one.batch_size * one.end for one in groups]
        low, high = min(samples), max(samples)
        return f"the same samples, steps × batch_size = {low:,.0f}" + (f" to {high:,.0f}" if high > low else "")
    return ""


def _are_same_epochs(steps: dict[int, int]) -> bool:
    samples = [size * count for size, count in steps.items()]
    if max(samples) > MOST_ROUNDING * min(samples):
        return False
    common = math.gcd(*steps.values())
    divisors = {one for low in range(1, math.isqrt(common) + 1) if common % low == 0 for one in (low, common // low)}
    for epochs in divisors:
        whole = [(size * count // epochs, size) for size, count in steps.items()]
        last_is_kept = max(end - size for end, size in whole) < min(end for end, _ in whole)
        last_is_left_out = max(end for end, _ in whole) < min(end + size for end, size in whole)
        if last_is_kept or last_is_left_out:
            return True
    return False


COLUMNS = ("batch_size", "seed", "reached", "steps", "train_seconds", "final_metric", "device", "precision")
REQUIRED = ("batch_size", "reached")
PREFIX = "param."
ALIASES = {"param.lr": "param.learning_rate"}
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LARGEST_SEED = 2**62  # Leaves room in 64 bits to number repeated runs

LONGEST_S = 1e9  # 30 years: more is a mistake

MOST_RUNS = 1_000_000


class RunsObjective(StrEnum):
    """Objectives that runs can answer."""

    TIME_TO_TARGET = "time_to_target"
    SAMPLES_TO_TARGET = "samples_to_target"


def import_runs(
    file: Annotated[Path, Option("A CSV file with one row per run.", metavar="FILE.csv")],
    *,
    name: StudyName = None,
    metric: Annotated[str, Option("Name of the metric in final_metric.")] = "metric",
    target: Annotated[
        float | None,
        Option("Target value of the metric.", shown_default="the worst final_metric of a run that reached it"),
    ] = None,
    goal: Annotated[Goal, Option("Direction in which the metric improves.")] = Goal.MAXIMIZE,
    objective: Annotated[RunsObjective, Option("What the best batch size minimizes.")] = RunsObjective.TIME_TO_TARGET,
    default_batch: Annotated[int | None, Option("Current batch size, the baseline of comparisons.")] = None,
    precision: Annotated[str | None, Option("Precision of runs without one in the table.")] = None,
    figures_at: Annotated[
        FiguresAt | None,
        Option(
            "Moment at which steps and train_seconds of runs that reached the target were measured.",
            shown_default="target, unless all runs have a common end",
        ),
    ] = None,
) -> Studies:
    """Make a study from a table of runs.

    Each device and precision gets a separate study. Columns: batch_size, reached (true or false), and optionally seed,
    steps and train_seconds (to the target, or of the whole run if missed), final_metric, device, precision,
    param.learning_rate, param.NAME. Leave unknown cells empty. micro_batch_size, accumulation_steps and world_size may
    replace batch_size.
    """
    from bssearch.exchange.importers.imported_studies import (  # SQLAlchemy, which `import --help` does without
        find_target,
        make_studies,
    )

    table = read_runs(file)
    runs = [run if run.precision else replace(run, precision=precision) for run in table.runs]
    wanted, notes = find_target(runs, metric, target, goal)
    check_figures(runs, figures_at)
    made = make_studies(
        runs, name=name or file.stem, target=wanted, objective=objective.value, default_batch=default_batch
    )
    return replace(made, notes=(*table.notes, *notes, *made.notes))


def read_runs(path: Path) -> RunTable:
    """Read a CSV file of `COLUMNS` and ``param.NAME``; raise `UsageError` with place, value and bound."""
    return parse_runs(read_text(path), str(path))


def parse_runs(text: str, source: str) -> RunTable:
    """Parse CSV; ``source`` names it. See `read_runs`."""
    rows = csv_rows(text, source)
    line, header = next(rows, (1, []))
    check_separator(header, f"{source}:{line}")
    columns = _columns(header, f"{source}:{line}")
    table: list[_Row] = []
    for line, cells in rows:
        origin = f"{source}:{line}"
        if len(cells) != len(columns):
            raise UsageError(f"the row has {len(cells)} cells, but the header has {len(columns)} columns ({origin})")
        if len(table) == MOST_RUNS:
            raise UsageError(f"more than {MOST_RUNS:,} runs ({origin})", hint="import them as several studies")
        table.append(_Row(dict(zip(columns, (cell.strip() for cell in cells), strict=True)), origin))
    if not table:
        raise UsageError(f"no runs: {source} has no row under its header")
    batches = step_batches([row.batch() for row in table], "name the column {}")
    runs = [row.run(batch) for row, batch in zip(table, batches.batches, strict=True)]
    notes = [f"skipped column {number}, which has no name" for number, name in enumerate(header, 1) if not name]
    notes += batches.notes
    without_metric = [
        row.origin
        for row, run in zip(table, runs, strict=True)
        if run.final_metric is None and row.cells.get("final_metric")
    ]
    if without_metric:
        notes.append(
            f"final_metric is NaN (unknown) in {len(without_metric)} of {len(runs)} runs "
            f"(the first: {without_metric[0]})"
        )
    return RunTable(tuple(runs), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Row:
    cells: Mapping[str, str]
    origin: str

    def batch(self) -> GivenBatch:
        given = {name.removeprefix(PREFIX): text for name, text in self.cells.items()}
        labels = {name.removeprefix(PREFIX): name for name in self.cells}
        batch = GivenBatch.of(given, self.origin, lambda name: labels[name])
        if not batch.is_known:
            integer(self._text("batch_size"), "batch_size", self.origin, low=1)
        return batch

    def run(self, batch: Mapping[str, int]) -> ImportedRun:
        reached = BOOLEANS.get(self._text("reached").lower())
        if reached is None:
            raise UsageError(
                f"reached = {self._text('reached')!r} must be one of {', '.join(BOOLEANS)} ({self.origin})"
            )
        return ImportedRun(
            origin=self.origin,
            configuration=make_configuration(
                batch["batch_size"], {**self._parameters(), **batch}, self.origin, PREFIX.__add__
            ),
            seed=self._integer("seed", low=0, high=LARGEST_SEED),
            reached=reached,
            steps=self._integer("steps", low=1 if reached else 0),
            train_seconds=self._train_seconds(reached),
            final_metric=self._final_metric(),
            device=self._text("device") or None,
            precision=self._text("precision") or None,
        )

    def _text(self, column: str) -> str:
        return self.cells.get(column, "")

    def _integer(self, column: str, *, low: int, high: int = LARGEST) -> int | None:
        text = self._text(column)
        return integer(text, column, self.origin, low=low, high=high) if text else None

    def _train_seconds(self, reached: bool) -> float | None:
        text = self._text("train_seconds")
        if not text:
            return None
        seconds = number(text)
        if not (0 < seconds <= LONGEST_S or (seconds == 0 and not reached)):
            bound = f"> 0 and <= {LONGEST_S:g} if the target was reached" if reached else f"in [0, {LONGEST_S:g}]"
            raise UsageError(f"train_seconds = {text!r} must be {bound} ({self.origin})")
        return seconds

    def _final_metric(self) -> float | None:
        text = self._text("final_metric")
        if not text or text.lower().lstrip("+-") == "nan":
            return None
        metric = number(text)
        if not is_metric(metric):
            raise UsageError(
                f"final_metric = {text!r} must be a number in [{-LARGEST_METRIC:g}, {LARGEST_METRIC:g}], NaN, or empty "
                f"if unknown ({self.origin})"
            )
        return metric

    def _parameters(self) -> dict[str, ParameterValue]:
        texts = {
            name.removeprefix(PREFIX): text
            for name, text in self.cells.items()
            if name.startswith(PREFIX) and part_of_batch(name) is None
        }
        return {
            name: parameter_value(text, PREFIX + name, self.origin) if text else None for name, text in texts.items()
        }


def _columns(header: list[str], origin: str) -> list[str]:
    names = [ALIASES.get(name.strip(), name.strip()) for name in header]
    for name, count in Counter(name for name in names if name).items():
        if count > 1:
            raise UsageError(f"the header has column {name!r} {count} times ({origin})")
        if name not in COLUMNS and part_of_batch(name) is None:
            _check_parameter(name, origin)
    parts = {part_of_batch(name) for name in names}
    missing = [
        name for name in REQUIRED if name not in names and not (name == "batch_size" and {MICRO, STEP_BATCH} & parts)
    ]
    if missing:
        there_are = f"it has {', '.join(map(repr, names))}" if any(names) else "it has no columns"
        raise UsageError(
            f"the table lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}: {there_are} ({origin})",
            hint=f"the columns are {', '.join(COLUMNS)}, {PREFIX}NAME, separated by commas; {', '.join(SPLIT)} may "
            "replace batch_size",
        )
    return [name or f"#{number}" for number, name in enumerate(names)]


def _check_parameter(name: str, origin: str) -> None:
    parameter = name.removeprefix(PREFIX)
    if name == PREFIX or (name != parameter and parameter in COLUMNS):
        raise UsageError(f"{name!r} is not a parameter ({origin})", hint=f"name the column {parameter or 'NAME'}")
    if name == parameter:  # without it, runs with different parameters would count as repeats
        near = difflib.get_close_matches(name, [*COLUMNS, *TYPED, *SPLIT, "lr"], n=1)
        guess = near[0] if near and near[0] in COLUMNS else f"{PREFIX}{near[0] if near else name}"
        raise UsageError(
            f"unknown column {name!r} ({origin}); did you mean {guess!r}?",
            hint=f"remove it; columns are {', '.join(COLUMNS)}, or {PREFIX}NAME for a parameter, separated by commas",
        )
