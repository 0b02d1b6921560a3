"""``import optuna``: COMPLETE and PRUNED trials of an Optuna study.

A report's step has no unit. The user names the sources of seconds and steps, unless bssearch exported the study.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

from bssearch.errors import UsageError, require, with_hint
from bssearch.exchange.importers.columns import Formula, check_epochs, checked_seconds, mappings, seconds_of_unit
from bssearch.exchange.importers.imported_run import (
    LARGEST,
    SPLIT,
    GivenBatch,
    ImportedRun,
    Studies,
    integer,
    is_about_batch,
    make_configuration,
    parameter_value,
    part_of_batch,
    step_batches,
)
from bssearch.exchange.importers.runs import LARGEST_SEED, FiguresAt, RunsObjective, check_scale
from bssearch.records import Crossing, Goal, Observation, ParameterValue, Target, TrialState, first_crossing, is_metric
from bssearch.records.text import plural
from bssearch.registry import Option

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from bssearch.exchange.optuna_study import OptunaStudy

VALUE, USER_ATTRIBUTE = "value", "user_attr:"
# Attributes of `export --to optuna`: two for the study's target, one for the whole trial.
OWN_TIME, OWN_STEPS, OWN_SECONDS = "time_to_target_s", "steps_to_target", "train_seconds"


def ended_at_target(hit: Crossing | None, trial: FrozenTrial) -> bool:
    return hit is not None and hit.last_miss_step < hit.first_hit_step == max(trial.intermediate_values)


def hit_before_end(hit: Crossing, trial: FrozenTrial, *, is_value_a_metric: bool) -> bool:
    """True if the trial trained past the first report that met the target, and reports cover the whole training."""
    # A value unlike all reports was measured later: training may have been longer.
    reports = trial.intermediate_values
    if hit.first_hit_step == max(reports):
        return False
    value = trial.value if is_value_a_metric else None
    return value is None or any(math.isclose(value, report) for report in reports.values())


def are_seconds_of_whole(trial: FrozenTrial, seconds: float, share: float) -> bool | None:
    """Judge by the trial's duration whether ``seconds`` cover the whole trial, or return None if unclear.

    ``share`` is the part of the training, from 0 to 1, up to the first report that met the target.
    """
    # 20 % more than ``share`` of the duration allows for a slow first epoch.
    lasted = 0.0 if trial.duration is None else trial.duration.total_seconds()
    if lasted <= 0 or seconds > lasted * 1.02:
        return None
    return seconds > 1.2 * share * lasted or (seconds > 0.98 * lasted and share < 0.95)


def most_at_once(trials: Sequence[FrozenTrial]) -> int:
    times = [(one.datetime_start, one.datetime_complete) for one in trials]
    known = [(start, end) for start, end in times if start is not None and end is not None and start < end]
    changes = sorted([*((start, 1) for start, _ in known), *((end, -1) for _, end in known)])
    return max(accumulate(change for _, change in changes), default=0)


def _seconds_of(value: Any, name: str, reached: bool, origin: str) -> float | None:
    # Seconds of a value in its name's unit, if any
    if value is None:
        return None
    found = number(value)
    seconds = math.nan if found is None else found * seconds_of_unit(name)
    return checked_seconds(seconds, value, name, reached, origin)


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


MOST_POWER = 16  # 2**16 is the largest common batch size
FEW = 10  # Smaller gaps are rarely optimizer steps: evaluating would take longer than training between reports


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSteps:
    """The first report step, and the smallest and largest gap between reports.

    Gaps are None if no trial has two reports.
    """

    first: int = 1
    smallest_gap: int | None = None
    largest_gap: int | None = None

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial]) -> Self:
        steps = [sorted(trial.intermediate_values) for trial in trials if trial.intermediate_values]
        gaps = [later - earlier for one in steps for earlier, later in pairwise(one)]
        return cls(
            first=min((one[0] for one in steps), default=1),
            smallest_gap=min(gaps, default=None),
            largest_gap=max(gaps, default=None),
        )

    @property
    def may_be_epochs(self) -> bool:
        return self.largest_gap is not None and self.largest_gap <= FEW and self.first <= FEW

    @property
    def are_epochs(self) -> bool:
        """True if report steps count 0, 1, 2, … or 1, 2, 3, …, with gaps of at most `FEW`."""
        return self.may_be_epochs and self.smallest_gap == 1 and self.first <= 1

    @property
    def epochs_before_first(self) -> int:
        """1 if reports count epochs from 0, else 0."""
        # Reports 4, 9, 14, … count from 0; 0, 100, 200, … are more likely steps.
        gap = self.smallest_gap or 1
        return int((self.first == 0 and gap <= FEW) or (gap > 1 and self.first == gap - 1))


DURATION, STEP_MS, STEP, EPOCH, SAMPLES = "duration", "step_ms", "step", "epoch", "samples"
ENDED = ("COMPLETE", "PRUNED")
AS_EPOCHS = f"use --steps {EPOCH} --samples-per-epoch N, with N training samples per epoch"
# Study attributes of `export --to optuna`.
OURS = frozenset({"objective", "target_metric", "target_value", "target_goal", "train_seconds_limit"})


def import_optuna(
    file: Annotated[str, Option("Database URL or path of a SQLite file.", metavar="FILE|URL")],
    study: Annotated[
        str | None, Option("Name of the Optuna study.", metavar="STUDY", shown_default="the only study")
    ] = None,
    *,
    name: Annotated[str | None, Option("Name of the study.", shown_default="the Optuna study's")] = None,
    metric: Annotated[
        str | None, Option("Metric that reports and values measure.", shown_default="the study's metric name")
    ] = None,
    target: Annotated[
        float | None, Option("Target value of the metric.", shown_default="the target of a study exported by bssearch")
    ] = None,
    goal: Annotated[
        Goal | None,
        Option("Direction in which the metric improves.", shown_default="the metric's goal if known, else maximize"),
    ] = None,
    param: Annotated[
        list[str] | None,
        Option(
            "Rename a parameter, as in lr=learning_rate, or '2**log2_batch=batch_size' for exponents; may be repeated.",
            metavar="THEIRS=OURS",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option("Batch size assumed for trials without a batch size.", min=1, shown_default="leave these trials out"),
    ] = None,
    seconds: Annotated[
        str | None,
        Option(
            "Source of train seconds: duration, step_ms (report steps are milliseconds), value (seconds to the target) "
            "or user_attr:NAME. --figures-at says whether duration and user_attr end at the target or with the trial.",
            metavar="PLACE",
            shown_default="unknown",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        Option(
            "Source of optimizer steps: step (report steps are optimizer steps), samples (training samples), epoch "
            "(epochs, with --samples-per-epoch) or user_attr:NAME (steps up to the moment of --figures-at).",
            metavar="PLACE",
            shown_default="unknown",
        ),
    ] = None,
    samples_per_epoch: Annotated[
        int | None, Option("Training samples per epoch, for --steps epoch.", min=1, shown_default="unknown")
    ] = None,
    figures_at: Annotated[
        FiguresAt | None,
        Option(
            "Whether duration and user_attr:NAME end at the target or with the trial.",
            shown_default="end, unless NAME contains 'target'",
        ),
    ] = None,
    objective: Annotated[
        RunsObjective | None,
        Option("Cost to minimize.", shown_default="time_to_target"),
    ] = None,
    default_batch: Annotated[int | None, Option("Current batch size, the baseline of comparisons.")] = None,
    device: Annotated[str | None, Option("Device of the trials.")] = None,
    precision: Annotated[str | None, Option("Precision of the trials.")] = None,
) -> Studies:
    """Make a study from an Optuna study's COMPLETE and PRUNED trials.

    A trial reached the target if a report or the trial's value meets the target. If --seconds is value, each
    COMPLETE trial reached the target. The import skips trials that violate a constraint. A study of `export --to
    optuna` needs neither --seconds nor --steps.
    """
    # imports SQLAlchemy, which `import --help` does not need
    from bssearch.exchange.importers.imported_studies import make_studies
    from bssearch.exchange.optuna_study import default_name, read_optuna_study

    found = _one_objective(read_optuna_study(file, study), metric)
    require(
        samples_per_epoch is None or steps == EPOCH,
        f"--samples-per-epoch = {samples_per_epoch} needs --steps {EPOCH}",
        hint=f"add --steps {EPOCH}, or omit --samples-per-epoch",
    )
    reader = _reader(found, metric, target, goal, param or [], seconds, steps)
    if steps == SAMPLES:
        reader, steps, samples_per_epoch = replace(reader, steps=EPOCH, reports=ReportSteps()), EPOCH, 1
    require(
        steps != EPOCH or samples_per_epoch is not None,
        f"--steps {EPOCH}: the samples of an epoch are unknown",
        hint="add --samples-per-epoch N",
    )
    reader = replace(reader, samples_per_epoch=samples_per_epoch, figures_at=figures_at, batch_size=batch_size)
    runs, notes = reader.runs(found.trials)
    runs = [replace(run, device=device or reader.device, precision=precision) for run in runs]
    wanted, more = _objective(found, objective)
    made = make_studies(
        runs,
        name=default_name(found.name) if name is None else name,
        target=reader.target,
        objective=wanted,
        default_batch=default_batch,
    )
    return replace(made, notes=(*notes, *more, *made.notes))


def _objective(found: OptunaStudy, given: RunsObjective | None) -> tuple[RunsObjective, list[str]]:
    before = found.user_attributes.get("objective") if found.user_attributes.keys() >= OURS else None
    if given is not None or before is None:
        return given or "time_to_target", []
    if before in get_args(RunsObjective):
        return before, []
    return "time_to_target", [
        f"objective {before} cannot be imported, so the objective is time_to_target; choose another objective with "
        "--objective NAME"
    ]


def _one_objective(found: OptunaStudy, metric: str | None) -> OptunaStudy:
    # Study of the objective ``metric``; other objectives' values become user attributes
    if len(found.directions) == 1:
        return found
    names = list(found.metric_names)
    if metric not in names:
        given = "" if metric is None else f", but no objective {metric!r}"
        raise UsageError(
            f"the Optuna study {found.name!r} has {len(found.directions)} objectives"
            + (f": {', '.join(names)}{given}" if names else ", without names"),
            hint="choose an objective with --metric NAME"
            if names
            else "name the objectives with Study.set_metric_names",
        )
    index, trials = names.index(metric), [copy(trial) for trial in found.trials]
    for trial in trials:
        values = trial.values or []
        trial.user_attrs = {**dict(zip(names, values, strict=False)), **trial.user_attrs}
        trial.values = [values[index]] if values else None
    return replace(found, directions=[found.directions[index]], metric_names=[metric], trials=trials)


def _reader(
    found: OptunaStudy,
    metric: str | None,
    target: float | None,
    goal: Goal | None,
    param: Sequence[str],
    seconds: str | None,
    steps: str | None,
) -> _Reader:
    _check_place("--seconds", seconds, (DURATION, STEP_MS, VALUE))
    _check_place("--steps", steps, (STEP, SAMPLES, EPOCH))
    check_epochs(_attribute(steps) or "", "steps", AS_EPOCHS)
    require(
        seconds != STEP_MS or steps not in (STEP, SAMPLES, EPOCH),
        f"--seconds step_ms and --steps {steps} cannot be combined, because report steps have one unit; omit one "
        "option",
    )
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
    require(
        is_metric(wanted.value),
        f"the target of the Optuna study {found.name!r} is unknown"
        if target is None
        else f"--target = {target} must be a finite number",
        hint="add --target VALUE" if target is None else None,
    )
    for option, place in (("--seconds", seconds), ("--steps", steps)) if is_ours else ():
        if place == VALUE and list(found.metric_names) != [OWN_TIME]:
            named = ", ".join(found.metric_names) or "not named"
            raise UsageError(
                f"{option} {VALUE}: the values of {found.name!r}, which bssearch exported, are {named}; omit {option}"
            )
        require(
            place not in (VALUE, USER_ATTRIBUTE + OWN_TIME, USER_ATTRIBUTE + OWN_STEPS) or wanted == own,
            f"{option} {place}: bssearch exported {found.name!r} with seconds and steps to {own.in_words}, but the "
            f"target is {wanted.in_words}",
            hint=f"omit {option}, or omit --metric, --target and --goal",
        )
    takes_own = is_ours and wanted == own and seconds is None and steps is None
    return _Reader(
        place=found.place,
        target=wanted,
        names=mappings("--param", param, {name for one in found.trials for name in one.params}, "parameter"),
        seconds=seconds,
        steps=STEP if is_ours and steps is None and seconds != STEP_MS else steps,
        seconds_name=_attribute(seconds),
        steps_name=_attribute(steps),
        is_ours=is_ours,
        takes_own=takes_own,
        own_values_are_seconds=list(found.metric_names) == [OWN_TIME],
        device=str(attributes["device"]) if is_ours and attributes.get("device") else None,
        reports=ReportSteps.of(found.trials),
        resumed=frozenset(one.number for one in found.trials if one.system_attrs.get("retry_history")),
    )


def _target_of(found: OptunaStudy, *, is_metric: bool) -> Target:
    names = found.metric_names if is_metric else ()
    goal = Goal.MINIMIZE if is_metric and found.directions[0].name == Goal.MINIMIZE.name else Goal.MAXIMIZE
    return Target(metric=names[0] if names else "metric", value=math.nan, goal=goal)


def _check_place(option: str, given: str | None, places: Sequence[str]) -> None:
    if given is None or given in places or given.removeprefix(USER_ATTRIBUTE) not in ("", given):
        return
    raise UsageError(f"{option} = {given!r} must be {', '.join(places)} or {USER_ATTRIBUTE}NAME")


def _attribute(place: str | None) -> str | None:
    return place.removeprefix(USER_ATTRIBUTE) if place and place.startswith(USER_ATTRIBUTE) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    place: str
    target: Target
    names: Mapping[str, tuple[str, Formula]]
    seconds: str | None
    steps: str | None
    seconds_name: str | None  # of the attribute with the seconds
    steps_name: str | None  # of the attribute with the steps
    is_ours: bool  # bssearch exported the study: values are its objective's, never the metric
    takes_own: bool  # figures come from the export's attributes or values
    own_values_are_seconds: bool
    device: str | None
    reports: ReportSteps
    samples_per_epoch: int | None = None
    figures_at: FiguresAt | None = None
    batch_size: int | None = None  # of trials without a batch size
    resumed: frozenset[int] = frozenset()  # retried trials, which may have resumed a failed trial

    def runs(self, trials: Sequence[FrozenTrial]) -> tuple[list[ImportedRun], list[str]]:
        ended = [trial for trial in trials if trial.state.name in ENDED]
        # As for Optuna's `Study.best_trial`
        violating = {one.number for one in ended if not all(value <= 0.0 for value in one.constraints.values())}
        ended = [trial for trial in ended if trial.number not in violating]
        require(
            ended,
            f"no runs: {self.place} has {plural(len(trials), 'trial')}, but no COMPLETE or PRUNED trial that meets all "
            "constraints",
            hint="run more trials, then import the study again",
        )
        ended, runs, notes = self._readable(ended)
        if violating:
            count = plural(len(violating), "trial")
            notes.append(f"skipped {count} with a violated constraint (first: trial {min(violating)})")
        check_scale([run.final_metric for run in runs], self.target, self.target.goal, self.place)
        self._check_reports({run.configuration.batch_size for run in runs})
        self._check_attributes(ended)
        notes += self._notes(trials, ended, runs)
        require(
            not all(run.train_seconds is None and run.steps is None for run in runs),
            "; ".join(["no trial has known seconds or steps", *notes]),
            hint=f"add --seconds {DURATION}, {STEP_MS}, {VALUE} or {USER_ATTRIBUTE}NAME, or add "
            f"--steps {STEP}, {EPOCH} or {USER_ATTRIBUTE}NAME",
        )
        return runs, [*self._taken(trials), *notes]

    def _readable(self, ended: Sequence[FrozenTrial]) -> tuple[list[FrozenTrial], list[ImportedRun], list[str]]:
        odd: list[UsageError] = []
        given: list[tuple[FrozenTrial, dict[str, ParameterValue], GivenBatch]] = []
        for trial in ended:
            try:
                values = self._parameters(trial, self._origin(trial))
                given.append((trial, values, self._given_batch(trial, values)))
            except UsageError as error:
                odd.append(error)
        batches, assumed = step_batches([batch for *_, batch in given], "use --param {theirs}={ours}")
        self._check_powers({one["batch_size"] for one in batches})
        read: list[FrozenTrial] = []
        runs: list[ImportedRun] = []
        for (trial, values, _), whole in zip(given, batches, strict=True):
            try:
                runs.append(self._run(trial, values, whole))
                read.append(trial)
            except UsageError as error:
                odd.append(error)
        if not runs:
            raise odd[0]
        if odd:
            assumed.append(f"skipped {len(odd)} of {len(ended)} trials (first: {with_hint(odd[0])})")
        return read, runs, assumed

    def _check_powers(self, sizes: set[int]) -> None:
        theirs = next((name for name, (ours, _) in self.names.items() if ours == "batch_size"), "batch_size")
        formula = self.names.get(theirs, (theirs, Formula(theirs)))[1]
        if formula.of is None and len(sizes) > 2 and max(sizes) <= MOST_POWER and max(sizes) - min(sizes) < len(sizes):
            raise UsageError(
                f"batch sizes {', '.join(map(str, sorted(sizes)))} of {self.place} may be exponents",
                hint=f"for exponents, use --param '2**{theirs}=batch_size'; for batch sizes, use "
                f"--param '1*{theirs}=batch_size'",
            )

    def _taken(self, trials: Sequence[FrozenTrial]) -> Iterator[str]:
        if self.is_ours:
            return
        for name in dict.fromkeys(name for trial in trials for name in trial.params):
            ours, formula = self.names.get(name, (name, None))
            yield f"parameter {name!r}: {ours}" + (" (transformed)" if formula is not None and formula.of else "")
        for name in dict.fromkeys(name for trial in trials for name in trial.user_attrs):
            factor = seconds_of_unit(name)
            taken = [
                *(["seconds" if factor == 1.0 else f"seconds × {factor:g}"] if name == self.seconds_name else []),
                *(["steps"] if name == self.steps_name else []),
                *(["used for the batch size"] if is_about_batch(name) else []),
            ]
            yield f"user attribute {name!r}: {', '.join(taken) or 'ignored'}"
        unit = {STEP: "optimizer steps", EPOCH: f"epochs of {self.samples_per_epoch} samples"}.get(self.steps or "")
        unit = "milliseconds" if self.seconds == STEP_MS else unit or "steps of an unknown unit"
        yield f"reports: {self.target.metric} by {unit}"
        yield f"value: {'train seconds' if self.seconds == VALUE else self.target.metric}"
        use = "train seconds, unless a trial may have trained past the target"
        yield f"duration: {use if self.seconds == DURATION else 'ignored'}"

    def _notes(
        self, trials: Sequence[FrozenTrial], ended: Sequence[FrozenTrial], runs: Sequence[ImportedRun]
    ) -> Iterator[str]:
        for state, count in Counter(trial.state.name for trial in trials).items():
            if state not in ENDED:
                yield f"skipped {plural(count, f'{state} trial')}"
        beyond = [
            trial.number
            for trial, run in zip(ended, runs, strict=True)
            if run.reached
            and trial.number not in self.resumed
            and (
                ((self.seconds == DURATION or self.seconds_name) and run.train_seconds is None)
                or (self.steps_name and run.steps is None)
            )
        ]
        if beyond:
            yield (
                f"time or steps to the target are unknown for {len(beyond)} of {len(runs)} trials (first: "
                f"trial {beyond[0]}): the trials "
                + (
                    "lack a duration or the attribute"
                    if self.figures_at is FiguresAt.TARGET
                    else "may have trained past the target, or lack a duration, reports or the attribute; if time or "
                    f"steps end at the target, add --figures-at {FiguresAt.TARGET}"
                )
            )
        at_once = most_at_once(ended) if self.seconds == DURATION or self.seconds_name else 1
        if at_once > 1:
            yield (
                f"up to {at_once} trials ran at once; if the trials shared a device, the seconds include waits for "
                "other trials"
            )
        if resumed := [trial.number for trial in ended if self._is_of_part(trial)]:
            remedy = ""
            if self.seconds_name:
                moment = FiguresAt.TARGET if self._is_at_target(self.seconds_name) else FiguresAt.END
                remedy = f"; if the attribute covers the whole training, add --figures-at {moment}"
            yield (
                f"seconds are unknown for {len(resumed)} of {len(runs)} trials (first: trial {resumed[0]}): these "
                f"trials retried failed trials, and may have resumed from checkpoints{remedy}"
            )
        shared = [trial.number for trial in ended if self._share(trial) not in (None, 1.0)]
        for option, name in self._attributes():
            if shared and not self._is_at_target(name):
                yield (
                    f"{len(shared)} of {len(runs)} trials trained past the target (first: trial {shared[0]}), so "
                    f"{option} {USER_ATTRIBUTE}{name} counts up to the first report that met the target; if the "
                    f"attribute ends at the target, add --figures-at {FiguresAt.TARGET}"
                )
        by_epoch = self.steps == EPOCH or (self.steps != STEP and shared and self._attributes())
        if not self.is_ours and by_epoch and self.reports.epochs_before_first:
            yield (
                f"report steps are {self._first_steps()}: assuming that steps count epochs from 0, so that step "
                f"{self.reports.first} ends epoch {self.reports.first + 1}"
            )
        if self.steps == STEP and not self.is_ours and self.reports.may_be_epochs:
            yield f"report steps are {self._first_steps()}; if these steps are epochs, {AS_EPOCHS}"

    def _first_steps(self) -> str:
        first, gap = self.reports.first, self.reports.smallest_gap or 1
        return f"{first}, {first + gap}, {first + 2 * gap}, …"

    def _check_reports(self, sizes: set[int]) -> None:
        by = f"--steps {STEP}" if self.steps == STEP else f"--seconds {STEP_MS}" if self.seconds == STEP_MS else None
        if by and not self.is_ours and len(sizes) > 1 and self.reports.are_epochs:
            raise UsageError(
                f"{by}: the report steps of {self.place} are {self._first_steps()} at batch sizes "
                f"{', '.join(map(str, sorted(sizes)))}, and are probably epochs",
                hint=AS_EPOCHS,
            )

    def _check_attributes(self, ended: Sequence[FrozenTrial]) -> None:
        # Raise `UsageError` if an attribute may be for the target while trials continued
        if self.figures_at is not None or self.is_ours:
            return
        for option, name in self._attributes():
            if self._is_at_target(name):
                continue
            shown = [self._is_of_whole(trial, name, option) for trial in ended]
            told = [one for one in shown if one is not None]
            require(
                not told or any(told),
                f"{option} {USER_ATTRIBUTE}{name}: trials of {self.place} trained past the target; {name} may be "
                f"measured at the target or at the end",
                hint=f"add --figures-at {FiguresAt.END} or --figures-at {FiguresAt.TARGET}",
            )

    def _is_of_whole(self, trial: FrozenTrial, name: str, option: str) -> bool | None:
        share, value, hit = self._share(trial), number(trial.user_attrs.get(name)), self._hit(trial)
        if share is None or share == 1.0 or value is None or hit is None:
            return None
        if option == "--seconds":
            return are_seconds_of_whole(trial, value * seconds_of_unit(name), share)
        return None if value > max(trial.intermediate_values) else not hit.last_miss_step < value <= hit.first_hit_step

    def _attributes(self) -> list[tuple[str, str]]:
        names = (("--seconds", self.seconds_name), ("--steps", self.steps_name))
        return [(option, name) for option, name in names if name is not None]

    def _is_at_target(self, name: str) -> bool:
        return self.figures_at is FiguresAt.TARGET or (self.figures_at is None and "target" in name.lower())

    def _hit(self, trial: FrozenTrial) -> Crossing | None:
        return first_crossing(self._points(trial), self.target)

    def _share(self, trial: FrozenTrial) -> float | None:
        hit = self._hit(trial)
        if ended_at_target(hit, trial):
            return 1.0
        if hit is None or not hit_before_end(hit, trial, is_value_a_metric=self._values_are_metric(trial)):
            return None
        return self._done(hit.first_hit_step) / self._end(trial) or None

    def _end(self, trial: FrozenTrial) -> float:
        last = self._done(max(trial.intermediate_values))
        if self.steps_name is None or self._is_at_target(self.steps_name):
            return last
        steps = number(trial.user_attrs.get(self.steps_name))
        return steps if steps is not None and last < steps < 2 * last else last

    def _done(self, step: int) -> int:
        return step if self.steps == STEP or self.is_ours else step + self.reports.epochs_before_first

    def _is_of_part(self, trial: FrozenTrial) -> bool:
        is_told = self.seconds_name is not None and self.figures_at is not None
        return (
            trial.number in self.resumed and (self.seconds == DURATION or self.seconds_name is not None) and not is_told
        )

    def _origin(self, trial: FrozenTrial) -> str:
        return f"{self.place}: trial {trial.number}"

    def _given_batch(self, trial: FrozenTrial, values: Mapping[str, ParameterValue]) -> GivenBatch:
        theirs = {self._ours(name): name for name in trial.params}
        parts = {name: value for name, value in trial.user_attrs.items() if is_about_batch(name)}
        given = GivenBatch.of({**parts, **values}, self._origin(trial), lambda name: theirs.get(name, name))
        if not given.is_known and self.batch_size is not None:
            given = GivenBatch.of({**parts, **values, "batch_size": self.batch_size}, self._origin(trial))
        require(
            given.is_known,
            f"no parameter batch_size ({given.origin}); the trial has {', '.join(trial.params) or 'no parameters'}",
            hint=f"use --param THEIRS=batch_size or --batch-size N, or give {', '.join(SPLIT)}",
        )
        return given

    def _run(self, trial: FrozenTrial, values: Mapping[str, ParameterValue], batch: Mapping[str, int]) -> ImportedRun:
        origin, batch_size = self._origin(trial), batch["batch_size"]
        others = {name: value for name, value in values.items() if part_of_batch(name) is None}
        points = self._points(trial)
        hit = first_crossing(points, self.target)
        reached = self._has_reached(trial, hit)
        metric = points[-1].metric if points else None
        if reached and hit is not None:
            metric = next((point.metric for point in points if point.step == hit.first_hit_step), metric)
        if metric is None and trial.value is not None and self._values_are_metric(trial):
            metric = trial.value if is_metric(trial.value) else None
        seed = trial.user_attrs.get("seed") if self.takes_own else None
        steps = self._steps(trial, reached, points, hit, batch_size, origin)
        seconds = self._seconds(trial, reached, points, hit, origin)
        return ImportedRun(
            origin=origin,
            configuration=make_configuration(batch, others, origin),
            seed=None if seed is None else integer(str(seed), "seed", origin, low=0, high=LARGEST_SEED),
            reached=reached,
            missed=self._missed(trial),
            steps=steps,
            last_miss_step=self._last_miss_step(hit, batch_size) if reached and hit is not None else None,
            train_seconds=seconds,
            final_metric=metric,
            curve=self._curve(points, hit if reached else None, batch_size, steps, seconds),
        )

    def _curve(
        self,
        points: Sequence[Observation],
        hit: Crossing | None,
        batch_size: int,
        steps: int | None,
        seconds: float | None,
    ) -> tuple[Observation, ...]:
        # Reports by optimizer steps, if their unit is known; seconds are in proportion to steps
        if self.steps not in (STEP, EPOCH) or not points:
            return ()
        at = [
            one.step if self.steps == STEP else self._steps_of_epochs(self._done(one.step), batch_size, self.place)
            for one in points
        ]
        end = next(
            (step for step, one in zip(at, points, strict=True) if hit and one.step == hit.first_hit_step), at[-1]
        )
        pace = (seconds or 0.0) / ((steps if self.takes_own else end) or 1)
        found = {
            step: replace(one, step=step, samples=step * batch_size, train_seconds=pace * step)
            for step, one in zip(at, points, strict=True)
            if 0 <= step <= LARGEST
        }
        return tuple(found.values())

    def _parameters(self, trial: FrozenTrial, origin: str) -> dict[str, ParameterValue]:
        values: dict[str, ParameterValue] = {}
        if self.takes_own:
            split = ("batch_size", "micro_batch_size", "accumulation_steps")
            values |= {name: trial.user_attrs[name] for name in split if name in trial.user_attrs}
        ours = Counter(map(self._ours, trial.params))
        if twice := [name for name, count in ours.items() if count > 1]:
            raise UsageError(f"two parameters are named {twice[0]} ({origin})", hint="rename a parameter with --param")
        for name, value in trial.params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name} = {value} must be a finite number ({origin})")
            formula = self.names.get(name, (name, None))[1]
            if formula is not None and formula.of is not None:
                value = parameter_value(formula(str(value)), name, origin)
            known = value is None or isinstance(value, bool | int | float | str)
            values[self._ours(name)] = value if known else str(value)
        return values

    def _ours(self, name: str) -> str:
        return self.names[name][0] if name in self.names else name

    def _points(self, trial: FrozenTrial) -> list[Observation]:
        unit = 1000 if self.seconds == STEP_MS else math.inf
        odd = next((step for step in trial.intermediate_values if not isinstance(step, int)), None)
        # SQLite stores any type
        require(odd is None, f"{self._origin(trial)}: the step {odd!r} of a report must be a whole number")
        return [
            Observation(step=step, samples=0, train_seconds=step / unit, metric=value, loss=None, learning_rate=0.0)
            for step, value in sorted(trial.intermediate_values.items())
            if is_metric(value)
        ]

    def _values_are_metric(self, trial: FrozenTrial) -> bool:
        return trial.state.name == "COMPLETE" and self.seconds != VALUE and not self.is_ours

    def _has_reached(self, trial: FrozenTrial, hit: Crossing | None) -> bool:
        if self.takes_own and "state" in trial.user_attrs:
            return bool(trial.user_attrs["state"] == TrialState.REACHED)
        if self.seconds == VALUE:
            return trial.state.name == "COMPLETE"
        by_value = self._values_are_metric(trial) and trial.value is not None and self.target.is_met_by(trial.value)
        return hit is not None or by_value

    def _missed(self, trial: FrozenTrial) -> TrialState:
        own = trial.user_attrs.get("state") if self.takes_own else None
        if own in (TrialState.CAPPED, TrialState.EXHAUSTED, TrialState.DIVERGED):
            return TrialState(own)
        return TrialState.PRUNED if trial.state.name == "PRUNED" else TrialState.EXHAUSTED

    def _steps(
        self,
        trial: FrozenTrial,
        reached: bool,
        points: Sequence[Observation],
        hit: Crossing | None,
        batch_size: int,
        origin: str,
    ) -> int | None:
        if self.takes_own:
            name = OWN_STEPS if reached else "steps"
            return self._own_count(trial, name, reached, origin)
        if self.steps_name is not None:
            steps = self._own_count(trial, self.steps_name, reached, origin)
            share = self._share_of(self.steps_name, trial) if reached else 1.0
            return None if steps is None or share is None else max(round(steps * share), int(reached))
        if self.steps == EPOCH:
            step = (None if hit is None else hit.first_hit_step) if reached else points[-1].step if points else None
            return None if step is None else self._steps_of_epochs(self._done(step), batch_size, origin)
        if self.steps != STEP:
            return None
        if reached:
            return None if hit is None else max(1, hit.steps)
        return points[-1].step if points else None

    def _last_miss_step(self, hit: Crossing, batch_size: int) -> int | None:
        if self.steps == EPOCH and hit.last_miss_step < hit.first_hit_step:
            return self._steps_of_epochs(self._done(hit.last_miss_step), batch_size, self.place)
        return hit.last_miss_step if self.steps == STEP else None

    def _steps_of_epochs(self, epochs: int, batch_size: int, origin: str) -> int:
        samples = epochs * (self.samples_per_epoch or 1)
        steps = max(1, round(samples / batch_size))
        require(
            steps <= LARGEST,
            f"{samples:,} samples at batch size {batch_size} must be at most {LARGEST} steps ({origin})",
        )
        return steps

    @staticmethod
    def _own_count(trial: FrozenTrial, name: str, reached: bool, origin: str) -> int | None:
        value = trial.user_attrs.get(name)
        return None if value is None else integer(str(value), name, origin, low=1 if reached else 0)

    def _share_of(self, name: str, trial: FrozenTrial) -> float | None:
        return 1.0 if self._is_at_target(name) else self._share(trial)

    def _seconds(
        self, trial: FrozenTrial, reached: bool, points: Sequence[Observation], hit: Crossing | None, origin: str
    ) -> float | None:
        if self.takes_own:
            return self._own_seconds(trial, reached, origin)
        if self._is_of_part(trial):
            return None
        if self.seconds_name is not None:
            name = self.seconds_name
            seconds = _seconds_of(trial.user_attrs.get(name), name, reached, origin)
            share = self._share_of(name, trial) if reached else 1.0
            return None if seconds is None or share is None else seconds * share
        if self.seconds == VALUE:
            return _seconds_of(trial.value, "value", reached, origin) if reached else None
        if self.seconds == STEP_MS:
            if reached:
                return (hit.train_seconds or None) if hit is not None else None
            return points[-1].train_seconds if points else None
        if self.seconds is None:
            return None
        took = None if trial.duration is None else trial.duration.total_seconds()
        is_to_target = self.figures_at is FiguresAt.TARGET or ended_at_target(hit, trial)
        return None if not took or took < 0 or (reached and not is_to_target) else took

    def _own_seconds(self, trial: FrozenTrial, reached: bool, origin: str) -> float | None:
        attributes = trial.user_attrs
        if not reached:
            return _seconds_of(attributes.get(OWN_SECONDS), OWN_SECONDS, reached, origin)
        if attributes.get("contended") and self.own_values_are_seconds:
            return _seconds_of(trial.value, "value", reached, origin)
        return _seconds_of(attributes.get(OWN_TIME), OWN_TIME, reached, origin)
