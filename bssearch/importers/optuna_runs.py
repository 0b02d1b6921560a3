"""``import optuna``: the finished trials of an Optuna study, as far as they say what they were.

An Optuna trial holds parameters, a value, and reports by steps whose unit only its author knows. So seconds and
optimizer steps are read where somebody says where they stand, or where the study is one that bssearch exported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from bssearch.curves import Crossing, first_crossing
from bssearch.errors import UsageError
from bssearch.importers.cells import integer
from bssearch.importers.imported_run import Run, make_configuration
from bssearch.importers.importer import Studies
from bssearch.importers.optuna_figures import (
    OWN_SECONDS,
    OWN_STEPS,
    OWN_TIME,
    USER_ATTRIBUTE,
    VALUE,
    check_own_place,
    checked_seconds,
    ended_at_target,
    number,
)
from bssearch.importers.runs import LARGEST_SEED, RunsObjective
from bssearch.options import Option
from bssearch.records import Goal, Observation, ParameterValue, Target, TrialState, is_metric

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from bssearch.importers.optuna_database import OptunaTrials

DURATION, STEP_MS, STEP = "duration", "step_ms", "step"
OURS = frozenset({"objective", "target_metric", "target_value", "target_goal", "train_seconds_limit"})
"""The user attributes of a study that `export --to optuna` wrote."""


def import_optuna(
    file: Annotated[str, Option("The database: a URL, or the path of a SQLite file.", metavar="FILE|URL")],
    study: Annotated[
        str | None, Option("Name of the Optuna study.", metavar="STUDY", shown_default="the only one there is")
    ] = None,
    *,
    name: Annotated[str | None, Option("Name of the study.", shown_default="that of the Optuna study")] = None,
    metric: Annotated[
        str | None, Option("What the reports and values measure.", shown_default="the study's metric name")
    ] = None,
    target: Annotated[
        float | None, Option("The value to reach.", shown_default="that of a study which bssearch exported")
    ] = None,
    goal: Annotated[
        Goal | None, Option("Which way the metric is better.", shown_default="the study's direction")
    ] = None,
    param: Annotated[
        list[str] | None, Option("A parameter's name, as in lr=learning_rate; may be repeated.", metavar="THEIRS=OURS")
    ] = None,
    seconds: Annotated[
        str | None,
        Option(
            "Where train seconds stand: duration (of the whole trial, where its last report is the first that met the "
            "target), step_ms (reports come by milliseconds), value (seconds to the target), or user_attr:NAME.",
            metavar="PLACE",
            shown_default="nowhere: they are not known",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        Option(
            "Where optimizer steps stand: step (reports come by them) or user_attr:NAME.",
            metavar="PLACE",
            shown_default="nowhere: they are not known",
        ),
    ] = None,
    objective: Annotated[
        RunsObjective | None,
        Option("What the best batch size has the least of.", shown_default=RunsObjective.TIME_TO_TARGET.value),
    ] = None,
    default_batch: Annotated[int | None, Option("The batch size in use today, which others are compared with.")] = None,
    device: Annotated[str | None, Option("Device of the trials.")] = None,
    precision: Annotated[str | None, Option("Precision of the trials.")] = None,
) -> Studies:
    """Make a study of an Optuna study's finished trials: of parameters batch_size, learning_rate and any others.

    A trial reached the target where a report or its value meets it; else a COMPLETE one is exhausted, a PRUNED one
    pruned. FAIL, RUNNING and WAITING ones are left out. Seconds that nobody measured are not read: say where they
    stand. A study that `export --to optuna` wrote says so itself.
    """
    # SQLAlchemy, which `import --help` does without
    from bssearch.importers.optuna_database import default_name, read_optuna_study
    from bssearch.importers.studies import make_studies

    found = read_optuna_study(file, study)
    reader = _reader(found, metric, target, goal, param or [], seconds, steps)
    runs, notes = reader.runs(found.trials)
    runs = [replace(run, device=device or reader.device, precision=precision) for run in runs]
    wanted, more = _objective(found, objective)
    made = make_studies(
        runs,
        name=default_name(found.name) if name is None else name,
        target=reader.target,
        objective=wanted.value,
        default_batch=default_batch,
    )
    return replace(made, notes=(*notes, *more, *made.notes))


def _objective(found: OptunaTrials, given: RunsObjective | None) -> tuple[RunsObjective, list[str]]:
    """Return the objective of the study to make, and what is to be noted of it."""
    before = found.user_attributes.get("objective") if found.user_attributes.keys() >= OURS else None
    if given is not None or before is None:
        return given or RunsObjective.TIME_TO_TARGET, []
    if before in list(RunsObjective):
        return RunsObjective(before), []
    return RunsObjective.TIME_TO_TARGET, [f"its objective was {before}, of which an import has no figures"]


def _reader(
    found: OptunaTrials,
    metric: str | None,
    target: float | None,
    goal: Goal | None,
    param: Sequence[str],
    seconds: str | None,
    steps: str | None,
) -> _Reader:
    """Return what reads the trials of a study, from what is said of them; raise `UsageError` where it cannot be."""
    if len(found.directions) != 1:
        raise UsageError(f"the Optuna study {found.name!r} has {len(found.directions)} objectives: it must have one")
    _check_place("--seconds", seconds, (DURATION, STEP_MS, VALUE))
    _check_place("--steps", steps, (STEP,))
    if (seconds, steps) == (STEP_MS, STEP):
        raise UsageError("--seconds step_ms and --steps step exclude each other: reports come by one of them")
    attributes = found.user_attributes
    is_ours = attributes.keys() >= OURS
    own = Target(
        metric=str(attributes.get("target_metric")),
        value=number(attributes.get("target_value")) or 0.0,
        goal=Goal.MINIMIZE if attributes.get("target_goal") == Goal.MINIMIZE else Goal.MAXIMIZE,
    )
    wanted = own if is_ours else _target_of(found, is_metric=seconds != VALUE)
    wanted = Target(
        metric=wanted.metric if metric is None else metric,
        value=wanted.value if target is None else target,
        goal=wanted.goal if goal is None else goal,
    )
    if not is_metric(wanted.value):
        raise UsageError(
            f"the target of the Optuna study {found.name!r} is not known"
            if target is None
            else f"--target = {target} must be a finite number",
            hint="--target VALUE says it",
        )
    for option, place in (("--seconds", seconds), ("--steps", steps)) if is_ours else ():
        check_own_place(found, option, place, own, wanted)
    takes_own = is_ours and wanted == own and seconds is None and steps is None
    return _Reader(
        place=found.place,
        target=wanted,
        names=_names(param, found),
        seconds=seconds,
        steps=STEP if is_ours and steps is None and seconds != STEP_MS else steps,
        is_ours=is_ours,
        takes_own=takes_own,
        own_values_are_seconds=list(found.metric_names) == [OWN_TIME],
        device=str(attributes["device"]) if is_ours and attributes.get("device") else None,
    )


def _target_of(found: OptunaTrials, *, is_metric: bool) -> Target:
    """Return what a study says of its metric, where its values are the metric; the target's value is NaN."""
    direction = found.directions[0] if is_metric else Goal.MAXIMIZE.value
    names = found.metric_names if is_metric else ()
    goal = Goal.MINIMIZE if direction == Goal.MINIMIZE.value else Goal.MAXIMIZE
    return Target(metric=names[0] if names else "metric", value=math.nan, goal=goal)


def _check_place(option: str, given: str | None, places: Sequence[str]) -> None:
    if given is None or given in places or given.removeprefix(USER_ATTRIBUTE) not in ("", given):
        return
    raise UsageError(f"{option} = {given!r} must be {', '.join(places)} or {USER_ATTRIBUTE}NAME")


def _names(given: Sequence[str], found: OptunaTrials) -> dict[str, str]:
    """Return our names of their parameters, of those that are told."""
    there = {name for trial in found.trials for name in trial.params}
    names: dict[str, str] = {}
    for text in given:
        theirs, separator, ours = text.partition("=")
        if not (theirs and separator and ours):
            raise UsageError(f"--param = {text!r} must be THEIRS=OURS, as in lr=learning_rate")
        if theirs not in there:
            raise UsageError(
                f"--param {text}: no trial has a parameter {theirs!r}; there are {', '.join(sorted(there)) or 'none'}"
            )
        names[theirs] = ours
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """How the trials of a study are read: what they aim at, what their parameters are called, and where figures stand.

    ``is_ours``: bssearch exported the study, so a value is its objective's figure, and never the metric that the
    reports are. ``takes_own``: figures are read from the user attributes that the export wrote, values may be seconds.
    """

    place: str
    target: Target
    names: Mapping[str, str]
    seconds: str | None
    steps: str | None
    is_ours: bool
    takes_own: bool
    own_values_are_seconds: bool
    device: str | None

    def runs(self, trials: Sequence[FrozenTrial]) -> tuple[list[Run], list[str]]:
        """Return the trials that have ended as runs, and notes. Raises `UsageError` where none says anything."""
        ended = [trial for trial in trials if trial.state.name in ("COMPLETE", "PRUNED")]
        runs = [self._run(trial) for trial in ended]
        if not runs:
            raise UsageError(f"no runs: of {len(trials)} trials of {self.place} none is COMPLETE or PRUNED")
        if all(run.train_seconds is None and run.steps is None for run in runs):
            raise UsageError(
                "; ".join(
                    [
                        "nothing says how long a trial took: neither seconds nor steps of any are known",
                        *self._notes(trials, ended, runs),
                    ]
                ),
                hint=f"--seconds {DURATION}, {STEP_MS}, {VALUE} or {USER_ATTRIBUTE}NAME says where seconds stand, "
                f"--steps {STEP} or {USER_ATTRIBUTE}NAME where optimizer steps do",
            )
        return runs, list(self._notes(trials, ended, runs))

    def _notes(self, trials: Sequence[FrozenTrial], ended: Sequence[FrozenTrial], runs: Sequence[Run]) -> Iterator[str]:
        for state, count in Counter(trial.state.name for trial in trials).items():
            if state not in ("COMPLETE", "PRUNED"):
                yield f"{count} trial{'s are' if count > 1 else ' is'} {state} and left out"
        beyond = [
            trial.number
            for trial, run in zip(ended, runs, strict=True)
            if self._are_of_whole_trial and run.reached and run.train_seconds is None
        ]
        if beyond:
            yield (
                f"{len(beyond)} of {len(runs)} trials went on past the target (the first: {beyond[0]}), or have no "
                "reports that tell where they reached it, or no duration: when they reached it is not known"
            )

    def _run(self, trial: FrozenTrial) -> Run:
        origin = f"{self.place}: trial {trial.number}"
        values = self._parameters(trial, origin)
        if values.get("batch_size") is None:
            raise UsageError(
                f"no parameter batch_size ({origin}); there are {', '.join(trial.params) or 'none'}",
                hint="--param THEIRS=batch_size says which it is",
            )
        batch_size = integer(str(values.pop("batch_size")), "batch_size", origin, low=1)
        points = self._points(trial)
        hit = first_crossing(points, self.target)
        reached = self._has_reached(trial, hit)
        metric = points[-1].metric if points else None
        if metric is None and trial.value is not None and self._values_are_metric(trial):
            metric = trial.value if is_metric(trial.value) else None
        seed = trial.user_attrs.get("seed") if self.takes_own else None
        return Run(
            origin=origin,
            configuration=make_configuration(batch_size, values, origin),
            seed=None if seed is None else integer(str(seed), "seed", origin, low=0, high=LARGEST_SEED),
            reached=reached,
            missed=self._missed(trial),
            steps=self._steps(trial, reached, points, hit, origin),
            last_miss_step=hit.last_miss_step if reached and hit is not None and self.steps == STEP else None,
            train_seconds=self._seconds(trial, reached, points, hit, origin),
            final_metric=metric,
        )

    def _parameters(self, trial: FrozenTrial, origin: str) -> dict[str, ParameterValue]:
        """Return the parameters by our names; of bssearch's own export how the batch was split, too."""
        values: dict[str, ParameterValue] = {}
        if self.takes_own:
            split = ("batch_size", "micro_batch_size", "accumulation_steps")
            values |= {name: trial.user_attrs[name] for name in split if name in trial.user_attrs}
        ours = Counter(self.names.get(name, name) for name in trial.params)
        twice = [name for name, count in ours.items() if count > 1]
        if twice:
            raise UsageError(f"{twice[0]} is the name of two parameters ({origin})", hint="--param gives one another")
        for name, value in trial.params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name} = {value} must be a finite number ({origin})")
            known = value is None or isinstance(value, bool | int | float | str)
            values[self.names.get(name, name)] = value if known else str(value)
        return values

    def _points(self, trial: FrozenTrial) -> list[Observation]:
        """Return the reports that are numbers, by step; their seconds are those of the steps where these are ms."""
        unit = 1000 if self.seconds == STEP_MS else math.inf
        return [
            Observation(step=step, samples=0, train_seconds=step / unit, metric=value, loss=None, learning_rate=0.0)
            for step, value in sorted(trial.intermediate_values.items())
            if is_metric(value)
        ]

    @property
    def _are_of_whole_trial(self) -> bool:
        """Return whether the seconds are those of a whole trial, which may have gone on past the target."""
        return self.seconds == DURATION or (self.is_ours and self.seconds == USER_ATTRIBUTE + OWN_SECONDS)

    def _values_are_metric(self, trial: FrozenTrial) -> bool:
        """Return whether the value of a trial is the metric: that of a pruned one is its last report."""
        return trial.state.name == "COMPLETE" and self.seconds != VALUE and not self.is_ours

    def _has_reached(self, trial: FrozenTrial, hit: Crossing | None) -> bool:
        if self.takes_own and "state" in trial.user_attrs:
            return bool(trial.user_attrs["state"] == TrialState.REACHED)
        if self.seconds == VALUE:
            return trial.state.name == "COMPLETE"
        by_value = self._values_are_metric(trial) and trial.value is not None and self.target.is_met_by(trial.value)
        return hit is not None or by_value

    def _missed(self, trial: FrozenTrial) -> TrialState:
        """Return how a trial ended where it missed the target; of bssearch's own export as it was stored."""
        own = trial.user_attrs.get("state") if self.takes_own else None
        if own in (TrialState.CAPPED, TrialState.EXHAUSTED, TrialState.DIVERGED):
            return TrialState(own)
        return TrialState.PRUNED if trial.state.name == "PRUNED" else TrialState.EXHAUSTED

    def _steps(
        self, trial: FrozenTrial, reached: bool, points: Sequence[Observation], hit: Crossing | None, origin: str
    ) -> int | None:
        """Return the optimizer steps to the target, or all of a trial that missed it; None where nobody says."""
        if self.takes_own or (self.steps or "").startswith(USER_ATTRIBUTE):
            own = OWN_STEPS if reached else "steps"
            name = own if self.takes_own else str(self.steps).removeprefix(USER_ATTRIBUTE)
            value = trial.user_attrs.get(name)
            return None if value is None else integer(str(value), name, origin, low=1 if reached else 0)
        if self.steps != STEP:
            return None
        if reached:
            return None if hit is None else max(1, hit.steps)
        return points[-1].step if points else None

    def _seconds(
        self, trial: FrozenTrial, reached: bool, points: Sequence[Observation], hit: Crossing | None, origin: str
    ) -> float | None:
        """Return the seconds to the target, or all of a trial that missed it; None where nobody has measured them."""
        if self.takes_own:
            return self._own_seconds(trial, reached, origin)
        if self.seconds is None:
            return None
        if self.seconds.startswith(USER_ATTRIBUTE):
            name = self.seconds.removeprefix(USER_ATTRIBUTE)
            if reached and self._are_of_whole_trial and not ended_at_target(hit, trial):
                return None
            return checked_seconds(trial.user_attrs.get(name), name, reached, origin)
        if self.seconds == VALUE:
            return checked_seconds(trial.value, "value", reached, origin) if reached else None
        if self.seconds == STEP_MS:
            if reached:
                return (hit.train_seconds or None) if hit is not None else None
            return points[-1].train_seconds if points else None
        took = None if trial.duration is None else trial.duration.total_seconds()
        return None if not took or took < 0 or (reached and not ended_at_target(hit, trial)) else took

    def _own_seconds(self, trial: FrozenTrial, reached: bool, origin: str) -> float | None:
        """Return what bssearch measured; of a trial that something disturbed what its answer counted: the value."""
        attributes = trial.user_attrs
        if not reached:
            return checked_seconds(attributes.get(OWN_SECONDS), OWN_SECONDS, reached, origin)
        if attributes.get("contended") and self.own_values_are_seconds:
            return checked_seconds(trial.value, "value", reached, origin)
        return checked_seconds(attributes.get(OWN_TIME), OWN_TIME, reached, origin)
