"""``import curves``: studies of training logs, whose learning curves are kept; `logs` finds and reads the logs."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bssearch.errors import UsageError
from bssearch.exchange.importers.imported_run import (
    BATCH,
    TYPED,
    ImportedRun,
    Studies,
    StudyName,
    integer,
    make_configuration,
    parameter_value,
    step_batches,
)
from bssearch.exchange.importers.log_settings import Settings, batch_of, hyperparameters, settings_of, sources
from bssearch.exchange.importers.logged import EPOCH, MOST_NAMED, Curve, Names, curve_of, listed
from bssearch.exchange.importers.logs import Log, logs_in, number_in
from bssearch.exchange.importers.runs import LARGEST_SEED, RunsObjective, check_scale
from bssearch.records import (
    Configuration,
    Goal,
    ParameterValue,
    SecondsBasis,
    Target,
    TrialState,
    grouped,
)
from bssearch.records.curves import first_crossing
from bssearch.registry import Option


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
    accumulation and devices. Each device and precision gets a separate study.
    """
    from bssearch.exchange.importers.imported_studies import make_studies  # loads SQLAlchemy

    places = [Path(one) for one in file]
    logs = logs_in(places, run)
    described = _description(places)
    named = Names.of(logs, metric or described.get("metric_column"), step, seconds, epoch_samples)
    settings = settings_of(logs, column or (), given or (), run)
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
    return Studies(made.studies, (*notes, *told, *_confounders(runs), *made.notes), dry_run)


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


def _runs(logs: Sequence[Log], settings: Sequence[Settings], names: Names) -> tuple[list[ImportedRun], list[str]]:
    """Runs that are not judged yet, and notes."""
    given = [batch_of(one, log) for log, one in zip(logs, settings, strict=True)]
    batches = step_batches(given, "--column batch_size={}")
    varied = hyperparameters(settings)
    runs, without, resumed = [], [], []
    read: dict[str, None] = {}
    for log, own, batch in zip(logs, settings, batches.batches, strict=True):
        named = names.of_log(log) if any(row.get(names.metric) not in (None, "") for row in log.rows) else None
        curve = None if named is None else curve_of(log, named, batch[BATCH])
        if named is None or curve is None or not curve.observations:
            without.append(log.origin)
            continue
        read[named.sentence] = None
        resumed += [log.origin] if curve.resumes else []
        runs.append(_run(log, own, batch, varied, curve))
    if not runs:
        raise UsageError(f"no run has an evaluation of {names.metric}: {listed(without)}")
    notes = [sources(settings[0]), *batches.notes, *read, *_about(logs, runs)]
    untimed = [one.origin for one in runs if not _is_timed(one)]
    for found, what in (
        (without, f"were skipped, because they have no {names.metric}"),
        (resumed, "go back to an earlier step: taken as resumed"),
        (untimed if len(untimed) < len(runs) else [], "have no seconds"),
    ):
        if found:
            notes.append(f"{len(found)} of {len(logs)} runs {what} (the first: {found[0]})")
    return runs, [one for one in notes if one]


def _run(log: Log, own: Settings, batch: Mapping[str, int], varied: Sequence[str], curve: Curve) -> ImportedRun:
    values = {name: str(one.value) for name, one in own.items()}
    parameters: dict[str, ParameterValue] = {
        name: parameter_value(values[name], name, log.origin) if name in values else None for name in varied
    }
    return ImportedRun(
        origin=log.origin,
        configuration=make_configuration(batch, parameters, log.origin),
        seed=integer(values["seed"], "seed", log.origin, low=0, high=LARGEST_SEED) if "seed" in values else None,
        missed=TrialState.DIVERGED if curve.has_diverged else TrialState.EXHAUSTED,
        device=values.get("device"),
        precision=values.get("precision"),
        curve=curve.observations,
        seconds_basis=SecondsBasis.WALL,
    )


def _about(logs: Sequence[Log], runs: Sequence[ImportedRun]) -> Iterator[str]:
    counts = Counter(run.configuration.batch_size for run in runs)
    yield "batch size (runs): " + ", ".join(f"{size} ({count})" for size, count in sorted(counts.items()))
    by_one = [one for run in runs for one in np.diff([at.step for at in run.curve])]
    if by_one and set(by_one) == {1}:
        yield "there is an evaluation at every step: if the steps are epochs, add --epoch-samples N"
    by_origin = {log.origin: log for log in logs}
    samples = {}
    for run in runs:
        epochs = [number_in(row.get(EPOCH)) for row in by_origin[run.origin].rows]
        last = max((one for one in epochs if not math.isnan(one)), default=0.0)
        if last >= FEWEST_EPOCHS:
            samples[run.origin] = run.curve[-1].samples / last
    if samples and max(samples.values()) > UNLIKE * min(samples.values()):
        least, most = min(samples, key=lambda one: samples[one]), max(samples, key=lambda one: samples[one])
        yield (
            f"an epoch has {samples[most]:,.0f} samples in {most} and {samples[least]:,.0f} in {least}: is a part of "
            "the batch missing, such as accumulation or devices?"
        )


FEWEST_EPOCHS = 2  # an epoch counted from 0 or 1 changes the samples of one by up to a half
UNLIKE = 1.8


def _is_timed(run: ImportedRun) -> bool:
    return run.curve[-1].train_seconds > 0


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
