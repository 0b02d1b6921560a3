"""``import rcp``: MLPerf's reference convergence points, samples to the target by batch size.

https://github.com/mlcommons/logging, ``mlperf_logging/rcp_checker/*/rcps_*.json``.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bssearch.analysis.objectives import SamplesToTarget
from bssearch.errors import UsageError, require
from bssearch.exchange.importers.imported_run import (
    LARGEST,
    ImportedRun,
    RunTable,
    Studies,
    StudyName,
    integer,
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

# If the file has no target: 1 when a run reaches the benchmark's target.
UNKNOWN_TARGET = Target(metric="quality_target", value=1.0)

LEARNING_RATE = "opt_base_learning_rate"
EPOCHS, SAMPLES = "epochs to converge", "samples to converge"


def import_rcp(
    file: Annotated[Path, Option("A file of MLPerf reference convergence points.", metavar="FILE.json")],
    *,
    name: StudyName = None,
    samples_per_epoch: Annotated[
        int | None,
        Option(
            "Samples per epoch if the file counts epochs; 1 if its epochs are samples.",
            min=1,
            shown_default="built in for bert, resnet and retinanet",
        ),
    ] = None,
) -> Studies:
    """Make a study from MLPerf's reference convergence points.

    Each point holds the samples to the target at one batch size.
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
    """File's runs and target; runs without a value are noted and left out."""
    entries = [_Entry(name, fields, str(path)) for name, fields in _entries(read_text(path), path).items()]
    benchmarks = sorted({one.benchmark for one in entries if one.benchmark is not None})
    require(
        len(benchmarks) <= 1,
        f"{path} has several benchmarks, whose runs are not comparable: {', '.join(benchmarks)}",
        hint="import each benchmark from a separate file",
    )
    benchmark = benchmarks[0] if benchmarks else None
    per_epoch = samples_per_epoch or SAMPLES_PER_EPOCH.get(benchmark or "")
    runs: list[ImportedRun] = []
    notes: list[str] = []
    for entry in entries:
        results = list(entry.results())
        runs += entry.runs(results, per_epoch)
        missing = sum(result is None for _, result in results)
        if not results:
            notes.append(f"no run has a value; skipped ({entry.place})")
        elif missing:
            notes.append(f"{missing} of {len(results)} runs have no value; skipped ({entry.place})")
    require(runs, f"{path} has no runs: add a list {EPOCHS!r} or {SAMPLES!r}")
    if per_epoch is not None and any(entry.counts_epochs for entry in entries):
        counted = "samples" if per_epoch == 1 else f"epochs of {per_epoch:,} samples"
        notes.append(f"{EPOCHS!r} is read as {counted}")
    target = TARGETS.get(benchmark or "", UNKNOWN_TARGET)
    if target is UNKNOWN_TARGET:
        notes.append("the file has no target; quality_target 1 means that the benchmark's target was reached")
    return RunTable(tuple(runs), tuple(notes)), target


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    fields: Mapping[str, Any]
    source: str

    @property
    def place(self) -> str:
        return f"{self.source}: {self.name}"

    @property
    def benchmark(self) -> str | None:
        return None if self.fields.get("benchmark") is None else str(self.fields["benchmark"])

    @property
    def counts_epochs(self) -> bool:
        return self.fields.get(SAMPLES) is None

    def results(self) -> Iterator[tuple[str, float | None]]:
        field = EPOCHS if self.counts_epochs else SAMPLES
        values = self.fields.get(field)
        require(not isinstance(values, dict), f"{field!r} must be a list with a number for each run ({self.place})")
        for index, value in enumerate([] if values is None else values if isinstance(values, list) else [values]):
            label = f"{field}[{index}]"
            number = None if value is None else parameter_value(_text(value), label, self.place)
            if value is not None and (isinstance(number, str | bool | None) or number <= 0):
                raise UsageError(f"{label} = {value!r} must be a number > 0 ({self.place})")
            yield label, None if number is None else float(number)

    def runs(self, results: list[tuple[str, float | None]], per_epoch: int | None) -> Iterator[ImportedRun]:
        if not results:
            return
        configuration = self._configuration()
        precision = self.fields.get("precision")
        require(
            not self.counts_epochs or per_epoch is not None,
            f"the file counts epochs, but does not give the samples per epoch of "
            f"{self.benchmark or 'the benchmark'} ({self.place})",
            hint="add --samples-per-epoch N, or 1 if the values are samples",
        )
        for label, value in results:
            if value is None:
                continue
            samples = value * (per_epoch or 1) if self.counts_epochs else value
            steps = round(min(samples / configuration.batch_size, 2.0 * LARGEST))
            require(
                1 <= steps <= LARGEST,
                f"{label} = {value:g} is {samples:g} samples, which at BS = {configuration.batch_size} must be "
                f"1 to {LARGEST} steps ({self.place})",
                hint="give the samples of an epoch with --samples-per-epoch" if self.counts_epochs else None,
            )
            # Values in whole epochs were evaluated after each epoch.
            evaluated = value - 1 if self.counts_epochs and value.is_integer() and (per_epoch or 1) > 1 else None
            yield ImportedRun(
                origin=f"{self.place}, {label}",
                configuration=configuration,
                steps=steps,
                last_miss_step=None if evaluated is None else int(evaluated * steps / value),
                precision=None if precision is None else str(precision).lower(),
            )

    def _configuration(self) -> Configuration:
        batch_size = self.fields.get("bs")
        require(batch_size is not None, f"BS (the batch size) is missing; add BS ({self.place})")
        given = self.fields.get("hyperparams")
        require(isinstance(given, dict | None), f"Hyperparams must be a mapping of names to values ({self.place})")
        values: dict[str, ParameterValue] = {
            str(name): None if value is None else parameter_value(_text(value), str(name), self.place)
            for name, value in (given or {}).items()
        }
        if LEARNING_RATE in values:
            values["learning_rate"] = values.pop(LEARNING_RATE)
        size = integer(_text(batch_size), "BS", self.place, low=1)
        batch = {"batch_size": size, "micro_batch_size": size}
        return make_configuration(
            batch, values, self.place, lambda name: LEARNING_RATE if name == "learning_rate" else name
        )


def _entries(text: str, path: Path) -> dict[str, dict[str, Any]]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, value in pairs if isinstance(value, dict)]
        if len(set(names)) < len(names):  # the runs of all but the last would be lost
            raise UsageError(f"{path} has {max(names, key=names.count)!r} twice; rename one")
        return dict(pairs)

    data = parsed_json(text, str(path), object_pairs_hook=distinct)
    if not isinstance(data, dict) or not all(isinstance(fields, dict) for fields in data.values()):
        raise UsageError(
            f"{path} is no mapping of reference convergence points",
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
