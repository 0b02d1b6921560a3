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
from bssearch.exchange.importers.columns import (
    ABOUT,
    PARAMETER,
    RESULT_NAME,
    Formula,
    mappings,
    seconds_of_unit,
)
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
from bssearch.exchange.importers.runs import LARGEST_SEED, LONGEST_S, LOSS, RunsObjective, check_scale
from bssearch.records import (
    Configuration,
    Goal,
    Observation,
    ParameterValue,
    SecondsBasis,
    Target,
    TrialState,
    grouped,
    is_metric,
)
from bssearch.records.curves import first_crossing
from bssearch.registry import Option

STEPS = (
    *("trainer/global_step", "train/global_step", "global_step", "train_step", "training_step", "step", "steps"),
    *("iteration", "iter"),
)
"""Names of optimizer steps, the surest first."""

SECONDS = (
    *("train_seconds", "time_total_s", "_runtime", "relative time (process)", "relative time (wall)", "runtime"),
    *("elapsed_seconds", "elapsed_time", "elapsed", "wall_seconds", "seconds"),
)
"""Names of seconds since a run began, the surest first."""

CLOCKS = (CLOCK, "timestamp", "wall_time")  # seconds since 1970

EPOCH = "epoch"

_VALIDATION = re.compile(r"(?:metrics/)?(?:val|valid|validation|eval|test)[/_.]")
_NO_METRICS = ("runtime", "per_second", "_time", "step", "epoch")

# our name of a setting by the last part of the log's
_LEAVES = {
    **dict.fromkeys(("batch_size", "train_batch_size", "batchsize", "bs", "bsz"), BATCH),
    **dict.fromkeys(("learning_rate", "lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("weight_decay", "wd"), "weight_decay"),
    **dict.fromkeys(("optimizer", "optim", "optimizer_name"), "optimizer"),
    **dict.fromkeys(("seed", "random_seed", "seed_everything"), "seed"),
    **{name: name for name in (*TYPED[1:], "device", "precision")},
}
_OF_THE_RUN = {"seed", "device", "precision"}  # no hyperparameters

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
    named = _Names.of(logs, metric or described.get("metric_column"), step, seconds, epoch_samples)
    settings = _all_settings(logs, column or (), given or (), {*named.read, run})
    runs, notes = _runs(logs, settings, named)
    if described:
        runs = [replace(one, seconds_basis=None) for one in runs]
    wanted, told = _target(
        runs,
        described.get("metric") or named.metric,
        described.get("target") if target is None else target,
        goal or described.get("goal"),
        str(places[0]),
    )
    is_timed = any(map(_is_timed, runs))
    made = make_studies(
        [_judged(one, wanted, is_timed=is_timed) for one in runs],
        name=name or described.get("name") or places[0].resolve().name.partition(".")[0],
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
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
        if epoch_samples is not None and EPOCH not in there:
            raise UsageError(f"--epoch-samples {epoch_samples}: the logs have no {EPOCH!r}: {_listed(there)} ({place})")
        found = None if epoch_samples is not None else step or _first(there, STEPS)
        if found is None and epoch_samples is None:
            raise UsageError(
                f"the logs name no optimizer steps: they have {_listed(there)} ({place})",
                hint="--step NAME; if they count epochs, --epoch-samples N" if EPOCH in there else "--step NAME",
            )
        timed = seconds or _first(there, SECONDS)
        return cls(
            metric=metric or _metric(there, place),
            step=found,
            seconds=timed,
            clock=None if timed else _first(there, CLOCKS),
            epoch_samples=epoch_samples,
        )

    @property
    def notes(self) -> list[str]:
        steps = self.step or f"{EPOCH} × {self.epoch_samples} / batch size"
        timed = self.seconds or (f"{self.clock}, from the first step on" if self.clock else "unknown")
        return [f"metric: {self.metric}; steps: {steps}; seconds: {timed}"]

    @property
    def read(self) -> set[str | None]:
        """Names that are no settings."""
        return {self.metric, self.step, self.seconds, self.clock, EPOCH}

    def steps_of(self, row: Mapping[str, Any], log: Log, batch_size: int) -> float:
        if self.step is not None:
            return number_in(row.get(self.step)) + 1 - log.first_step
        return number_in(row.get(EPOCH)) * (self.epoch_samples or 0) / batch_size

    def seconds_of(self, row: Mapping[str, Any]) -> float:
        name = self.seconds or self.clock
        return math.nan if name is None else number_in(row.get(name)) * seconds_of_unit(self.seconds or "")


def _first(there: Sequence[str], wanted: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(there)}
    return next((lower[one] for one in wanted if one in lower), None)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(map(repr, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "") or "no values"


def _metric(there: Sequence[str], place: str) -> str:
    logged = [one for one in there if _VALIDATION.match(one.lower()) and not one.lower().endswith(_NO_METRICS)]
    found = [one for one in logged if not LOSS.fullmatch(one)] or logged
    found = [one for one in found if "test" not in one.lower()] or found
    if len(found) != 1:
        raise UsageError(
            f"the metric is ambiguous: the logs have {_listed(found or there)} ({place})", hint="--metric NAME"
        )
    return found[0]


Setting = tuple[int, str, Any]  # how far the log's name is from ours, the log's name, and the value


def _all_settings(
    logs: Sequence[Log], column: Sequence[str], given: Sequence[str], read: set[str | None]
) -> list[dict[str, Setting]]:
    """Settings of each log, by our names, else by the log's."""
    there = dict.fromkeys(name for log in logs for name in log.settings)
    renamed = mappings("--column", column, there, "setting")
    added: dict[str, Setting] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise UsageError(f"--with {text}: must be NAME=VALUE, as in world_size=2")
        added[_ours(name)] = -1, "--with", value
    return [_settings(log, renamed, read) | added for log in logs]


def _settings(log: Log, renamed: Mapping[str, tuple[str, Formula]], read: set[str | None]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, value in log.settings.items():
        if name in renamed:
            ours, formula = renamed[name]
            one: Setting = 0, name, formula(str(value))
        elif name not in read and _is_setting(name, value):
            ours, one = _ours(name), (1 + len(re.findall(r"[./]", PARAMETER.sub("", name, count=1))), name, value)
        else:
            continue
        known = found.get(ours)
        if known is not None and known[0] == one[0] and str(known[2]) != str(one[2]):
            raise UsageError(
                f"{known[1]} = {known[2]} and {name} = {value} are both {ours} ({log.origin})",
                hint=f"--column NAME={ours} says which",
            )
        if known is None or one[0] < known[0]:
            found[ours] = one
    return found


def _is_setting(name: str, value: Any) -> bool:
    if isinstance(value, list | dict | tuple) or str(value) in ("", "None") or name.lower() in RUN_NAMES:
        return False
    ours = _ours(name)
    is_known = ours in _LEAVES.values() or is_about_batch(ours)
    return is_known or not (ABOUT.fullmatch(name) or RESULT_NAME.fullmatch(name))


def _ours(name: str) -> str:
    plain = PARAMETER.sub("", name, count=1)
    return _LEAVES.get(re.split(r"[./]", plain)[-1].lower().replace("-", "_"), plain)


def _runs(
    logs: Sequence[Log], settings: Sequence[Mapping[str, Setting]], names: _Names
) -> tuple[list[ImportedRun], list[str]]:
    """Runs that are not judged yet, and notes."""
    values = [{name: value for name, (_, _, value) in one.items()} for one in settings]
    batches = step_batches(
        [GivenBatch.of(_batch_settings(one, log.origin), log.origin) for log, one in zip(logs, values, strict=True)],
        "--column batch_size={}",
    )
    sources = {name: theirs for name, (_, theirs, _) in settings[0].items() if is_about_batch(name) or name in TYPED}
    notes = ["; ".join(f"{name}: {theirs}" for name, theirs in sources.items() if name != theirs), *batches.notes]
    varied = _varied(values)
    runs, without = [], []
    for log, own, batch in zip(logs, values, batches.batches, strict=True):
        curve, has_diverged = _curve(log, names, batch[BATCH])
        if not curve:
            without.append(log.origin)
            continue
        parameters: dict[str, ParameterValue] = {
            name: parameter_value(str(own[name]), name, log.origin) if name in own else None for name in varied
        }
        runs.append(
            ImportedRun(
                origin=log.origin,
                configuration=make_configuration(batch, parameters, log.origin),
                seed=integer(str(own["seed"]), "seed", log.origin, low=0, high=LARGEST_SEED) if "seed" in own else None,
                missed=TrialState.DIVERGED if has_diverged else TrialState.EXHAUSTED,
                device=str(own["device"]) if "device" in own else None,
                precision=str(own["precision"]) if "precision" in own else None,
                curve=tuple(curve),
                seconds_basis=SecondsBasis.WALL,
            )
        )
    if not runs:
        raise UsageError(f"no run has an evaluation of {names.metric}: {_listed(without)}")
    if without:
        notes.append(f"skipped {len(without)} of {len(logs)} runs without {names.metric} (first: {without[0]})")
    untimed = [one.origin for one in runs if not _is_timed(one)]
    if 0 < len(untimed) < len(runs):
        notes.append(f"{len(untimed)} of {len(runs)} runs have no seconds (first: {untimed[0]})")
    return runs, [one for one in notes if one]


def _is_timed(run: ImportedRun) -> bool:
    return run.curve[-1].train_seconds > 0


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
    names = dict.fromkeys(name for one in settings for name in one if name not in _OF_THE_RUN)
    return [
        name
        for name in names
        if not is_about_batch(name) and (name in TYPED or len({str(one.get(name)) for one in settings}) > 1)
    ]


def _curve(log: Log, names: _Names, batch_size: int) -> tuple[list[Observation], bool]:
    """Evaluations in order, and whether the run diverged; a resumed run's replace the earlier ones from its step on."""
    found: list[Observation] = []
    offset = before = 0.0
    for step, logged, metric in _evaluations(log, names, batch_size):
        if not is_metric(metric):
            return _timed(found, names, log), True
        is_resumed, pace = bool(found) and step <= found[-1].step, _pace(found)
        found = [one for one in found if one.step < step] if is_resumed else found
        kept = found[-1].train_seconds if found else 0.0
        if names.clock is not None and (is_resumed or not found):
            offset = kept + (pace * (step - found[-1].step) if found else 0.0) - logged
        elif names.clock is None and logged < before:
            offset = 0.0 if logged > kept else kept  # the log's clock went back to the checkpoint's time, or to 0
        before = logged
        found.append(
            Observation(
                step=step,
                samples=step * batch_size,
                train_seconds=0.0 if math.isnan(logged) else logged + offset,
                metric=metric,
                loss=None,
                learning_rate=0.0,
            )
        )
    return _timed(found, names, log), False


def _evaluations(log: Log, names: _Names, batch_size: int) -> Iterator[tuple[int, float, float]]:
    """Yield step, seconds as logged, and the metric; a row without a step or seconds has those of the row before."""
    step = seconds = math.nan
    for row in log.rows:
        step_here, seconds_here = names.steps_of(row, log, batch_size), names.seconds_of(row)
        step = step if math.isnan(step_here) else step_here
        seconds = seconds if math.isnan(seconds_here) else seconds_here
        if row.get(names.metric) in (None, "") or math.isnan(step):
            continue
        if not 0 <= step <= LARGEST:
            raise UsageError(f"step {step:g} must be in [0, {LARGEST}] ({log.origin})")
        yield round(step), seconds, number_in(row[names.metric])


def _pace(curve: Sequence[Observation]) -> float:
    if len(curve) < 2:
        return 0.0
    first, last = curve[0], curve[-1]
    return (last.train_seconds - first.train_seconds) / (last.step - first.step)


def _timed(curve: list[Observation], names: _Names, log: Log) -> list[Observation]:
    # A clock tells the time from one evaluation to the next; the steps before the first took as long as later ones.
    if names.clock is not None and curve:
        before = curve[0].step * _pace(curve) - curve[0].train_seconds
        curve = [replace(one, train_seconds=one.train_seconds + before) for one in curve]
    for one in curve:
        if not 0 <= one.train_seconds <= LONGEST_S:
            place = f"{one.train_seconds:g} seconds at step {one.step}"
            raise UsageError(f"{place} must be in [0, {LONGEST_S:g}] ({log.origin})")
    return curve


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
        notes = [f"the target is {wanted.in_words}, which half of the runs reach; --target VALUE sets another target"]
    check_scale(metrics, wanted, goal, source)
    return wanted, notes


def _judged(run: ImportedRun, target: Target, *, is_timed: bool) -> ImportedRun:
    """The run with its crossing of the target, or its end; without its curve if only others have seconds."""
    found, last = first_crossing(run.curve, target), run.curve[-1]
    if found is not None and found.first_hit_step == 0:
        raise UsageError(f"{target.in_words} is met before the first step ({run.origin})")
    end = last if found is None else next(one for one in run.curve if one.step == found.first_hit_step)
    seconds = last.train_seconds if found is None else found.train_seconds
    return replace(
        run,
        reached=found is not None,
        steps=last.step if found is None else found.steps,
        train_seconds=seconds if _is_timed(run) else None,
        final_metric=end.metric,
        curve=run.curve if _is_timed(run) or not is_timed else (),
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
            yield f"{name} changes with the batch size, so their effects cannot be told apart: {words}"


def _value(configuration: Configuration, name: str) -> str:
    return str(getattr(configuration, name) if name in TYPED else configuration.parameters.get(name))
