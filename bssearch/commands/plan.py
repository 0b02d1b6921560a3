"""Plans that may read a database: ``plan lr``, ``plan scale``, ``plan beyond`` and ``plan larger``."""

import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from bssearch.analysis.law.batch_model import fit_step_time
from bssearch.analysis.law.beyond import beyond_samples, beyond_target
from bssearch.analysis.law.branches import BranchedSize, local_critical_batch
from bssearch.analysis.law.quick import QuickCriticalBatch
from bssearch.analysis.law.scales import LocalBatch, Scale, plan_larger_run
from bssearch.analysis.shape import BeyondPlan, CriticalBatch, LargerPlan, Notice
from bssearch.commands.best import measured_curves
from bssearch.commands.run import audit_stored
from bssearch.errors import TargetNotReachedError, require, required
from bssearch.exchange.importers.step_times import read_step_times
from bssearch.planning.learning_rate import AuditedRule, LearningRatePlan, LearningRateRequest, plan_rules
from bssearch.planning.requests import Database, Finite, Name, Parameters, Positive, Request, planned, read
from bssearch.planning.scale import ScalePlan, ScaleRequest, plan_devices
from bssearch.records import grouped
from bssearch.records.text import number
from bssearch.registry import Option
from bssearch.search.finding import answer, stored_quick
from bssearch.settings import database_url
from bssearch.spec import StudySpec, changed_fields, spec_of
from bssearch.storage.connection.engine import parse_url, sqlite_file
from bssearch.storage.repository import Store, open_store


class BeyondRequest(Request):
    """The options of `plan_beyond`."""

    study: Annotated[Name, Option("A stored study with objective time_to_target.")]
    target: Annotated[Finite | None, Option("A target that is harder than the study's target.")] = None
    samples: Annotated[
        Positive | None, Option("Samples to train on at the best batch size, instead of a target.", unit="samples")
    ] = None
    db: Database = None

    @model_validator(mode="after")
    def _asks_one(self) -> Self:
        require(
            (self.target is None) != (self.samples is None),
            f"target = {self.target} and samples = {self.samples}; give exactly one of these options",
        )
        return self


@planned(BeyondRequest)
def plan_beyond(asked: BeyondRequest) -> BeyondPlan:
    """Predict the critical and best batch size at a harder target, or with more samples, from a study's curves.

    Raises `UsageError` if the curves allow no prediction.

    Example: ``bssearch.plan_beyond(study="digits", target=0.98)``
    """
    with open_store(asked.db, write=False) as store:
        found, curves = measured_curves(store, asked.study)
    measured = found.target
    if asked.target is not None:
        predicted = beyond_target(curves, measured, asked.target)
    else:
        assert asked.samples is not None, "the user gives a target or samples"
        predicted = beyond_samples(curves, measured, asked.samples)
    best, size = predicted.optimal_batch_size, predicted.test_batch_size
    run = predicted.of(size).steps
    told = {
        "predicted": f"bssearch predicted this answer, because the study's trials stopped at {measured.in_words}",
        "test": f"to test the prediction, run batch {size} to {measured.metric} {number(predicted.metric.value)}, and "
        f"expect {number(run.low or 0)} to {number(run.high or 0)} steps",
    }
    if best == predicted.batches[-1].batch_size:
        told["largest"] = f"batch {best} is the largest size with a prediction, so the optimum may be larger"
    return BeyondPlan(
        **dict(predicted),
        study=asked.study,
        measured=measured,
        measured_batch_size=found.optimal.batch_size,
        notes=[Notice(code=code, message=message) for code, message in told.items()],
    )


class LargerRequest(Request):
    """The options of `plan_larger`."""

    studies: Annotated[
        Annotated[list[Name], Field(min_length=1)],
        Option("Studies of several scales: NAME of a spec with scales, STUDY, or STUDY:PARAMETERS:SAMPLES."),
    ]
    parameters: Annotated[Parameters, Option("Planned number of model parameters, such as 7B.", metavar="N")]
    samples: Annotated[Positive, Option("Number of samples to train on.", unit="samples")]
    step_times: Annotated[
        Annotated[Path, Field(strict=False)] | None,
        Option("A CSV with batch_size and step_seconds of the planned model."),
    ] = None
    db: Database = None


@planned(LargerRequest)
def plan_larger(asked: LargerRequest) -> LargerPlan:
    """Plan, from studies of several scales, a run that is too large to search.

    The plan has the run's batch size, learning rate, weight decay and steps, and the time if step times are known.

    Raises `UsageError` if the studies allow no prediction.

    Example: ``bssearch.plan_larger(studies=["char_lm_scaling"], parameters=10**6, samples=1e6)``
    """
    with open_store(asked.db, write=False) as store:
        found = {name: one for given in asked.studies for name, one in scales_of(store, given)}
        branches = [one for given in asked.studies for one in _branches(store, given)]
        specs = [spec_of(store.studies.get(name)) for name in found]
        for spec in specs[1:]:
            _check_alike(specs[0], spec)
        last = max(found, key=lambda name: found[name].samples)
        timed = found[last].parameters == asked.parameters and asked.step_times is None
        times = store.probes.by_batch_size(last) if timed else {}
    if asked.step_times is not None:
        times = read_step_times(asked.step_times)
    line = fit_step_time(list(times.values()))
    return plan_larger_run(list(found.values()), asked.parameters, asked.samples, line, branches)


def _named(store: Store, given: str) -> list[str]:
    # The study, or the studies of a spec's scales
    name = given.partition(":")[0]
    names = {one.name for one in store.studies.summaries()}
    of_scales = [one for one in names if re.fullmatch(rf"{re.escape(name)}\.\d+", one)]
    return [name] if name in names or not of_scales else of_scales


def _branches(store: Store, given: str) -> Iterator[LocalBatch]:
    for study in _named(store, given):
        goal = store.studies.get(study).target.goal
        found = grouped(((one.start_samples, one.start_metric), one) for one in store.probes.branches(study))
        for (samples, start), measured in found.items():
            ends = grouped((one.batch_size, one.metric) for one in measured)
            sizes = [BranchedSize(batch_size=size, ends=tuple(ends[size])) for size in sorted(ends)]
            local = None if start is None else local_critical_batch(start, sizes, goal)
            if samples and local is not None and local.low is not None and local.high is not None:
                yield LocalBatch(samples, math.sqrt(local.low * local.high))


def scales_of(store: Store, given: str) -> Iterator[tuple[str, Scale]]:
    """Yield each study with its scale; skip studies that ran only ``probe branch``.

    Raises `UsageError` if a scale is unknown.
    """
    stated = given.split(":")[1:]
    for study in _named(store, given):
        if not store.trials.of(study) and store.probes.branches(study):
            continue  # the study of a large run has only branches
        spec = spec_of(store.studies.get(study))
        numbers = stated or [str(one) for scale in spec.scales for one in (scale.parameters, scale.samples)]
        require(
            len(numbers) == 2,
            f"study {given!r} does not give its parameters and samples",
            hint=f"write {study}:PARAMETERS:SAMPLES, as in {study}:110M:2e9",
        )
        at = read(ScaleNumbers, {"parameters": numbers[0], "samples": numbers[1]}, are_texts=True)
        found, curves = measured_curves(store, study)
        logs = {one.batch_size: one.typical(found.target.gain(found.target.value)) for one in curves}
        steps = {size: math.exp(log) / size for size, log in logs.items() if math.isfinite(log)}
        yield study, Scale(at.parameters, at.samples, found, steps)


class ScaleNumbers(Request):
    """A study's numbers of model parameters and training samples."""

    parameters: Annotated[Parameters, Option("The study's number of model parameters.")]
    samples: Annotated[Positive, Option("The study's number of training samples.")]


# Parts of a question that may follow the scale
OF_SCALE = (
    *("workload_settings", "arguments", "command", "default", "target.value"),
    *("space.batch_size", "space.learning_rate", "space.max_micro_batch_size"),
)


def _check_alike(first: StudySpec, other: StudySpec) -> None:
    more = [name for name in changed_fields(first.question, other.question) if not name.startswith(OF_SCALE)]
    require(
        not more,
        f"studies {first.name!r} and {other.name!r} differ in more than model and data: {', '.join(more)}",
        hint="search all scales from one spec with `scales`",
    )


JUDGED = ("held", "broke", "undecided")


@planned(LearningRateRequest)
def plan_learning_rate(asked: LearningRateRequest) -> LearningRatePlan:
    """Compute each rule's learning rate at ``batch``, with the verdicts of stored audits.

    Example: ``bssearch.plan_learning_rate(from_batch=256, learning_rate=0.1, batch=4096)``
    """
    return plan_rules(asked, list(audited_rules(asked.db)))


def audited_rules(db: str | None = None) -> Iterator[AuditedRule]:
    """Yield the rules that stored audits judged; yield no rule if the default database is missing."""
    usual = database_url()
    file = sqlite_file(parse_url(usual))
    if db in (None, usual) and file is not None and not file.exists():
        return
    with open_store(db, write=False) as store:
        for study in store.studies.summaries():
            try:
                found = audit_stored(store, study.name)
            except TargetNotReachedError:
                continue
            for one in found.rules:
                if one.verdict in JUDGED:
                    yield AuditedRule(
                        study=study.name,
                        rule=one.rule.name,
                        batch_size=one.batch_size,
                        verdict=one.verdict,
                        regret=None if one.regret is None else one.regret.value,
                        reason=one.reason,
                    )


@planned(ScaleRequest)
def plan_scale(asked: ScaleRequest) -> ScalePlan:
    """Estimate the time, cost and efficiency of 1 to ``devices`` devices, and the largest number worth the cost.

    Stated values override ``study``, and ``step_times`` overrides the study's step times. Raises `UsageError` for
    missing or contradictory values.

    Example: ``bssearch.plan_scale(devices=8, batch=512, study="digits", parameters="110M", bandwidth_gb_s=50)``
    """
    found = {} if asked.study is None else _measured(asked.study, asked)
    if asked.step_times is not None:
        line = required(
            fit_step_time(list(read_step_times(asked.step_times).values())),
            f"step_times = {asked.step_times}: no line fits; give three batch sizes with growing step times",
        )
        found |= {"alpha_s": line.alpha_seconds, "beta_s": line.beta_seconds}
    for own in (("alpha_s", "beta_s"), ("b_crit", "b_crit_low", "b_crit_high"), ("samples_to_target", "at_batch")):
        if any(getattr(asked, name) is not None for name in own):
            found = {name: value for name, value in found.items() if name not in own}
    whole = read(ScaleRequest, {**asked.model_dump(), **found, "study": None, "step_times": None})
    unknown = "is unknown" if asked.study is None else f"is unknown in study {asked.study!r}"
    study = "a study" if asked.study is None else "another study"
    require(whole.beta_s, f"the step time {unknown}; give alpha_s and beta_s, step_times, or {study} with step times")
    require(whole.b_crit, f"the critical batch size {unknown}; give b_crit, or {study} with a fitted law")
    return plan_devices(whole)


def _measured(study: str, asked: ScaleRequest) -> dict[str, Any]:
    with open_store(asked.db, write=False) as store:
        quick = stored_quick(store, study)
        line = fit_step_time(list(store.probes.by_batch_size(study).values()))
        step_times = store.probes.step_times(study)
        try:
            best = answer(store, study)
        except TargetNotReachedError:
            best = None
    law = None if best is None else best.fit
    b_crit: CriticalBatch | QuickCriticalBatch | None = None if quick is None else quick.b_crit
    # A law of too few batch sizes uses only the quick answer's runs.
    if law is not None and (b_crit is None or law.verdict != "too_few_points"):
        b_crit = law.b_crit
    found: dict[str, Any] = {}
    if b_crit is not None:
        found = {"b_crit": b_crit.estimate, "b_crit_low": b_crit.low, "b_crit_high": b_crit.high}
    if line is not None:
        found |= {"alpha_s": line.alpha_seconds, "beta_s": line.beta_seconds}
        longer = [
            (one.world_size, one.step_seconds - line.alpha_seconds - line.beta_seconds * one.micro_batch_size)
            for one in step_times
            if one.world_size > 1 and one.is_whole and one.step_seconds is not None
        ]
        bandwidths = [asked.bandwidth_of(*one) for one in longer if one[1] > 0]
        if bandwidths and asked.bandwidth_gb_s is None:
            found |= {"bandwidth_gb_s": statistics.median(bandwidths), "parameters": asked.parameters or 1}
    if best is not None and best.optimal.samples_to_target is not None:
        found |= {"samples_to_target": best.optimal.samples_to_target, "at_batch": best.optimal.batch_size}
    return found
