"""Studies of imported runs, with a separate study for each pair of device and precision."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, filterfalse

from bssearch.analysis.headline import headline
from bssearch.analysis.objectives import EnergyToTarget, SamplesToTarget, TimeToTarget
from bssearch.errors import TargetNotReachedError, UsageError, require, with_hint
from bssearch.exchange.importers.imported_run import LARGEST, POWER, TYPED, ImportedRun, Studies
from bssearch.exchange.trial_rows import observations_of
from bssearch.records import (
    DeviceUse,
    Environment,
    Goal,
    Phase,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
    grouped,
    with_crossing,
)
from bssearch.records.text import plural
from bssearch.search.finding import answer
from bssearch.settings import user_name
from bssearch.spec import IMPORTED, TRAINING_PARAMETERS, StudySpec, check_study_name, spec_of
from bssearch.storage.repository import Store
from bssearch.storage.studies import FinishedStudy, FinishedTrial

UNKNOWN = "unknown"
SLUG_LENGTH = 40


@dataclass(frozen=True, slots=True)
class _SeededRun:
    run: ImportedRun
    seed: int
    phase: Phase


def find_target(runs: Sequence[ImportedRun], metric: str, value: float | None, goal: Goal) -> tuple[Target, list[str]]:
    """Return the target and notes. The default target is the worst ``final_metric`` of runs that reached the target."""
    require(value is None or math.isfinite(value), f"--target = {value} must be a finite number")
    reached = [run.final_metric for run in runs if run.reached and run.final_metric is not None]
    if value is not None:
        target, notes = Target(metric=metric, value=value, goal=goal), []
    elif reached:
        worst = min(reached) if goal is Goal.MAXIMIZE else max(reached)
        target = Target(metric=metric, value=worst, goal=goal)
        notes = [
            f"the target is {metric} {goal.sign} {worst:g}, the worst final_metric of a run that reached the target"
        ]
    else:
        raise UsageError(
            "the target is unknown: no run that reached the target has a final_metric", hint="add --target VALUE"
        )
    wrong = [
        run for run in runs if run.final_metric is not None and target.is_met_by(run.final_metric) is not run.reached
    ]
    if wrong:
        first = wrong[0]
        notes.append(
            f"final_metric and reached disagree in {len(wrong)} of {len(runs)} runs (first: {first.origin} "
            f"{'reached' if first.reached else 'missed'} {metric} {goal.sign} {target.value:g} with "
            f"{first.final_metric:g}); check --goal and --target"
        )
    return target, notes


def make_studies(
    runs: Sequence[ImportedRun],
    *,
    name: str,
    target: Target,
    objective: str = TimeToTarget.name,
    default_batch: int | None = None,
    is_tuned: bool = False,
) -> Studies:
    """Make a study for each pair of device and precision.

    A single study is called ``name``. The names of several studies add the device, and the precision if a device has
    several precisions. If no run of a study has train seconds, the objective is ``samples_to_target``. ``is_tuned``
    means that the source tuned each batch size.
    """
    groups = grouped(((run.device or UNKNOWN, run.precision or UNKNOWN), run) for run in runs)
    sizes = sorted({run.configuration.batch_size for run in runs})
    require(
        default_batch is None or default_batch in sizes,
        f"--default-batch = {default_batch} must be one of {', '.join(map(str, sizes))}",
    )
    unpowered = next((run.origin for run in runs if run.reached and not run.mean_power_watts), None)
    require(
        objective != EnergyToTarget.name or unpowered is None,
        f"--objective {objective} needs the mean power of each run that reached the target; {unpowered} has no power",
        hint=f"add {POWER} to the logs or with --with {POWER}=WATTS, or choose another objective",
    )
    studies: list[FinishedStudy] = []
    notes = list(_unknown(runs))
    for kind, study_name in _names(name, list(groups)).items():
        check_study_name(study_name)
        seeded, renumbered, repeats = _with_seeds(groups[kind])
        timed = any(one.run.train_seconds is not None for one in seeded)
        spec = _spec(study_name, seeded, target, objective if timed else SamplesToTarget.name, default_batch, repeats)
        if is_tuned:
            spec = spec.model_copy(update={"workload_settings": {**spec.workload_settings, "tuned": True}})
        limit = spec.budget.trial_train_seconds
        trials = tuple(_trial(one, spec.record_target, limit, timed=timed) for one in seeded)
        studies.append(FinishedStudy(study=spec.new_study(user_name()), environment=_environment(*kind), trials=trials))
        notes += [
            f"study {study_name}: {text}" for text in _about(spec, seeded, kind, renumbered, objective, default_batch)
        ]
    return Studies(tuple(studies), tuple(notes))


def with_stored(store: Store, studies: Sequence[FinishedStudy]) -> tuple[list[FinishedStudy], list[str], list[str]]:
    """Return the studies to store, the names of stored studies to replace, and notes.

    An import with new runs or values replaces the stored import of the same name and target. Stored runs keep their
    numbers. Raises `UsageError` if the import lacks a stored run.
    """
    wanted, replaced, notes = [], [], []
    for study in studies:
        name = study.study.name
        stored = store.studies.find(name)
        if stored is None or stored.target != study.study.target or not spec_of(stored).is_imported:
            wanted.append(study)  # a name that is taken is refused later
            continue
        before = store.trials.of(name)
        numbers = grouped((_identity(one), one.number) for one in before)
        lacking = Counter(map(_identity, before)) - Counter(map(_identity, study.trials))
        require(
            not lacking,
            f"this import lacks {lacking.total()} of the {len(before)} runs of study {name!r}",
            hint="import all runs together, give another --name, or delete the study with "
            f"`bssearch study delete {name}`",
        )
        # Each run takes the place of a stored run, or follows all stored runs
        trials = sorted(study.trials, key=lambda one: (numbers.get(_identity(one)) or [LARGEST]).pop(0))
        curves = Counter(number for number, _ in observations_of(store, name, before))
        if [_figures(one) for one in before] == [_figures(one) for one in trials] and (
            [curves[one.number] for one in before] == [len(one.curve) for one in trials]
        ):
            notes.append(f"study {name}: all {len(before)} runs are stored already")
            continue
        wanted.append(replace(study, trials=trials))
        replaced.append(name)
        notes.append(f"study {name}: {len(trials) - len(before)} of {len(trials)} runs are new")
    return wanted, replaced, notes


def answer_in_words(store: Store, name: str) -> Iterator[str]:
    """Yield a study's answer or the reason for its absence, and a command that would settle an uncertain answer."""
    try:
        found = answer(store, name)
    except TargetNotReachedError as error:
        yield f"study {name}: {with_hint(error)}"
        return
    yield f"study {name}: {headline(found)}"
    if (step := found.settling) is not None and found.within_5_percent is None:
        yield f"study {name}: {step.command} {step.why}"


def _identity(trial: TrialRecord | FinishedTrial) -> tuple[str, str]:
    # Configuration and place; a table's line may change when other runs have more rows
    place = "" if trial.outcome is None else trial.outcome.reason.rpartition("(imported, ")[2]
    return trial.configuration.key, re.sub(r":\d+", "", place, count=1)


def _figures(trial: TrialRecord | FinishedTrial) -> tuple[object, ...]:
    found = trial.outcome
    assert found is not None, "imported runs have ended"
    return found.state, found.steps, found.train_seconds, found.time_to_target_s, found.final_metric


def _about(
    spec: StudySpec,
    seeded: Sequence[_SeededRun],
    kind: tuple[str, str],
    renumbered: Sequence[str],
    objective: str,
    default_batch: int | None,
) -> Iterator[str]:
    reached = sum(one.run.reached for one in seeded)
    runs = plural(len(seeded), "run")
    yield f"{reached} of {runs} reached the target on device {kind[0]} in precision {kind[1]}"
    if renumbered:
        yield (
            f"{len(renumbered)} of {runs} repeat the seed of an earlier run of the same configuration (first: "
            f"{renumbered[0]}) and got the next free seed; remove accidental duplicates"
        )
    if spec.objective != objective:
        yield f"no run has train_seconds; the objective is {spec.objective}"
    if default_batch is not None and not spec.default_is_known:
        yield f"no run has the batch size {default_batch} of --default-batch"


def _unknown(runs: Sequence[ImportedRun]) -> Iterator[str]:
    fields = {
        name: sum(getattr(run, name) is None for run in runs)
        for name in ("seed", "steps", "train_seconds", "final_metric", "device", "precision")
    }
    fields |= {name: sum(name in run.configuration.parameters for run in runs) for name in TYPED}
    if nowhere := [name for name, missing in fields.items() if missing == len(runs)]:
        yield f"all runs lack values: {', '.join(nowhere)}"
    if partly := [f"{name} in {plural(missing, 'run')}" for name, missing in fields.items() if 0 < missing < len(runs)]:
        yield f"some of {len(runs)} runs lack values: {', '.join(partly)}"


def _names(name: str, kinds: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    if len(kinds) == 1:
        return {kinds[0]: name}
    devices = [device for device, _ in kinds]
    names: dict[tuple[str, str], str] = {}
    for device, precision in kinds:
        wanted = f"{name}-{_slug(device)}" + (f"-{_slug(precision)}" if devices.count(device) > 1 else "")
        numbered = (wanted, *(f"{wanted}-{number}" for number in range(2, len(kinds) + 2)))
        names[device, precision] = next(one for one in numbered if one not in names.values())
    return names


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:SLUG_LENGTH].strip("-") or UNKNOWN


def _with_seeds(runs: Sequence[ImportedRun]) -> tuple[list[_SeededRun], list[str], int]:
    # Make seeds unique; return the changed places and the fewest repeats
    known = {id(one): one.key for one in {id(run.configuration): run.configuration for run in runs}.values()}
    keys = [known[id(run.configuration)] for run in runs]
    given = grouped(zip(keys, (run.seed for run in runs), strict=True))
    free = {key: filterfalse(set(seeds).__contains__, count()) for key, seeds in given.items()}
    used: set[tuple[str, int]] = set()
    seeded = []
    for key, run in zip(keys, runs, strict=True):
        seed = run.seed
        if seed is None or (key, seed) in used:
            seed = next(free[key])
        used.add((key, seed))
        seeded.append(_SeededRun(run, seed, Phase.CONFIRM if len(given[key]) > 1 else Phase.SEARCH))
    renumbered = [one.run.origin for one in seeded if one.run.seed not in (None, one.seed)]
    return seeded, renumbered, min((len(seeds) for seeds in given.values() if len(seeds) > 1), default=0)


def _spec(
    name: str, seeded: Sequence[_SeededRun], target: Target, objective: str, default_batch: int | None, repeats: int
) -> StudySpec:
    runs = [one.run for one in seeded]
    sizes = sorted({run.configuration.batch_size for run in runs})
    default_known = default_batch in sizes
    default_size = default_batch if default_known else min(sizes)
    default = next(run.configuration for run in runs if run.configuration.batch_size == default_size)
    configurations = [run.configuration for run in runs]
    rates = sorted({one.learning_rate for one in configurations if "learning_rate" not in one.parameters}) or [1.0]
    longest = max((run.train_seconds for run in runs if run.train_seconds), default=1.0)
    return StudySpec.model_validate(
        {
            "schema_version": 1,
            "name": name,
            "workload": IMPORTED,
            "workload_settings": {"default_known": default_known},
            "target": {"metric": target.metric, "value": target.value, "goal": target.goal},
            "objective": objective,
            "space": {"batch_size": sizes, "learning_rate": rates if len(rates) > 1 else rates[0]},
            "default": {
                "batch_size": default.batch_size,
                "learning_rate": default.learning_rate,
                **{field: getattr(default, field) for field in TRAINING_PARAMETERS if field not in default.parameters},
            },
            "confirm": {"top": len(sizes), "runs": repeats},
            "budget": {"trials": len(runs), "trial_train_seconds": longest},
        }
    )


def _trial(one: _SeededRun, target: Target, limit: float, *, timed: bool) -> FinishedTrial:
    run = one.run
    steps, seconds = run.steps, run.train_seconds
    wanted, place = f"{target.metric} {target.value:g}", run.origin.rpartition(os.sep)[2]
    missing = [name for name, value in (("steps", steps), ("train_seconds", seconds)) if value is None]
    outcome = TrialOutcome(
        state=TrialState.REACHED,
        reason=f"reached {wanted} (imported, {place})",
        steps=steps or 0,
        samples=(steps or 0) * run.configuration.batch_size,
        train_seconds=seconds or 0.0,
        time_to_target_s=seconds,
        steps_to_target=steps,
        last_miss_step=run.last_miss_step,
        first_hit_step=steps,
        first_hit_seconds=seconds,
        final_metric=run.final_metric,
        best_metric=run.final_metric,
        warnings=(f"imported without {' and '.join(missing)}",) if missing else (),
        device_use=_device_use(run),
        seconds_basis=run.seconds_basis if seconds is not None else None,
    )
    if run.crossing is not None:
        outcome = with_crossing(outcome, run.crossing)
    if not run.reached:
        outcome = replace(
            outcome,
            state=run.missed,
            reason=f"{'ended' if run.missed is TrialState.EXHAUSTED else run.missed} without {wanted} "
            f"(imported, {place})",
            time_to_target_s=None,
            steps_to_target=None,
            first_hit_step=None,
            first_hit_seconds=None,
            last_miss_step=steps,
            last_miss_seconds=seconds,
        )
    return FinishedTrial(
        configuration=run.configuration,
        sampled=None,
        uncapped=True,  # no other trial limited this trial's time
        phase=one.phase,
        seed=one.seed,
        train_seconds_limit=limit,
        outcome=outcome,
        curve=run.curve if seconds is not None or not timed else (),  # a curve without seconds has zeros
    )


def _device_use(run: ImportedRun) -> DeviceUse:
    power, seconds = run.mean_power_watts, run.train_seconds
    joules = None if power is None or seconds is None else power * seconds
    return DeviceUse(mean_power_watts=power, energy_joules=joules)


def _environment(device: str, precision: str) -> Environment:
    return Environment(
        device_name=device,
        device_type=UNKNOWN,
        device_memory_bytes=None,
        precision=precision,
        compile_mode=UNKNOWN,
        torch_version=UNKNOWN,
        cuda_version=None,
        driver_version=None,
        python_version=UNKNOWN,
        host=IMPORTED,
        workload_revision=None,
    )
