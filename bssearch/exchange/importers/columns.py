"""Columns of a table of runs, recognized by bssearch's names and other tools' names."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bssearch.errors import UsageError, require
from bssearch.exchange.importers.imported_run import (
    SPLIT,
    TYPED,
    comma_hint,
    may_divide_batch,
    number,
    part_of_batch,
)

LONGEST_S = 1e9  # 30 years: more is a mistake

COLUMNS = (
    *("batch_size", "seed", "reached", "steps", "train_seconds", "final_metric", "device", "precision"),
    *("last_miss_step", "eval_every_steps"),
)
PREFIX = "param."
STATE = "state"
RESULT = "another result"
CONSTRAINT = "constraint of "  # before the column's name

# Prefixes of parameters: ours, MLflow's, Optuna's, W&B's and Ray's.
PARAMETER = re.compile(r"(?:params?|config(?:/train_loop_config)?|hparams?|hyperparameters)[./]|params_")
_LOGGED = re.compile(r"(?:metrics[./])?(.*)", re.DOTALL)
# Figures of a whole run, as tools log them; W&B's `_step` counts calls of `log`, not optimizer steps.
WHOLE = {
    **dict.fromkeys(("runtime", "_runtime", "duration", "train_runtime", "time_total_s"), "train_seconds"),
    **dict.fromkeys(("trainer/global_step", "train/global_step", "global_step"), "steps"),
}
ABOUT = re.compile(
    r"(?:name|notes|user|tags|created|updated|sweep|group|job type|commit|hostname|id|run[_ ]?id|run|run_name|number|"
    r"experiment_id|artifact_uri|start_time|end_time|datetime_start|datetime_complete|trial_id|date|timestamp|pid|"
    r"node_ip|logdir|done|hostname|_step|_timestamp|_wandb|checkpoint_dir_name|should_checkpoint|experiment_tag|"
    r"training_iteration|time_this_iter_s|(?:time|iterations|timesteps)_since_restore|(?:timesteps|episodes)_total|"
    r"warmup_time)|(?:tags|system_attrs|user_attrs)[._].*",
    re.IGNORECASE,
)
# Optuna's constraints; a value > 0 violates a constraint.
_CONSTRAINT = re.compile(r"(?:system_attrs_)?constraints(?:[_:].*)?")
_RUN = re.compile(r"(?:run|trial)[_ ]?id|id", re.IGNORECASE)  # names a run
_COUNTER = re.compile(r"epoch|_?step|iteration|training_iteration|(?:trainer|train)/global_step", re.IGNORECASE)
RESULT_NAME = re.compile(
    r"metrics[./].*|(?:train|val|valid|validation|test|eval|perf|time|system)/.*|"
    r"(?:.*[/_. ])?(?:loss|acc|accuracy|error|auc|f1|perplexity|ppl|bleu|wer|mse|rmse|mae)",
    re.IGNORECASE,
)
_UNIT = re.compile(r"(?:^|[ _(\[/])(ms|millis|milliseconds|s|sec|seconds|min|minutes|h|hours)[)\]]?", re.IGNORECASE)
_SECONDS = {"ms": 1e-3, "mi": 60.0, "m": 60.0, "s": 1.0, "se": 1.0, "h": 3600.0, "ho": 3600.0, "": 1.0}
_DURATION = re.compile(r"(?:(\d+) days?,? ?)?(\d+):(\d\d):(\d\d(?:\.\d+)?)")
_FORMULA = re.compile(r"([\d.]+|e)(\*\*?)(.+)")


def scale(unit: str) -> float:
    return _SECONDS[unit.lower()[: 2 if unit[:2].lower() in _SECONDS else 1]]


def seconds_of_unit(name: str) -> float:
    """Return the seconds in the unit that ends a name such as ``train_ms``, or 1 if there is no unit."""
    unit = _UNIT.search(name)
    return scale(unit[1]) if unit is not None and unit.end() == len(name) else 1.0


def seconds(text: str) -> float:
    """Parse ``90``, ``90 s``, ``1.5 min``, ``0:01:30`` or ``1 day, 2:03:04`` into seconds, or NaN if invalid."""
    if (parts := _DURATION.fullmatch(text)) is not None:
        days, hours, minutes, rest = parts.groups(default="0")
        return 86400.0 * int(days) + 3600.0 * int(hours) + 60.0 * int(minutes) + float(rest)
    unit = re.fullmatch(r"(.*\d) ?(ms|s|sec|seconds|min|minutes|h|hours)", text)
    return number(text) if unit is None else number(unit[1]) * scale(unit[2])


def checked_seconds(found: float, given: object, label: str, reached: bool, origin: str) -> float:
    if not (0 < found <= LONGEST_S or (found == 0 and not reached)):
        bound = f"> 0 and <= {LONGEST_S:g} if the target was reached" if reached else f"in [0, {LONGEST_S:g}]"
        raise UsageError(f"{label} = {given!r} must be seconds {bound} ({origin})", hint=comma_hint(str(given)))
    return found


def fraction(text: str) -> float:
    """Parse a number or a percentage, or return NaN."""
    return number(text[:-1]) / 100 if text.endswith("%") else number(text)


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula of one parameter: ``2**log2_batch`` or ``16*batch_units``."""

    name: str
    of: Callable[[float], float] | None = None

    @classmethod
    def parse(cls, text: str, names: Iterable[str]) -> Formula:
        found = None if text in names else _FORMULA.fullmatch(text)
        if found is None:
            return cls(text)
        base = math.e if found[1] == "e" else number(found[1])
        if found[2] == "**":
            return cls(found[3], lambda value: base**value)
        return cls(found[3], lambda value: base * value)

    def __call__(self, text: str) -> str:
        text = text.strip()
        if self.of is None or not text:
            return text
        try:
            value = self.of(number(text))
        except OverflowError:
            value = math.inf
        return repr(round(value, 9)) if value > 1 else repr(value)


def check_logarithm(theirs: str, ours: str) -> None:
    require(
        not re.search(r"log|exp(?!ert)|pow", theirs, re.IGNORECASE)
        or ours not in ("batch_size", "learning_rate", *SPLIT),
        f"{theirs}={ours}: {theirs!r} may hold logarithms",
        hint=f"for logarithms, use '2**{theirs}={ours}' (or 10**, e**); for plain values, use '1*{theirs}={ours}'",
    )


def check_epochs(theirs: str, ours: str, hint: str) -> None:
    require(
        ours != "steps" or not re.search(r"(?:^|[^a-z])epochs?(?![a-z])", theirs, re.IGNORECASE),
        f"{theirs!r} may hold epochs, which are not optimizer steps",
        hint=hint,
    )


def mappings(option: str, given: Sequence[str], there: Iterable[str], kind: str) -> dict[str, tuple[str, Formula]]:
    """Map the file's name in each ``THEIRS=OURS`` to bssearch's name and a formula."""
    names = list(there)
    found: dict[str, tuple[str, Formula]] = {}
    for text in given:
        theirs, separator, ours = text.rpartition("=")
        require(theirs and separator and ours, f"{option} = {text!r} must be THEIRS=OURS, as in lr=learning_rate")
        formula = Formula.parse(theirs, names)
        require(
            formula.name in names,
            f"{option} {text}: no {kind} {formula.name!r}; "
            + (f"choose from {', '.join(sorted(names))}" if names else f"omit {option}"),
        )
        if formula.of is None:
            check_logarithm(theirs, ours)
            check_epochs(
                theirs, ours, f"use '1*{theirs}=steps' if {theirs} holds optimizer steps, else name another column"
            )
        found[formula.name] = ours, formula
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column called ``theirs`` in the file and ``ours`` in bssearch. ``ours`` is None for an ignored column."""

    theirs: str
    ours: str | None = None
    why: str = ""
    formula: Formula | None = None
    seconds: float = 1.0
    is_whole: bool = False

    @property
    def read(self) -> Callable[[str], str] | None:
        if self.formula is not None and self.formula.of is not None:
            return self.formula
        return None if self.seconds == 1.0 else Formula(self.theirs, lambda value: value * self.seconds)

    @property
    def sentence(self) -> str:
        unit = "" if self.seconds == 1.0 else f" × {self.seconds:g}"
        return f"column {self.theirs!r}: {self.ours or 'ignored'}{unit}{f' ({self.why})' if self.why else ''}"


def recognize(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    origin: str,
    *,
    metric: str,
    mapped: Sequence[str],
    ignored: Sequence[str],
) -> list[Column]:
    """Return the columns in order, or raise `UsageError` with all unknown columns."""
    names = [name.strip() for name in header]
    given = mappings("--column", mapped, [name for name in names if name], "column")
    for name in ignored:
        require(name in names, f"--ignore {name}: no column {name!r}; choose from {', '.join(filter(None, names))}")
    columns: list[Column] = []
    unknown: list[str] = []
    own = {*names, *(ours for ours, _ in given.values())}
    for index, name in enumerate(names):
        column = None if name in ignored else _column(name, metric, given, own)
        if column is None and name not in ignored:
            near = difflib.get_close_matches(name, [*COLUMNS, *SPLIT], n=1)
            if near or PARAMETER.fullmatch(name) or len({row[index].strip() for row in rows if index < len(row)}) > 1:
                unknown.append(f"{name!r}" + (f" ({near[0]}?)" if near else ""))
            column = Column(theirs=name, why="equal in all rows")
        columns.append(column or Column(theirs=name, why="--ignore"))
        own.add(columns[-1].ours or "")
    _check_rows(columns, rows, origin)
    require(
        not unknown,
        f"unknown column{'s' * (len(unknown) > 1)} {', '.join(unknown)} ({origin})",
        hint=f"{HINT}; add --column NAME={PREFIX}NAME for a parameter, --column NAME=OURS for {', '.join(COLUMNS)}, "
        "or --ignore NAME",
    )
    _check_twice(columns, origin)
    return columns


def _column(name: str, metric: str, given: Mapping[str, tuple[str, Formula]], own: set[str]) -> Column | None:
    factor = seconds_of_unit(name)
    prefix = PARAMETER.match(name)
    plain = name[prefix.end() :] if prefix else name
    plain = "learning_rate" if plain == "lr" else plain
    logged = (_LOGGED.fullmatch(name) or [name, name])[1]
    whole = WHOLE.get(logged.lower())
    if name in given:
        ours, formula = given[name]
        ours = PREFIX + ours if ours in TYPED else ours
        require(
            ours in COLUMNS or ours.startswith(PREFIX) or part_of_batch(ours) is not None,
            f"--column {name}={ours}: unknown column {ours!r}",
            hint=f"choose from {', '.join((*COLUMNS, *SPLIT))}, or {PREFIX}NAME",
        )
        is_time = ours == "train_seconds"
        return Column(
            theirs=name, ours=ours, formula=formula, seconds=factor if is_time else 1.0, is_whole=whole is not None
        )
    part = part_of_batch(plain)
    # Whether a rule applies, our name and why; the first rule that applies counts
    rules: tuple[tuple[object, str | None, str], ...] = (
        (not name, None, "without a name"),
        (plain in COLUMNS and (prefix is None or plain in ("batch_size", "seed")), plain, ""),
        (part, plain, f"read as {part}"),
        (may_divide_batch(plain), PREFIX + plain, "may divide the batch size"),
        (logged == metric and "final_metric" not in own, "final_metric", ""),
        (plain in TYPED or (prefix is not None and plain and plain not in COLUMNS), PREFIX + plain, ""),
        (whole, None if whole in own else whole, "of the whole run"),
        (name.lower() in ("state", "status"), STATE, ""),
        (_CONSTRAINT.fullmatch(name), CONSTRAINT + name, ""),
        (ABOUT.fullmatch(name), None, "describes the run"),
        (RESULT_NAME.fullmatch(name), None, RESULT),
    )
    for applies, known, why in rules:
        if applies:
            return Column(theirs=name, ours=known, why=why, is_whole=whole is not None and known == whole)
    return None


def _check_rows(columns: Sequence[Column], rows: Sequence[Sequence[str]], origin: str) -> None:
    if not rows or min(map(len, rows)) < len(columns) or any(one.ours == "seed" for one in columns):
        return
    known = ("batch_size", "device", "precision")
    setting = [
        index
        for index, one in enumerate(columns)
        if one.ours and (one.ours in known or one.ours.startswith(PREFIX) or part_of_batch(one.ours) is not None)
    ]
    for index, one in enumerate(columns):
        why = ""
        if one.why == "--ignore":
            continue
        if _RUN.fullmatch(one.theirs):
            name, count = Counter(row[index].strip() for row in rows).most_common(1)[0]
            why = f"{one.theirs} {name!r} is in {count} rows" if name and count > 1 else ""
        elif _COUNTER.fullmatch(one.theirs):
            settings = [[row[place] for place in setting] for row in rows]
            is_curve = _are_curves([number(row[index]) for row in rows], settings)
            why = f"{one.theirs} counts up" if is_curve else ""
        if why:
            hint = f"{HINT}; if each row is a run, add --ignore '{one.theirs}'"
            raise UsageError(f"each row is an evaluation, not a run: {why} ({origin})", hint=hint)


def _are_curves(counts: Sequence[float], settings: Sequence[list[str]]) -> bool:
    # True if rows of equal settings count up, at least three each
    curves: list[list[float]] = []
    for place, count in enumerate(counts):
        if not place or settings[place] != settings[place - 1] or not count >= counts[place - 1]:
            curves.append([])
        if count not in curves[-1][-1:]:
            curves[-1].append(count)
    return bool(curves) and all(len(one) > 2 and one[0] <= max(1.0, one[1] - one[0]) for one in curves)


def _check_twice(columns: Sequence[Column], origin: str) -> None:
    seen: dict[str, str] = {}
    for column in columns:
        if column.ours is not None:
            if column.ours in seen:
                raise UsageError(
                    f"the columns {seen[column.ours]!r} and {column.theirs!r} both mean {column.ours} ({origin})",
                    hint="leave out one column with --ignore NAME",
                )
            seen[column.ours] = column.theirs


HINT = (
    "write one row per run, with batch_size, reached, and the steps and train_seconds of the first evaluation that met "
    "the target"
)
