"""``import curves``: studies of training logs, whose learning curves are kept; `logs` finds and reads the logs."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bssearch.errors import UsageError
from bssearch.exchange.importers.columns import seconds_of_unit
from bssearch.exchange.importers.imported_run import (
    BATCH,
    LARGEST,
    TYPED,
    GivenBatch,
    ImportedRun,
    Studies,
    StudyName,
    integer,
    is_about_batch,
    make_configuration,
    parameter_value,
    step_batches,
)
from bssearch.exchange.importers.logs import CLOCK, RUN_NAMES, Log, logs_in, number_in
from bssearch.exchange.importers.runs import LARGEST_SEED, LONGEST_S, RunsObjective, check_scale
from bssearch.records import Configuration, Goal, Observation, ParameterValue, SecondsBasis, Target, grouped, is_metric
from bssearch.records.curves import first_crossing
from bssearch.registry import Option

STEPS = (
    *("trainer/global_step", "train/global_step", "global_step", "train_step", "training_step", "step", "steps"),
    *("iteration", "iter"),
)
"""Names of optimizer steps, the surest first."""

SECONDS = (
    *("train_seconds", "time_total_s", "_runtime", "relative time (process)", "relative time (wall)", "runtime"),
    *("train_runtime", "elapsed_seconds", "elapsed_time", "elapsed", "wall_seconds", "seconds"),
)
"""Names of seconds since a run began, the surest first."""

CLOCKS = (CLOCK, "timestamp", "wall_time")  # seconds since 1970

EPOCH = "epoch"

_VALIDATION = re.compile(r"(?:metrics/)?(?:val|valid|validation|eval|test)[/_.]")
_LOSS = re.compile(r".*(?:loss|error|perplexity|ppl)$")
_GROUPS = re.compile(r"(?:params?|config(?:/train_loop_config)?|hparams?|hyperparameters)[./]|params_")

_LEAVES = {
    **dict.fromkeys(("batch_size", "train_batch_size", "batchsize", "bs", "bsz"), BATCH),
    **dict.fromkeys(("learning_rate", "lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("weight_decay", "wd"), "weight_decay"),
    **dict.fromkeys(("optimizer", "optim", "optimizer_name"), "optimizer"),
    **dict.fromkeys(("seed", "random_seed", "seed_everything"), "seed"),
    **{name: name for name in (*TYPED[1:], "device", "precision")},
}

NO_SETTINGS = {"seed", "device", "precision"}

MOST_NAMED = 12  # names in a message


def import_curves(
    file: Annotated[
        list[str],
        Option(
            "Tables of evaluations (.csv, .tsv, .jsonl, also .gz), and folders with runs of Lightning's CSVLogger, the "
            "Hugging Face Trainer, Ray Tune, MLflow's file store or TensorBoard.",
            metavar="FILE|FOLDER…",
        ),
    ],
    *,
    name: StudyName = None,
    metric: Annotated[
        str | None, Option("Name of the metric in the logs.", shown_default="the only one of the validation")
    ] = None,
    target: Annotated[
        float | None, Option("Target value of the metric.", shown_default="that half of the runs reach")
    ] = None,
    goal: Annotated[
        Goal | None, Option("Direction in which the metric improves.", shown_default=Goal.MAXIMIZE.value)
    ] = None,
    step: Annotated[str | None, Option("Name of the optimizer steps in the logs.")] = None,
    seconds: Annotated[str | None, Option("Name of the seconds since the run began in the logs.")] = None,
    run: Annotated[str | None, Option("Column of a table that tells runs apart.")] = None,
    column: Annotated[
        list[str] | None,
        Option("Take a setting as another, as in batch_size=micro_batch_size; may be repeated.", metavar="THEIRS=OURS"),
    ] = None,
    given: Annotated[
        list[str] | None,
        Option(
            "A setting that the logs lack, as in gradient_accumulation_steps=4; may be repeated.",
            metavar="NAME=VALUE",
            flag="--with",
        ),
    ] = None,
    epoch_samples: Annotated[
        int | None, Option("Samples of an epoch, if the logs count epochs instead of steps.", min=1)
    ] = None,
    objective: Annotated[
        RunsObjective, Option("Cost minimized by the best batch size.")
    ] = RunsObjective.TIME_TO_TARGET,
    default_batch: Annotated[int | None, Option("Current batch size, the baseline of comparisons.")] = None,
    dry_run: Annotated[bool, Option("Print what the logs say without storing it.", flag="--dry-run")] = False,
) -> Studies:
    """Make a study from training logs, with their learning curves.

    A run's settings come from its log. The batch size of a step is the batch size, or its part per device, times
    accumulation and devices. `best --target` then answers for other targets, too. Each device and precision gets a
    separate study.
    """
    from bssearch.exchange.importers.imported_studies import make_studies  # loads SQLAlchemy

    places = [Path(one) for one in file]
    logs = logs_in(places, run)
    described = _description(places)
    metric, target = metric or described.get("metric_column"), described.get("target") if target is None else target
    goal = goal or described.get("goal")
    named = _Names.of(logs, metric, step, seconds, epoch_samples)
    renamed, added = _pairs("--column", column, "batch_size=micro_batch_size"), _pairs("--with", given, "world_size=2")
    _check_renamed(renamed, logs)
    settings = [_settings(log, renamed, added, run) for log in logs]
    runs, notes = _runs(logs, settings, named)
    wanted, told = _target(runs, described.get("metric") or named.metric, target, goal, str(places[0]))
    made = make_studies(
        [_judged(one, wanted) for one in runs],
        name=name or described.get("name") or places[0].name.partition(".")[0],
        target=wanted,
        objective=objective.value,
        default_batch=default_batch,
    )
    return Studies(made.studies, (*named.notes, *notes, *told, *_confounders(runs), *made.notes), dry_run)


def _description(places: Sequence[Path]) -> dict[str, Any]:
    # The description beside a table that `export --to curves` wrote
    path = places[0]
    beside = path.with_name(path.name.partition(".")[0] + ".json")
    if len(places) > 1 or path.is_dir() or not path.name.endswith((".csv", ".csv.gz")) or not beside.is_file():
        return {}
    try:
        found = json.loads(beside.read_bytes())
        return {
            "metric_column": "metric",
            "metric": str(found["metric"]),
            "name": str(found["name"]),
            "goal": Goal(found["goal"]),
            "target": float(found["target"]),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}  # a file of another tool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of the logged values that an import reads."""

    metric: str
    step: str | None
    seconds: str | None
    clock: str | None
    epoch_samples: int | None

    @classmethod
    def of(
        cls, logs: Sequence[Log], metric: str | None, step: str | None, seconds: str | None, epoch_samples: int | None
    ) -> _Names:
        there = list(dict.fromkeys(name for log in logs for row in log.rows for name in row))
        place = logs[0].origin
        for option, name in (("--metric", metric), ("--step", step), ("--seconds", seconds)):
            if name is not None and name not in there:
                raise UsageError(f"{option} {name}: the logs have {_listed(there)} ({place})")
        found = step or _first(there, STEPS)
        if found is None and (epoch_samples is None or EPOCH not in there):
            raise UsageError(
                f"the logs name no optimizer steps: they have {_listed(there)} ({place})",
                hint="--step NAME; if they count epochs, --epoch-samples N" if EPOCH in there else "--step NAME",
            )
        timed = seconds or _first(there, SECONDS)
        return cls(
            metric=metric or _metric(there, place),
            step=found if epoch_samples is None else None,
            seconds=timed,
            clock=None if timed else _first(there, CLOCKS),
            epoch_samples=epoch_samples,
        )

    @property
    def notes(self) -> list[str]:
        steps = self.step or f"{EPOCH} × {self.epoch_samples} / batch size"
        timed = self.seconds or (f"{self.clock}, from the first step on" if self.clock else "unknown")
        return [f"metric: {self.metric}; steps: {steps}; seconds: {timed}"]


def _first(there: Sequence[str], wanted: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(there)}
    return next((lower[one] for one in wanted if one in lower), None)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(map(repr, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "") or "no values"


def _metric(there: Sequence[str], place: str) -> str:
    logged = [one for one in there if _VALIDATION.match(one.lower()) and not one.lower().endswith(_NO_METRICS)]
    found = [one for one in logged if not _LOSS.match(one.lower())] or logged
    if len(found) != 1:
        raise UsageError(
            f"which metric has the target? The logs have {_listed(found or there)} ({place})", hint="--metric NAME"
        )
    return found[0]


_NO_METRICS = ("runtime", "per_second", "_time", "step", "epoch")


def _pairs(option: str, given: Sequence[str] | None, example: str) -> dict[str, str]:
    found = {}
    for text in given or ():
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise UsageError(f"{option} {text}: must be two parts, as in {example}")
        found[name] = value
    return found


def _check_renamed(renamed: Mapping[str, str], logs: Sequence[Log]) -> None:
    there = dict.fromkeys(name for log in logs for name in log.settings)
    for name in renamed:
        if name not in there:
            raise UsageError(f"--column {name}: no such setting; the logs have {_listed(list(there))}")


def _settings(log: Log, renamed: Mapping[str, str], added: Mapping[str, str], run: str | None) -> dict[str, Any]:
    """Settings by our names, else by the log's."""
    found: dict[str, Any] = {_ours(name): value for name, value in added.items()}
    for name, value in log.settings.items():
        is_one_value = not isinstance(value, list | dict | tuple) and str(value) not in ("", "None")
        if is_one_value and name != run and name.lower() not in RUN_NAMES:
            found.setdefault(renamed.get(name) or _ours(name), value)
    return found


def _ours(name: str) -> str:
    plain = _GROUPS.sub("", name, count=1)
    return _LEAVES.get(re.split(r"[./]", plain)[-1].lower().replace("-", "_"), plain)


def _runs(
    logs: Sequence[Log], settings: Sequence[dict[str, Any]], names: _Names
) -> tuple[list[ImportedRun], list[str]]:
    """Runs that are not judged yet, and notes."""
    batches = step_batches(
        [GivenBatch.of(_batch_settings(one, log.origin), log.origin) for log, one in zip(logs, settings, strict=True)],
        "--column batch_size={}",
    )
    varied = _varied(settings)
    runs, notes = [], list(batches.notes)
    without = []
    for log, own, batch in zip(logs, settings, batches.batches, strict=True):
        curve = _curve(log, names, batch[BATCH])
        if not curve:
            without.append(log.origin)
            continue
        values: dict[str, ParameterValue] = {
            name: parameter_value(str(own[name]), name, log.origin) if name in own else None
            for name in varied
            if not is_about_batch(name) and name not in NO_SETTINGS
        }
        runs.append(
            ImportedRun(
                origin=log.origin,
                configuration=make_configuration(batch, values, log.origin),
                seed=integer(str(own["seed"]), "seed", log.origin, low=0, high=LARGEST_SEED) if "seed" in own else None,
                device=str(own["device"]) if "device" in own else None,
                precision=str(own["precision"]) if "precision" in own else None,
                curve=tuple(curve),
                seconds_basis=None if names.seconds == "train_seconds" else SecondsBasis.WALL,
            )
        )
    if not runs:
        raise UsageError(f"no run has an evaluation of {names.metric}: {_listed(without)}")
    if without:
        notes.append(f"skipped {len(without)} of {len(logs)} runs without {names.metric} (first: {without[0]})")
    return runs, notes


def _batch_settings(own: Mapping[str, Any], origin: str) -> dict[str, Any]:
    found = {name: value for name, value in own.items() if is_about_batch(name)}
    if not GivenBatch.of(found, origin).is_known:
        raise UsageError(
            f"the batch size of {origin} is unknown: its settings are {_listed(list(own))}",
            hint="--with batch_size=N, or per_device_train_batch_size, gradient_accumulation_steps and world_size",
        )
    return found


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    # Hyperparameters that bssearch knows, and settings with several values; others say nothing about the choice.
    names = list(dict.fromkeys(name for one in settings for name in one))
    return [name for name in names if name in TYPED or len({str(one.get(name)) for one in settings}) > 1]


def _curve(log: Log, names: _Names, batch_size: int) -> list[Observation]:
    """Evaluations in order; after a resume, those from its step on replace the earlier ones."""
    found: list[Observation] = []
    step, began, passed, before = math.nan, math.nan, 0.0, 0.0
    for row in log.rows:
        if names.epoch_samples is not None:
            counted = number_in(row.get(EPOCH)) * names.epoch_samples / batch_size
        else:
            counted = number_in(row.get(names.step or "")) + 1 - log.first_step
        step = step if math.isnan(counted) else counted
        if names.clock is not None:
            now = number_in(row.get(names.clock))
            began = now if math.isnan(began) else began
            now -= began
        else:
            now = number_in(row.get(names.seconds or "")) * seconds_of_unit(names.seconds or "")
        if not math.isnan(now):
            passed += before if now < before and names.clock is None else 0.0  # a resumed run's clock begins anew
            before = now
        metric = number_in(row.get(names.metric))
        if math.isnan(metric) or math.isnan(step):
            continue
        _check(log, row, step, passed + before, metric)
        found = [one for one in found if one.step < round(step)] if found and found[-1].step >= round(step) else found
        found.append(
            Observation(
                step=round(step),
                samples=round(step) * batch_size,
                train_seconds=passed + before,
                metric=metric,
                loss=None,
                learning_rate=0.0,
            )
        )
    return found if names.clock is None else _from_the_start(found)


def _from_the_start(curve: list[Observation]) -> list[Observation]:
    # A clock's first value is that of the first evaluation; the steps before it took as long as later ones.
    first, last = (curve[0], curve[-1]) if curve else (None, None)
    if first is None or last is None or last.step == first.step:
        return curve
    before = first.step * (last.train_seconds - first.train_seconds) / (last.step - first.step)
    return [replace(one, train_seconds=one.train_seconds + before) for one in curve]


def _check(log: Log, row: Mapping[str, Any], step: float, seconds: float, metric: float) -> None:
    if not 0 <= step <= LARGEST:
        raise UsageError(f"step {step:g} must be in [0, {LARGEST}] ({log.origin})")
    if not 0 <= seconds <= LONGEST_S:
        raise UsageError(f"{seconds:g} seconds at step {step:g} must be in [0, {LONGEST_S:g}] ({log.origin})")
    if not is_metric(metric):
        raise UsageError(f"the metric {metric:g} at step {step:g} must be a finite number ({log.origin})")


def _target(
    runs: Sequence[ImportedRun], metric: str, value: float | None, goal: Goal | None, source: str
) -> tuple[Target, list[str]]:
    """Target and notes; by default the value that half of the runs reach."""
    if value is not None and not math.isfinite(value):
        raise UsageError(f"--target = {value} must be a finite number")
    wanted = Target(metric=metric, value=0.0 if value is None else value, goal=goal or Goal.MAXIMIZE)
    metrics = [one.metric for run in runs for one in run.curve]
    notes = []
    if value is None:
        best = [max((one.metric for one in run.curve), key=wanted.gain) for run in runs]
        half = statistics.median_low(best) if wanted.goal is Goal.MAXIMIZE else statistics.median_high(best)
        wanted = replace(wanted, value=half)
        notes = [f"the target is {wanted.in_words}, which half of the runs reach; --target VALUE sets another"]
    check_scale(metrics, wanted, goal, source)
    return wanted, notes


def _judged(run: ImportedRun, target: Target) -> ImportedRun:
    """The run with its crossing of the target, or with its end."""
    found, last = first_crossing(run.curve, target), run.curve[-1]
    seconds = last.train_seconds if found is None else found.train_seconds
    return replace(
        run,
        reached=found is not None,
        steps=last.step if found is None else max(1, found.steps),
        train_seconds=seconds if any(one.train_seconds for one in run.curve) else None,
        final_metric=max((one.metric for one in run.curve), key=target.gain),
    )


def _confounders(runs: Sequence[ImportedRun]) -> Iterator[str]:
    """Notes on settings that differ between batch sizes and have one value at each."""
    by_size = grouped((run.configuration.batch_size, run.configuration) for run in runs)
    names = dict.fromkeys(name for run in runs for name in run.configuration.parameters)
    typed = [name for name in TYPED if name != "learning_rate" and name not in names]
    for name in (*typed, *names):
        values = {size: {_value(one, name) for one in there} for size, there in by_size.items()}
        if all(len(one) == 1 for one in values.values()) and len(set.union(*values.values())) > 1:
            words = ", ".join(f"{next(iter(one))} at {size}" for size, one in sorted(values.items())[:MOST_NAMED])
            yield f"{name} differs with the batch size, so the answer is about both: {words}"


def _value(configuration: Configuration, name: str) -> str:
    return str(getattr(configuration, name) if name in TYPED else configuration.parameters.get(name))
