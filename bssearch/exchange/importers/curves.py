"""``import curves``: studies from training logs, with learning curves and settings."""

import itertools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from bssearch.errors import UsageError, require
from bssearch.exchange.importers.columns import ABOUT, PARAMETER, RESULT_NAME, Formula, mappings
from bssearch.exchange.importers.imported_run import (
    BATCH,
    BATCH_PARTS,
    POWER,
    SPLIT,
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
from bssearch.exchange.importers.logged import (
    CLOCKS,
    DIGITS,
    EPOCH,
    LATE,
    MOST_NAMED,
    SECONDS,
    STEPS,
    Curve,
    Names,
    curve_of,
    first_name,
    is_late,
    listed,
)
from bssearch.exchange.importers.logs import RUN_NAMES, Log, Row, logs_in, number_in
from bssearch.exchange.importers.runs import LARGEST_SEED, check_scale
from bssearch.records import (
    Configuration,
    Goal,
    ParameterValue,
    SecondsBasis,
    Target,
    TrialState,
    first_crossing,
    grouped,
)
from bssearch.records.text import nearest
from bssearch.registry import Option

# our name of a setting, by the last part of the name in the log
_LEAVES = {
    **dict.fromkeys(("batch_size", "train_batch_size", "batchsize", "bs", "bsz", "batch"), BATCH),
    **dict.fromkeys(("minibatch", "minibatch_size", "mini_batch_size"), BATCH),
    **dict.fromkeys(("learning_rate", "lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("weight_decay", "wd"), "weight_decay"),
    **dict.fromkeys(("optimizer", "optim", "optimizer_name"), "optimizer"),
    **dict.fromkeys(("seed", "random_seed", "seed_everything", "rng", "rng_seed", "repeat", "rep"), "seed"),
    **{name: name for name in (*TYPED[1:], "device", "precision", POWER)},
}
_OF_THE_RUN = {"seed", "device", "precision", POWER}  # no hyperparameters

_EVALUATION = re.compile(r"(?:^|[./_])(?:eval|val|valid|validation|test)(?:[./_]|$)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value, and the name in the log.

    ``distance`` is 1 + the number of dots and slashes after a logged name's prefix, or 0 for renamed and unlogged
    settings. Among the logged settings of one name, the smallest distance counts.
    """

    theirs: str
    value: Any
    distance: int = 0


GIVEN = "--with"

Settings = Mapping[str, Setting]  # by our names, else by the log's


def settings_of(logs: Sequence[Log], column: Sequence[str], given: Sequence[str], run: str | None) -> list[Settings]:
    """Return the settings of each log. ``column`` renames settings, and ``given`` sets settings."""
    there = dict.fromkeys(name for log in logs for name in (*log.settings, *log.mentioned))
    renamed = mappings("--column", column, there, "setting")
    added = {}
    for text in given:
        name, separator, value = text.partition("=")
        require(name and separator and value, f"--with {text} must be NAME=VALUE, as in world_size=2")
        if not (_is_known(_ours(name)) or name in there):
            otherwise = "name a setting of the logs, or a usual setting such as batch_size or world_size"
            raise UsageError(
                f"--with {text}: unknown setting {name!r}",
                hint=nearest(name, [*_LEAVES, *SPLIT, "gradient_accumulation_steps"], otherwise),
            )
        added[_ours(name)] = Setting(GIVEN, value)
    return [{**_of_log(log, renamed, run), **added} for log in logs]


def _of_log(log: Log, renamed: Mapping[str, tuple[str, Formula]], run: str | None) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    mentioned = {name: value for name, value in log.mentioned.items() if _is_known(_ours(name))}
    for name, value in {**mentioned, **log.settings}.items():
        if name in renamed:
            ours, formula = renamed[name]
            one = Setting(name, formula(str(value)))
        elif name != run and _is_setting(name, value):
            ours = _ours(name)
            one = Setting(name, value, 1 + len(re.findall(r"[./]", PARAMETER.sub("", name, count=1))))
        else:
            continue
        known = found.get(ours)
        if known is not None and known.distance == one.distance and str(known.value) != str(one.value):
            raise UsageError(
                f"{known.theirs} = {known.value} and {name} = {value} both mean {ours} ({log.origin})",
                hint=f"choose a setting with --column NAME={ours}",
            )
        if known is None or one.distance < known.distance:
            found[ours] = one
    if "learning_rate" not in found and (logged := _highest_rate(log)) is not None:
        found["learning_rate"] = logged
    return {**_of_name(log.origin), **found}


def _of_name(origin: str) -> dict[str, Setting]:
    # Settings in the names of a run and its folder, such as bs16_lr0.1
    texts = _IN_NAME.findall("/".join(Path(origin).parts[-2:]))
    return {_ours(name): Setting(f"{name} in the path", value) for name, value in texts}


_IN_NAME = re.compile(
    rf"(?:^|[\W_])({'|'.join(sorted((*_LEAVES, *BATCH_PARTS), key=len, reverse=True))})[_=-]?"
    r"(\d+(?:\.\d+)?(?:e-?\d+)?)(?![^\W_])",
    re.IGNORECASE,
)


def _highest_rate(log: Log) -> Setting | None:
    # As a schedule changes the learning rate, its peak is the setting
    names = dict.fromkeys(name for row in log.rows for name in row)
    for name in filter(_RATE.search, names):
        rates = [one for row in log.rows if (one := number_in(row.get(name))) > 0 and math.isfinite(one)]
        if rates:
            return Setting(f"the highest {name}", float(f"{max(rates):.{DIGITS}g}"))
    return None


_RATE = re.compile(r"(?:^|[./])(?:lr|learning_rate)(?:-\w+)?$")


def _is_setting(name: str, value: Any) -> bool:
    if isinstance(value, list | dict | tuple) or str(value) in ("", "None") or name.lower() in RUN_NAMES:
        return False
    if _is_known(_ours(name)):
        return not _EVALUATION.search(name.lower())
    is_logged = name.lower() in (*STEPS, *SECONDS, *CLOCKS, EPOCH)
    return not (is_logged or ABOUT.fullmatch(name) or RESULT_NAME.fullmatch(name))


def _is_known(ours: str) -> bool:
    return ours in _LEAVES.values() or is_about_batch(ours)


def _ours(name: str) -> str:
    plain = PARAMETER.sub("", name, count=1)
    return _LEAVES.get(re.split(r"[./]", plain)[-1].lower().replace("-", "_"), plain)


def batch_of(settings: Settings, log: Log) -> GivenBatch:
    parts = {name: one.value for name, one in settings.items() if is_about_batch(name)}
    labels = {name: name if one.theirs == GIVEN else one.theirs for name, one in settings.items()}
    found = GivenBatch.of(parts, log.origin, labels.__getitem__)
    if found.is_known:
        return found
    raise UsageError(
        f"the batch size of {log.origin} is unknown; settings found: {listed(list(settings))}",
        hint=f"name the setting with --column NAME={BATCH}, name the column of runs with --run NAME, or set one batch "
        f"size with --with {BATCH}=N",
    )


def hyperparameters(settings: Iterable[Settings]) -> list[str]:
    """Return the known hyperparameters, and the settings that vary between runs but do not name the run."""
    runs = list(settings)
    names = dict.fromkeys(name for one in runs for name in one if name not in _OF_THE_RUN and not is_about_batch(name))
    values = {name: {str(one[name].value) if name in one else None for one in runs} for name in names}
    return [name for name in names if name in TYPED or (len(values[name]) > 1 and not _are_labels(values[name], runs))]


def _are_labels(values: Collection[str | None], runs: Sequence[Settings]) -> bool:
    # Texts that differ in each run name the run, as paths do
    return len(values) == len(runs) > FEW_RUNS and all(one and math.isnan(number_in(one)) for one in values)


FEW_RUNS = 3


def sources(settings: Settings) -> str:
    """List the log's names of batch-size settings and hyperparameters that differ from bssearch's names."""
    shown = {name: one.theirs for name, one in settings.items() if is_about_batch(name) or name in TYPED}
    return "; ".join(f"{name}: {theirs}" for name, theirs in shown.items() if name != theirs)


LogsObjective = Literal["time_to_target", "samples_to_target", "energy_to_target"]  # objectives that logs can answer


def import_curves(
    file: Annotated[
        list[str],
        Option(
            "Tables of evaluations (.csv, .tsv, .json, .jsonl, also .gz) or text logs (slurm-*.out, .log). Folders "
            "with runs of Lightning's CSVLogger, the Hugging Face Trainer, Ray Tune, MLflow, TensorBoard or Weights & "
            "Biases. Zeus's traces, MLflow's databases and tracking servers. PLACE#NAME chooses MLflow's experiment or "
            "Zeus's workload.",
            metavar="FILE|FOLDER|URL…",
        ),
    ],
    *,
    name: StudyName = None,
    metric: Annotated[
        str | None, Option("Name of the metric in the logs.", shown_default="the only validation metric")
    ] = None,
    target: Annotated[
        float | None,
        Option("Target value of the metric.", shown_default="the value that at least half of the runs reach"),
    ] = None,
    goal: Annotated[
        Goal | None, Option("Direction in which the metric improves.", shown_default=Goal.MAXIMIZE.value)
    ] = None,
    step: Annotated[str | None, Option("Name of the optimizer steps in the logs.")] = None,
    seconds: Annotated[str | None, Option("Name in the logs for the seconds since the run began.")] = None,
    run: Annotated[str | None, Option("Column of a table that names each row's run.")] = None,
    column: Annotated[
        list[str] | None,
        Option("Rename a setting, as in batch_size=micro_batch_size; may be repeated.", metavar="THEIRS=OURS"),
    ] = None,
    given: Annotated[
        list[str] | None,
        Option(
            "Set or override a setting of all runs, as in gradient_accumulation_steps=4; may be repeated.",
            metavar="NAME=VALUE",
            flag="--with",
        ),
    ] = None,
    epoch_samples: Annotated[
        int | None, Option("Samples of an epoch, if the logs count epochs instead of steps.", min=1)
    ] = None,
    objective: Annotated[LogsObjective, Option("Cost to minimize.")] = "time_to_target",
    default_batch: Annotated[int | None, Option("Current batch size, the baseline of comparisons.")] = None,
    dry_run: Annotated[bool, Option("Print the runs of the logs, but store no study.", flag="--dry-run")] = False,
) -> Studies:
    """Make a study with learning curves from training logs.

    A run's settings come from its log, files beside the log, the log's path and --with. bssearch multiplies a batch
    size per device by accumulation steps and devices. Each pair of device and precision gets a separate study.
    """
    from bssearch.exchange.importers.imported_studies import make_studies  # loads SQLAlchemy

    logs = [one for log in logs_in(file, run) for one in _apart(log, column or ())]
    places = [Path("mlflow" if one.startswith("http") else one.partition("#")[0]) for one in file]
    described = _description(places)
    named = Names.of(logs, metric or described.get("metric_column"), step, seconds, epoch_samples)
    evaluated = [log for log in logs if any(row.get(named.metric) not in (None, "") for row in log.rows)]
    known = {log.origin for log in evaluated}
    without = [log.origin for log in logs if log.origin not in known]
    runs, notes = _runs(evaluated, settings_of(evaluated, column or (), given or (), run), named, without)
    if described:
        runs = [replace(one, seconds_basis=None) for one in runs]
    wanted, told = _target(
        runs,
        described.get("metric") or named.metric,
        described.get("target") if target is None else target,
        goal or described.get("goal"),
        str(places[0]),
    )
    made = make_studies(
        [_judged(one, wanted) for one in runs],
        name=name or described.get("name") or places[0].resolve().name.partition(".")[0],
        target=wanted,
        objective=objective,
        default_batch=default_batch,
    )
    return Studies(made.studies, (*notes, *told, *_confounders(runs), *made.notes), dry_run)


def _apart(log: Log, column: Sequence[str]) -> list[Log]:
    # Runs of a table without a column of runs, split by settings if these differ between runs
    first = log.rows[0] if log.rows else {}
    renamed = {theirs: ours for theirs, _, ours in (one.rpartition("=") for one in column)}
    ours = {name: renamed.get(name, _ours(name)) for name in first if name not in log.settings}
    rates = [name for name, one in ours.items() if one == "learning_rate"]
    keys = [name for name, one in ours.items() if _is_known(one) and name not in rates]
    step = first_name(first, STEPS)
    is_told = any(is_about_batch(_ours(name)) for name in (*log.settings, *log.mentioned))
    sizes = [name for name in keys if is_about_batch(ours[name]) and name.lower() != "batch"]  # that may be a counter
    if step is None or is_told or not sizes or RUN_NAMES & {*map(str.lower, first)}:
        return [log]
    parts: list[tuple[tuple[str, ...], list[Row]]] = []
    for key, rows in grouped((_cells(row, keys), row) for row in log.rows).items():
        steps = [number_in(row.get(step)) for row in rows]
        if rates and any(later < earlier for earlier, later in itertools.pairwise(steps)):  # else a rate may change
            parts += [(key + rate, part) for rate, part in grouped((_cells(row, rates), row) for row in rows).items()]
        else:
            parts.append((key, rows))
    if any("" in key or not _begins(rows, step) for key, rows in parts):
        return [log]
    told = [dict(zip((*keys, *rates), key, strict=False)) for key, _ in parts]
    longest = max(told, key=len)
    note = f"the table has no column of runs; rows with equal {', '.join(longest)} count as one run"
    return [
        replace(
            log,
            origin=f"{log.origin} ({', '.join(f'{name} {value}' for name, value in settings.items())})",
            rows=rows,
            settings={**log.settings, **settings},
            note=note,
        )
        for settings, (_, rows) in zip(told, parts, strict=True)
    ]


def _begins(rows: Sequence[Row], step: str) -> bool:
    # True if rows hold the beginning of a run, not a later part, as after a change of the batch size
    steps = sorted({number_in(row.get(step)) for row in rows})
    return len(steps) > 1 and steps[0] <= LATE * (steps[1] - steps[0])


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row.get(name, "")) for name in names)


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


def _runs(
    logs: Sequence[Log], settings: Sequence[Settings], names: Names, without: Sequence[str]
) -> tuple[list[ImportedRun], list[str]]:
    given = [batch_of(one, log) for log, one in zip(logs, settings, strict=True)]
    is_given = any(BATCH in one and one[BATCH].theirs == GIVEN for one in settings)
    batches, assumed = step_batches(
        given, "use --with {ours}=N" if is_given else "add --column {theirs}={ours}", "--with {}=N"
    )
    varied = hyperparameters(settings)
    runs, without, resumed, repeated = [], [*without], list[str](), list[str]()
    read: dict[str, None] = {}
    for log, own, batch in zip(logs, settings, batches, strict=True):
        named = names.of_log(log)
        curve = curve_of(log, named, batch[BATCH])
        if not curve.observations:
            without.append(log.origin)
            continue
        read[named.sentence] = None
        resumed += [log.origin] if curve.resumes else []
        repeated += [log.origin] if curve.repeats else []
        runs.append(_run(log, own, batch, varied, curve, named))
    require(
        runs,
        f"no run has a finite {names.metric}; runs: {listed(without)}",
        hint="choose another metric with --metric NAME",
    )
    notes = [sources(settings[0]), *assumed, *read, *dict.fromkeys(log.note for log in logs), *_about(logs, runs)]
    if "learning_rate" not in varied:
        notes.append(
            "no run has a learning rate, so the answer cannot say which batch sizes are hardly tuned; name the rate's "
            "setting with --column NAME=learning_rate"
        )
    untimed = [one.origin for one in runs if not _is_timed(one)]
    for found, what in (
        (without, f"have no finite {names.metric} and were skipped"),
        (resumed, "go back to an earlier step and count as resumed"),
        (repeated, "have several values of the metric at a step; the last value counts"),
        (untimed if len(untimed) < len(runs) else [], "have no train seconds"),
    ):
        if found:
            notes.append(f"{len(found)} of {len(runs) + len(without)} runs {what} (first: {found[0]})")
    return runs, [one for one in notes if one]


def _run(
    log: Log, own: Settings, batch: Mapping[str, int], varied: Sequence[str], curve: Curve, names: Names
) -> ImportedRun:
    values = {name: str(one.value) for name, one in own.items()}
    parameters: dict[str, ParameterValue] = {
        name: parameter_value(values[name], name, log.origin) if name in values else None for name in varied
    }
    return ImportedRun(
        origin=log.origin,
        configuration=make_configuration(batch, parameters, log.origin),
        seed=integer(values["seed"], "seed", log.origin, low=0, high=LARGEST_SEED) if "seed" in values else None,
        missed=TrialState.DIVERGED if curve.has_diverged else TrialState.EXHAUSTED,
        device=re.sub(r"^(cuda|xpu|mps):\d+$", r"\1", values["device"]) if "device" in values else None,
        precision=values.get("precision"),
        mean_power_watts=_power(values, log.origin),
        curve=curve.observations,
        seconds_basis=SecondsBasis.REPORTED if names.is_training else SecondsBasis.WALL,
    )


def _power(values: Mapping[str, str], origin: str) -> float | None:
    if POWER not in values:
        return None
    watts = number_in(values[POWER])
    require(0 < watts < math.inf, f"{POWER} = {values[POWER]!r} must be a number > 0 ({origin})")
    return watts


def _about(logs: Sequence[Log], runs: Sequence[ImportedRun]) -> Iterator[str]:
    counts = Counter(run.configuration.batch_size for run in runs)
    yield "batch size (runs): " + ", ".join(f"{size} ({count})" for size, count in sorted(counts.items()))
    by_one = [one for run in runs for one in np.diff([at.step for at in run.curve])]
    if by_one and set(by_one) == {1}:
        yield "every step has an evaluation; if the steps are epochs, add --epoch-samples N"
    if late := [run for run in runs if is_late(run.curve)]:
        yield (
            f"{len(late)} of {len(runs)} logs lack the first steps (first: {late[0].origin}); assuming that unlogged "
            "steps took as long as later steps"
        )
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
            f"an epoch has {samples[most]:,.0f} samples in {most} and {samples[least]:,.0f} in {least}; if a factor of "
            "the batch size is missing, such as accumulation or devices, add --with NAME=VALUE"
        )


FEWEST_EPOCHS = 2  # an epoch counted from 0 or 1 changes an epoch's samples by up to a half
UNLIKE = 1.8


def _is_timed(run: ImportedRun) -> bool:
    return run.curve[-1].train_seconds > 0


def _target(
    runs: Sequence[ImportedRun], metric: str, value: float | None, goal: Goal | None, source: str
) -> tuple[Target, list[str]]:
    require(value is None or math.isfinite(value), f"--target = {value} must be a finite number")
    wanted = Target(metric=metric, value=0.0 if value is None else value, goal=goal or Goal.MAXIMIZE)
    metrics = [one.metric for run in runs for one in run.curve]
    notes = []
    if value is None:
        best = [max((one.metric for one in run.curve), key=wanted.gain) for run in runs]
        half = statistics.median_low(best) if wanted.goal is Goal.MAXIMIZE else statistics.median_high(best)
        wanted = replace(wanted, value=half)
        notes = [
            f"the target is {wanted.in_words}, which at least half of the runs reach; set another target with --target "
            "VALUE"
        ]
    check_scale(metrics, wanted, goal, source)
    return wanted, notes


def _judged(run: ImportedRun, target: Target) -> ImportedRun:
    # The run with its crossing or end
    found, last = first_crossing(run.curve, target), run.curve[-1]
    require(
        found is None or found.first_hit_step != 0,
        f"the run meets {target.in_words} before the first step ({run.origin})",
        hint="set a harder target with --target VALUE",
    )
    end = last if found is None else next(one for one in run.curve if one.step == found.first_hit_step)
    seconds = last.train_seconds if found is None else found.train_seconds
    return replace(
        run,
        reached=found is not None,
        crossing=found,
        steps=last.step if found is None else found.steps,
        train_seconds=seconds if _is_timed(run) else None,
        final_metric=end.metric,
    )


def _confounders(runs: Sequence[ImportedRun]) -> Iterator[str]:
    by_size = grouped((run.configuration.batch_size, run.configuration) for run in runs)
    names = dict.fromkeys(name for run in runs for name in run.configuration.parameters)
    typed = [name for name in TYPED if name != "learning_rate" and name not in names]
    for name in (*typed, *names):
        values = {size: {_value(one, name) for one in there} for size, there in by_size.items()}
        if all(len(one) == 1 for one in values.values()) and len(set.union(*values.values())) > 1:
            words = ", ".join(f"{next(iter(one))} at {size}" for size, one in sorted(values.items())[:MOST_NAMED])
            yield f"{name} changes with the batch size, so the two effects cannot be separated: {words}"


def _value(configuration: Configuration, name: str) -> str:
    return str(getattr(configuration, name) if name in TYPED else configuration.parameters.get(name))
