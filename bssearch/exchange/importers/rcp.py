"""``import rcp``: MLPerf's reference convergence points, the epochs or samples that runs need at each batch size.

https://github.com/mlcommons/logging, ``mlperf_logging/rcp_checker/*/rcps_*.json``.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, ValidationError

from bssearch.analysis.objectives import SamplesToTarget
from bssearch.errors import UsageError, problem_in_words, require, required
from bssearch.exchange.importers.imported_run import (
    LARGEST,
    ImportedRun,
    RunTable,
    Studies,
    StudyName,
    make_configuration,
    parameter_value,
    parsed_json,
    read_text,
)
from bssearch.records import Configuration, ParameterValue, Target
from bssearch.registry import Option

# ImageNet (resnet), MLPerf's OpenImages (retinanet); bert's "epochs" count samples.
SAMPLES_PER_EPOCH = {"bert": 1, "resnet": 1_281_167, "retinanet": 1_170_301}

# https://mlcommons.org/benchmarks/training
TARGETS = {
    "bert": Target(metric="masked_lm_accuracy", value=0.72),
    "resnet": Target(metric="accuracy", value=0.759),
    "retinanet": Target(metric="mean_average_precision", value=0.34),
}

# For other benchmarks: 1 when a run reaches the benchmark's target.
UNKNOWN_TARGET = Target(metric="quality_target", value=1.0)

LEARNING_RATE = "opt_base_learning_rate"
EPOCHS: Final = "epochs to converge"
SAMPLES: Final = "samples to converge"


def import_rcp(
    file: Annotated[Path, Option("A file of MLPerf reference convergence points.", metavar="FILE.json")],
    *,
    name: StudyName = None,
    samples_per_epoch: Annotated[
        int | None,
        Option(
            "Samples per epoch if the file counts epochs, or 1 if the file's epochs are samples.",
            min=1,
            shown_default="built in for bert, resnet and retinanet",
        ),
    ] = None,
) -> Studies:
    """Make a study from MLPerf's reference convergence points.

    Each point lists the epochs or samples that runs at one batch size needed to reach the target.
    """
    from bssearch.exchange.importers.imported_studies import (
        make_studies,  # SQLAlchemy, which `import --help` does without
    )

    table, target = read_rcp(file, samples_per_epoch=samples_per_epoch)
    made = make_studies(
        table.runs, name=name or file.stem, target=target, objective=SamplesToTarget.name, is_tuned=True
    )
    taken = ("'BS': batch_size", "'Hyperparams': parameters", f"{SAMPLES!r} or {EPOCHS!r}: samples to the target")
    return replace(made, notes=(*taken, *table.notes, *made.notes))


def read_rcp(path: Path, *, samples_per_epoch: int | None = None) -> tuple[RunTable, Target]:
    points = {f"{path}: {name}": fields for name, fields in _entries(read_text(path), path).items()}
    read = {place: _point(fields, place) for place, fields in points.items()}
    benchmarks = sorted({one.benchmark for one in read.values() if one.benchmark is not None})
    require(
        len(benchmarks) <= 1,
        f"{path} has several benchmarks, whose runs are not comparable: {', '.join(benchmarks)}",
        hint="import each benchmark from a separate file",
    )
    benchmark = benchmarks[0] if benchmarks else ""
    per_epoch = samples_per_epoch or SAMPLES_PER_EPOCH.get(benchmark)
    runs = [run for place, one in read.items() for run in _runs(one, place, per_epoch)]
    require(runs, f"{path} has no runs; list the values of runs under {EPOCHS!r} or {SAMPLES!r}")
    notes = [
        f"skipped {missing} of {len(one.values)} runs, because the value is null ({place})"
        if one.values
        else f"skipped a point without runs ({place})"
        for place, one in read.items()
        if (missing := one.values.count(None)) or not one.values
    ]
    if per_epoch is not None and any(one.samples is None for one in read.values()):
        counted = "samples" if per_epoch == 1 else f"epochs of {per_epoch:,} samples"
        notes.append(f"reading {EPOCHS!r} as {counted}")
    target = TARGETS.get(benchmark, UNKNOWN_TARGET)
    if target is UNKNOWN_TARGET:
        notes.append(
            f"the target of {benchmark or 'the benchmark'} is unknown; in the study, quality_target 1 means the "
            "benchmark's target"
        )
    return RunTable(tuple(runs), tuple(notes)), target


Values = list[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None]


class _Point(BaseModel):
    benchmark: str | None = None
    precision: str | None = None
    bs: int = Field(ge=1, le=LARGEST)
    hyperparams: dict[str, Any] | None = None
    epochs: Values | None = Field(default=None, alias=EPOCHS)
    samples: Values | None = Field(default=None, alias=SAMPLES)

    @property
    def values(self) -> Values:
        return (self.epochs if self.samples is None else self.samples) or []


def _point(fields: Mapping[str, Any], place: str) -> _Point:
    try:
        return _Point.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        require(first["type"] != "missing", f"{name} is missing; add {name} ({place})")
        raise UsageError(f"{name} = {first['input']!r:.60}: {problem_in_words(first)} ({place})") from None


def _runs(point: _Point, place: str, per_epoch: int | None) -> Iterator[ImportedRun]:
    configuration, label = _configuration(point, place), EPOCHS if point.samples is None else SAMPLES
    for index, value in enumerate(point.values):
        if value is None:
            continue
        samples = value
        if point.samples is None:
            samples *= required(
                per_epoch,
                f"the file counts epochs, but does not give the samples per epoch of "
                f"{point.benchmark or 'the benchmark'} ({place})",
                hint="add --samples-per-epoch N (1 if the values are samples)",
            )
        steps = round(min(samples / point.bs, 2.0 * LARGEST))
        require(
            1 <= steps <= LARGEST,
            f"{label}[{index}] = {value:g} is {samples:g} samples, which at BS = {point.bs} must be "
            f"1 to {LARGEST} steps ({place})",
            hint=f"correct {label}"
            if point.samples is not None
            else "correct the value, or give the samples of an epoch with --samples-per-epoch",
        )
        # Values in whole epochs were evaluated after each epoch.
        is_evaluated = point.samples is None and value.is_integer() and per_epoch != 1
        yield ImportedRun(
            origin=f"{place}, {label}[{index}]",
            configuration=configuration,
            steps=steps,
            last_miss_step=int((value - 1) * steps / value) if is_evaluated else None,
            precision=None if point.precision is None else point.precision.lower(),
        )


def _configuration(point: _Point, place: str) -> Configuration:
    values: dict[str, ParameterValue] = {
        name: None if value is None else parameter_value(_text(value), name, place)
        for name, value in (point.hyperparams or {}).items()
    }
    if LEARNING_RATE in values:
        values["learning_rate"] = values.pop(LEARNING_RATE)
    batch = {"batch_size": point.bs, "micro_batch_size": point.bs}
    return make_configuration(batch, values, place, lambda name: LEARNING_RATE if name == "learning_rate" else name)


def _entries(text: str, path: Path) -> dict[str, dict[str, Any]]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, value in pairs if isinstance(value, dict)]
        if len(set(names)) < len(names):  # the runs of all but the last would be lost
            raise UsageError(f"{path} has {max(names, key=names.count)!r} twice; rename one entry")
        return dict(pairs)

    data = parsed_json(text, str(path), object_pairs_hook=distinct)
    if not isinstance(data, dict) or not all(isinstance(fields, dict) for fields in data.values()):
        raise UsageError(
            f"{path} is not a mapping of reference convergence points",
            hint='write {"name": {"Benchmark": …, "BS": …, "Hyperparams": {…}, "Epochs to converge": […]}, …}',
        )
    return {
        name: {" ".join(key.lower().replace("_", " ").split()): value for key, value in fields.items()}
        for name, fields in data.items()
    }


def _text(value: object) -> str:
    if isinstance(value, str):
        return value.strip()
    return repr(value) if isinstance(value, float) and math.isfinite(value) else json.dumps(value)
