"""``import runs``: a CSV table with one run per row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

from bssearch.errors import UsageError, require
from bssearch.exchange.importers.columns import (
    CONSTRAINT,
    HINT,
    PREFIX,
    RESULT,
    STATE,
    Column,
    checked_seconds,
    fraction,
    recognize,
    seconds,
)
from bssearch.exchange.importers.imported_run import (
    LARGEST,
    MICRO,
    SPLIT,
    STEP_BATCH,
    GivenBatch,
    ImportedRun,
    RunTable,
    Studies,
    StudyName,
    comma_hint,
    csv_rows,
    integer,
    make_configuration,
    number,
    parameter_value,
    part_of_batch,
    read_text,
    step_batches,
)
from bssearch.records import LARGEST_METRIC, Configuration, Goal, ParameterValue, Target, grouped, is_metric
from bssearch.records.text import plural
from bssearch.registry import Option


class FiguresAt(StrEnum):
    """Whether seconds and steps of a run that reached the target end at the target or with the run."""

    TARGET = "target"
    END = "end"


Measure = Literal["steps", "train_seconds"]
# Relative difference of two equal ends: clocks differ, step counts do not.
TOLERANCE: Mapping[Measure, float] = {"steps": 0.0, "train_seconds": 0.01}

MOST_ROUNDING = 1.25  # Largest ratio of samples in equal epochs: the last batch may be partial or dropped

REMEDY = (
    "put the values at the first evaluation that met the target into the columns steps and train_seconds; if the "
    f"columns hold these values, add --figures-at {FiguresAt.TARGET}"
)


def check_figures(runs: Sequence[ImportedRun], figures_at: FiguresAt | None) -> None:
    """Raise `UsageError` if steps or seconds may end after the target, unless ``figures_at`` is ``target``."""
    if figures_at is FiguresAt.TARGET:
        return
    require(
        figures_at is not FiguresAt.END,
        f"--figures-at {FiguresAt.END}: values at the end of runs do not show when the runs reached the target",
        hint=REMEDY,
    )
    together = _together(runs)
    for measure in TOLERANCE:
        evidence = _evidence([*_groups(together, measure)], measure)
        require(
            not evidence,
            f"{measure} may be measured at the end of training instead of the target: {evidence}",
            hint=REMEDY,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    batch_size: int
    reached: list[float]
    missed: list[float]
    is_varied: bool  # whether the runs that reached the target have several configurations
    end: float
    tolerance: float

    def at_end(self, figures: Sequence[float]) -> int:
        return sum(math.isclose(one, self.end, rel_tol=self.tolerance, abs_tol=0.0) for one in figures)


def _evidence(groups: Sequence[_Group], measure: Measure) -> str:
    # Evidence that runs did not end at the target; "" if some ended earlier
    reached, ended = sum(len(one.reached) for one in groups), sum(one.at_end(one.reached) for one in groups)
    if reached < 2 or ended < 0.9 * reached:
        return ""
    if any(missed > one.end * (1 + one.tolerance) for one in groups for missed in one.missed):
        return ""  # a run that missed the target had more time than runs that reached the target
    if with_missed := [one for one in groups if one.at_end(one.missed)]:
        first = max(with_missed, key=lambda one: len(one.reached))
        return (
            f"at batch size {first.batch_size}, {plural(first.at_end(first.reached), 'run')} that reached the target "
            f"and {plural(first.at_end(first.missed), 'run')} that missed the target ended at {measure} = "
            f"{first.end:g}"
        )
    sizes = {one.batch_size for one in groups}
    fewest = min(len(one.reached) for one in groups)
    same = _same_budget(groups, measure) if len(sizes) > 1 else ""
    if same and (fewest > 1 or len(sizes) > 2):
        return f"{ended} of {reached} runs that reached the target, at {len(sizes)} batch sizes, have {same}"
    if len(sizes) > 1 and fewest > 2 and all(one.is_varied for one in groups):
        return (
            f"{ended} of {reached} runs that reached the target, at {len(sizes)} batch sizes, have the same "
            f"{measure} as runs with other parameters at the same batch size"
        )
    return ""


def _together(runs: Sequence[ImportedRun]) -> list[list[ImportedRun]]:
    # Runs of a batch size, device and number of epochs
    def kind(run: ImportedRun) -> tuple[int, str, str]:
        epochs = {name: one for name, one in run.configuration.parameters.items() if "epoch" in name.lower()}
        return run.configuration.batch_size, run.device or "", repr(sorted(epochs.items()))

    return list(grouped((kind(run), run) for run in runs).values())


def _groups(together: Sequence[Sequence[ImportedRun]], measure: Measure) -> Iterator[_Group]:
    tolerance = TOLERANCE[measure]
    for runs in together:
        group = [run for run in runs if getattr(run, measure)]
        if reached := [run for run in group if run.reached]:
            figures = [getattr(run, measure) for run in reached]
            yield _Group(
                batch_size=reached[0].configuration.batch_size,
                reached=figures,
                missed=[getattr(run, measure) for run in group if not run.reached],
                is_varied=any(run.configuration != reached[0].configuration for run in reached),
                end=median_low(figures) if tolerance else Counter(figures).most_common(1)[0][0],
                tolerance=tolerance,
            )


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


BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LARGEST_SEED = 2**62  # Leaves room in 64 bits to number repeated runs

MOST_RUNS = 1_000_000


RunsObjective = Literal["time_to_target", "samples_to_target"]  # objectives that runs can answer


def import_runs(
    file: Annotated[Path, Option("A CSV file with one row per run.", metavar="FILE.csv")],
    *,
    name: StudyName = None,
    metric: Annotated[str, Option("Name of the metric in final_metric, or of the metric's column.")] = "metric",
    target: Annotated[
        float | None,
        Option("Target value of the metric.", shown_default="the worst final_metric of a run that reached the target"),
    ] = None,
    goal: Annotated[
        Goal | None, Option("Direction in which the metric improves.", shown_default=Goal.MAXIMIZE.value)
    ] = None,
    column: Annotated[
        list[str] | None,
        Option("Rename a column, as in lr=param.learning_rate; may be repeated.", metavar="THEIRS=OURS"),
    ] = None,
    ignore: Annotated[list[str] | None, Option("Leave a column out; may be repeated.", metavar="NAME")] = None,
    objective: Annotated[RunsObjective, Option("Cost to minimize.")] = "time_to_target",
    default_batch: Annotated[int | None, Option("Current batch size, the baseline of comparisons.")] = None,
    precision: Annotated[str | None, Option("Precision of runs without a precision in the table.")] = None,
    figures_at: Annotated[
        FiguresAt | None,
        Option(
            "Whether steps and train_seconds of runs that reached the target end at the target or with the run.",
            shown_default="target, if the table is clear",
        ),
    ] = None,
) -> Studies:
    """Make a study from a table of runs.

    Each pair of device and precision gets a separate study. Columns: batch_size and reached (true or false). Optional
    columns: seed, steps, train_seconds, final_metric, last_miss_step or eval_every_steps, device, precision,
    param.learning_rate, param.NAME. steps and train_seconds cover the whole run if the run missed the target. Leave
    unknown cells empty. micro_batch_size, accumulation_steps and world_size may replace batch_size. --target and
    final_metric may replace reached.
    """
    from bssearch.exchange.importers.imported_studies import (  # SQLAlchemy, which `import --help` does without
        find_target,
        make_studies,
    )

    table = parse_runs(
        read_text(file), str(file), metric=metric, target=target, goal=goal, column=column or (), ignore=ignore or ()
    )
    runs = [run if run.precision else replace(run, precision=precision) for run in table.runs]
    wanted, notes = find_target(runs, metric, target, goal or Goal.MAXIMIZE)
    require(figures_at is FiguresAt.TARGET or not table.unclear, f"{file}: {table.unclear}", hint=REMEDY)
    check_figures(runs, figures_at)
    runs, more = with_last_misses(runs)
    made = make_studies(runs, name=name or file.stem, target=wanted, objective=objective, default_batch=default_batch)
    return replace(made, notes=(*table.columns, *table.notes, *notes, *more, *made.notes))


def parse_runs(
    text: str,
    source: str,
    *,
    metric: str = "metric",
    target: float | None = None,
    goal: Goal | None = None,
    column: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> RunTable:
    """Parse a table of runs. If ``reached`` is missing, the metric shows which runs reached ``target``."""
    line, header, found = _cells(text, source)
    origin = f"{source}:{line}"
    columns = recognize(header, [cells for _, cells in found], origin, metric=metric, mapped=column, ignored=ignore)
    _check_columns(columns, origin, None if target is None else metric)
    require(found, f"no runs: {source} has no row under its header; add a row for each run")
    notes = list(_copies(found, source))
    labels = {one.ours: one.theirs for one in columns if one.ours is not None}
    table = _rows(columns, found, source, labels)
    ended = [row for row in table if row.cells.get(STATE, "").lower() not in UNFINISHED]
    if len(ended) < len(table):
        notes.append(
            f"skipped {len(table) - len(ended)} of {len(table)} runs as unfinished, by column {labels[STATE]!r}"
        )
    is_constrained = any(one.startswith(CONSTRAINT) for one in labels)
    feasible = [row for row in ended if not row.violated()] if is_constrained else ended
    if len(feasible) < len(ended):
        notes.append(f"skipped {len(ended) - len(feasible)} of {len(ended)} runs, because they violate a constraint")
    ended, derived = feasible, None
    if "reached" not in labels:
        derived = Target(metric=metric, value=target or 0.0, goal=goal or Goal.MAXIMIZE)
        known = [row for row in ended if row.cells["final_metric"]]
        if len(known) < len(ended):
            notes.append(
                f"skipped {len(ended) - len(known)} of {len(ended)} runs, because {labels['final_metric']!r} is empty"
            )
        ended = known
        check_scale([row.final_metric() for row in ended], derived, goal, source)
        notes.append(f"reached means {derived.in_words}")
    skipped = "; ".join(note for note in notes if note.startswith("skipped"))
    require(ended, f"no runs to import in {source}: {skipped}", hint="add finished runs with their metric to the table")
    given: dict[tuple[str, ...], GivenBatch] = {}
    for row in ended:
        if row.parts not in given:
            given[row.parts] = row.batch()
    batches, assumed = step_batches([given[row.parts] for row in ended], "name the column {ours}")
    known_configurations: dict[tuple[str, ...], Configuration] = {}
    runs = [row.run(batch, derived, known_configurations) for row, batch in zip(ended, batches, strict=True)]
    notes += assumed
    without_metric = [run.origin for run, row in zip(runs, ended, strict=True) if row.lacks(run.final_metric)]
    if without_metric:
        notes.append(
            f"final_metric is NaN (unknown) in {len(without_metric)} of {len(runs)} runs (first: {without_metric[0]})"
        )
    return RunTable(tuple(runs), tuple(notes), _unclear(columns, runs, derived), tuple(one.sentence for one in columns))


def _cells(text: str, source: str) -> tuple[int, list[str], list[tuple[int, list[str]]]]:
    rows = csv_rows(text, source)
    line, header = next(rows, (1, []))
    other = next((one for one in ";\t|" if len(header) == 1 and one in header[0]), None)
    require(
        other is None,
        f"the columns are separated by {other!r}; expected commas ({source}:{line})",
        hint="write the table again with commas between columns, and points in decimal numbers",
    )
    found: list[tuple[int, list[str]]] = []
    for place, cells in rows:
        if len(cells) != len(header):
            raise UsageError(
                f"the row has {plural(len(cells), 'cell')}, but the header has {plural(len(header), 'column')} "
                f"({source}:{place})",
                hint="put a cell with a comma in quotes" if len(cells) > len(header) else "add the missing cells",
            )
        found.append((place, cells))
    require(
        len(found) <= MOST_RUNS,
        f"{source} has more than {MOST_RUNS:,} runs",
        hint="split the table into several studies",
    )
    return line, header, found


def _copies(found: Sequence[tuple[int, list[str]]], source: str) -> Iterator[str]:
    first = {tuple(texts): line for line, texts in reversed(found)}
    if copies := [line for line, texts in found if first[tuple(texts)] != line]:
        yield (
            f"{len(copies)} of {len(found)} rows are copies of other rows (first: {source}:{copies[0]}) and count as "
            "separate runs; remove accidental copies"
        )


def _rows(
    columns: Sequence[Column], found: Sequence[tuple[int, list[str]]], source: str, labels: Mapping[str, str]
) -> list[_Row]:
    taken = [(index, one.ours, one.read) for index, one in enumerate(columns) if one.ours is not None]
    parts = [ours for _, ours, _ in taken if ours == "batch_size" or part_of_batch(ours)]
    setting = [*parts, *(ours for _, ours, _ in taken if ours.startswith(PREFIX))]
    table = []
    for line, texts in found:
        cells = {ours: texts[index].strip() if read is None else read(texts[index]) for index, ours, read in taken}
        table.append(
            _Row(
                cells,
                f"{source}:{line}",
                labels,
                *(tuple([cells[one] for one in names]) for names in (parts, setting)),
            )
        )
    return table


def _unclear(columns: Sequence[Column], runs: Sequence[ImportedRun], derived: Target | None) -> str:
    # Why steps and seconds may not be to the target; "" if the table is clear
    figures = [one for one in columns if one.ours in ("steps", "train_seconds")]
    whole = [one.theirs for one in figures if one.is_whole]
    if not any(run.reached and (run.steps or run.train_seconds) for run in runs):
        return ""
    if whole:
        return (
            f"{' and '.join(whole)} {'cover' if whole[1:] else 'covers'} the whole run instead of ending at the target"
        )
    names = " and ".join(one.theirs for one in figures)
    return f"{names} may end at the target or with the run, because the table has no column reached" if derived else ""


UNFINISHED = {"crashed", "failed", "fail", "error", "killed", "running", "pending", "preempted", "waiting", "queued"}
LOSS = re.compile(r"(?:.*[/_. ])?(?:loss|error|err|perplexity|ppl|wer|cer|mse|rmse|mae|nll)", re.IGNORECASE)


def _check_columns(columns: Sequence[Column], origin: str, metric: str | None) -> None:
    there = {one.ours for one in columns}
    parts = {part_of_batch(one) for one in there if one}
    missing = [] if {"batch_size", MICRO, STEP_BATCH} & {*there, *parts} else ["'batch_size'"]
    names = [one.theirs for one in columns if one.theirs]
    if "reached" not in there and (metric is None or "final_metric" not in there):
        missing.append("'reached'")
    elif "reached" not in there and not {"steps", "train_seconds"} & there:
        missing.append("'steps' or 'train_seconds'")
    if missing:
        results = [one.theirs for one in columns if one.why == RESULT]
        raise UsageError(
            f"the table lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; existing columns: "
            f"{', '.join(map(repr, names)) or 'none'} ({origin})",
            hint=f"{HINT}; name a column with --column THEIRS=OURS; {', '.join(SPLIT)} may replace batch_size; "
            f"--target with --metric {' or '.join(map(repr, results)) or 'COLUMN'} may replace reached",
        )


FEW_SUMMED = 5.0  # metrics in a sum; in percent, such accuracies would be far below a target

NO_SHARES = (
    "give all values as fractions or all in percent; if the values are sums, as in the Trainer's "
    "hyperparameter_search, give the sum's name with --metric and the sum's target with --target"
)


def check_scale(metrics: Sequence[float | None], target: Target, goal: Goal | None, source: str) -> None:
    """Raise `UsageError` if a loss lacks a goal, a fraction exceeds 1, or metrics and target may differ in unit."""
    require(
        goal is not None or not LOSS.fullmatch(target.metric),
        f"metric {target.metric} has no goal, and its name suggests that lower values are better",
        hint=f"add --goal {Goal.MINIMIZE} or --goal {Goal.MAXIMIZE}",
    )
    known = [one for one in metrics if one is not None]
    if not known:
        return
    low, high = min(known), max(known)
    require(
        not target.is_in_other_unit(low, high) or (target.is_above_one(high) and high <= FEW_SUMMED),
        f"{target.metric} is {low:g} to {high:g}, but --target = {target.value:g}: the metric or the target may be in "
        f"percent ({source})",
        hint=f"use --target {target.in_unit_of(high):g}",
    )
    require(
        not target.is_above_one(high),
        f"{target.metric} is {low:g} to {high:g}, not fractions of 1 ({source})",
        hint=NO_SHARES,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    cells: Mapping[str, str]
    origin: str
    labels: Mapping[str, str]
    parts: tuple[str, ...]  # texts of the batch
    setting: tuple[str, ...]  # texts of the configuration

    def batch(self) -> GivenBatch:
        batch = GivenBatch.of(self.cells, self.origin, self.labels.__getitem__)
        if not batch.is_known:
            integer(self._text("batch_size"), self.labels.get("batch_size", "batch_size"), self.origin, low=1)
        return batch

    def run(
        self, batch: Mapping[str, int], derived: Target | None, known: dict[tuple[str, ...], Configuration]
    ) -> ImportedRun:
        metric = self.final_metric()
        if derived is None:
            reached = BOOLEANS.get(self._text("reached").lower())
        else:
            reached = metric is not None and derived.is_met_by(metric)
        if reached is None:
            raise UsageError(
                f"reached = {self._text('reached')!r} must be one of {', '.join(BOOLEANS)} ({self.origin})"
            )
        if self.setting not in known:
            known[self.setting] = make_configuration(
                batch, self._parameters(), self.origin, lambda name: self.labels.get(PREFIX + name, name)
            )
        steps = self._integer("steps", low=1 if reached else 0)
        return ImportedRun(
            origin=self.origin,
            configuration=known[self.setting],
            seed=self._integer("seed", low=0, high=LARGEST_SEED),
            reached=reached,
            steps=steps,
            last_miss_step=self._last_miss_step(steps) if reached and steps else None,
            train_seconds=self._train_seconds(reached),
            final_metric=metric,
            device=self._text("device") or None,
            precision=self._text("precision") or None,
        )

    def _text(self, column: str) -> str:
        return self.cells.get(column, "")

    def _integer(self, column: str, *, low: int, high: int = LARGEST) -> int | None:
        text = self.cells.get(column)
        return integer(text, self.labels[column], self.origin, low=low, high=high) if text else None

    def _last_miss_step(self, steps: int) -> int | None:
        every = self._integer("eval_every_steps", low=1)
        return self._integer("last_miss_step", low=0, high=steps - 1) if every is None else max(0, steps - every)

    def _train_seconds(self, reached: bool) -> float | None:
        text = self._text("train_seconds")
        if not text:
            return None
        return checked_seconds(seconds(text), text, self.labels["train_seconds"], reached, self.origin)

    def final_metric(self) -> float | None:
        text = self._text("final_metric")
        if not text or text.lower().lstrip("+-") == "nan":
            return None
        metric = fraction(text)
        if not is_metric(metric):
            raise UsageError(
                f"{self.labels['final_metric']} = {text!r} must be a number in "
                f"[{-LARGEST_METRIC:g}, {LARGEST_METRIC:g}], a percentage, NaN, or empty if unknown ({self.origin})",
                hint=comma_hint(text),
            )
        return metric

    def violated(self) -> bool:
        texts = [text for name, text in self.cells.items() if name.startswith(CONSTRAINT)]
        return any(number(one) > 0 for text in texts for one in re.split(r"[\s,()\[\]]+", text))

    def lacks(self, metric: float | None) -> bool:
        return metric is None and bool(self.cells.get("final_metric"))

    def _parameters(self) -> dict[str, ParameterValue]:
        return {
            name.removeprefix(PREFIX): parameter_value(text, name, self.origin) if text else None
            for name, text in self.cells.items()
            if name.startswith(PREFIX)
        }


def with_last_misses(runs: Sequence[ImportedRun]) -> tuple[list[ImportedRun], list[str]]:
    """Estimate each missing ``last_miss_step`` from the common divisor of the steps at a batch size."""
    steps = grouped(
        (run.configuration.batch_size, run.steps)
        for run in runs
        if run.steps and (not run.reached or run.last_miss_step is None)
    )
    grids = {size: math.gcd(*there) for size, there in steps.items() if len(set(there)) > 1}
    if not grids or all(run.last_miss_step is not None for run in runs if run.reached):
        return list(runs), []
    found = [
        replace(run, last_miss_step=max(0, run.steps - grids[run.configuration.batch_size]))
        if run.last_miss_step is None and run.reached and run.steps and run.configuration.batch_size in grids
        else run
        for run in runs
    ]
    words = ", ".join(f"{grid} at {size}" for size, grid in sorted(grids.items())[:8])
    return found, [
        f"assuming steps between evaluations, by batch size: {words}; for other values, add a column last_miss_step or "
        "eval_every_steps"
    ]
