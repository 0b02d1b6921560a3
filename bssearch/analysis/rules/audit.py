"""Rules of thumb held against a study: the configuration that each gives, what it costs there, and whether it held."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from bssearch.analysis.answer import Answer, BatchScheduleAnswer
from bssearch.analysis.batches import default_configuration
from bssearch.analysis.growing import growing_batch, judge_growing
from bssearch.analysis.objectives.base import objective_of
from bssearch.analysis.optimum import Candidate, decide
from bssearch.analysis.rules.regret import NONE, Finding, Judgement, Regret, judge
from bssearch.analysis.rules.rule_book import RULES, Rule
from bssearch.analysis.rules.rule_evidence import (
    about_accumulation,
    about_generalisation,
    about_memory,
    about_noise_scale,
    command,
)
from bssearch.analysis.shape import Model, Parameters, parameters_of
from bssearch.intervals import student_t
from bssearch.records import Configuration, Phase, StepTime, TrialRecord, TrialState
from bssearch.space import UNKNOWN, MemoryBoundary
from bssearch.spec import StudySpec
from bssearch.step_times import StepSeconds, step_seconds_of

LAYERWISE = frozenset({"lars", "lamb"})
"""LARS (You et al. 2017, arXiv 1708.03888) and LAMB (You et al. 2020, arXiv 1904.00962)."""

LARGE = 8192
"""The batch size from which on the belief has them needed: that of LARS's first evidence, and what practice quotes."""


def other_kind(trials: Sequence[TrialRecord], tuned: Candidate) -> Configuration | str:
    """Return the best that the search found at the tuned optimum's batch size with the other kind of optimizer.

    Where no trial with one reached the target there, a sentence says so.
    """
    size, is_layerwise = tuned.configuration.batch_size, tuned.configuration.optimizer in LAYERWISE
    found = [
        (figure, trial.number, trial.configuration)
        for trial in trials
        if trial.phase is Phase.SEARCH
        and trial.state is TrialState.REACHED
        and trial.configuration.batch_size == size
        and (trial.configuration.optimizer in LAYERWISE) != is_layerwise
        if (figure := tuned.objective.figure(trial)) is not None
    ]
    if not found:
        wanted = "another optimizer than lars and lamb" if is_layerwise else "lars or lamb"
        return (
            f"no search trial there with {wanted} reached the target; bssearch enqueue STUDY batch_size={size} "
            "optimizer=… learning_rate=… tries one to the full limit, whatever the search thinks of it"
        )
    return min(found, key=lambda one: one[:2])[2]


def judge_layerwise(
    other: Candidate, tuned: Candidate, step_seconds: StepSeconds, *, wanted: int, limit: float
) -> Judgement:
    """Judge the belief by runs with such an optimizer and runs without, one kind of them the ``tuned`` optimum's.

    The regret is the time without over the time with. Held: it is above `bssearch.analysis.rules.regret.BROKE` for
    sure, broke: below ``HELD``. Below a batch of `LARGE` samples nothing is decided, for the belief is not about those.
    """
    size, is_layerwise = tuned.configuration.batch_size, tuned.configuration.optimizer in LAYERWISE
    plain, layerwise = (other, tuned) if is_layerwise else (tuned, other)
    names = f"{plain.configuration.optimizer} against {layerwise.configuration.optimizer}"
    if not layerwise.estimate.reached:
        runs = len(layerwise.runs)
        finding = Judgement("broke" if runs >= wanted else "undecided", f"{names}: 0 of {runs} runs with it reached")
    else:
        found = judge(plain, layerwise, step_seconds, wanted=wanted, limit=limit).reversed()
        finding = Judgement(found.finding, f"{names}: {found.reason}", found.regret)
    if size >= LARGE:
        return finding
    reason = f"batch {size} is below {LARGE:,}, from where on they are said to be needed; {finding.reason}"
    return Judgement("undecided", reason, finding.regret)


FEWEST_SIZES = 3
"""Batch sizes that the slope of the learning rate takes: two are always met."""

ROUNDING = 1e-9
"""Slopes this close to an end of the interval lie within it: above the rounding of double precision. A choice."""

SLOPES = (0.0, 0.5, 1.0)
"""Slopes of log learning rate over log batch size that the rules claim: no rule, sqrt, linear."""

FULL_LIMIT_PHASES = frozenset({Phase.AUDIT, Phase.TO_BUDGET})
"""The phases, beside the confirmation, of which every trial runs under the full limit: a trial's whole budget."""


class RuleFinding(Model):
    """The verdict on a rule at a batch size, with its reason; ``trial_numbers`` are the runs of its configuration.

    ``configuration`` has been run, or is to be. ``regret`` is the objective's figure there over the tuned optimum's; a
    rule about another ratio has that ratio.
    """

    rule: Rule
    batch_size: int | None
    configuration: Parameters | None
    regret: Regret | None
    verdict: Finding
    reason: str
    trial_numbers: list[int]


class LearningRateSlope(Model):
    """The slope of log learning rate over log batch size with its 95 % interval, and which of 0, ½, 1 it excludes."""

    estimate: float
    low: float
    high: float
    excludes: list[float]


class Audit(Model):
    """The rules of thumb, each held against the study; ``spent_train_seconds`` went into runs made for that."""

    study: str
    rules: list[RuleFinding]
    learning_rate_slope: LearningRateSlope | None
    spent_train_seconds: float


@dataclass(frozen=True)
class Case:
    """A rule at a batch size: what to run beside the ``tuned`` optimum there, or the ``reason`` why nothing is."""

    rule: Rule
    batch_size: int
    configuration: Configuration | None = None
    tuned: Candidate | None = None
    reason: str = ""

    @property
    def is_tuned(self) -> bool:
        """Return whether the rule gives the tuned configuration."""
        return (
            self.configuration is not None and self.tuned is not None and self.configuration == self.tuned.configuration
        )


def audit(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    answer: Answer,
    step_times: Collection[StepTime] = (),
    memory: MemoryBoundary = UNKNOWN,
    *,
    runs: int | None = None,
    train_samples: int | None = None,
    train_seconds: float | None = None,
) -> Audit:
    """Hold every rule against a study's records; nothing is run, and what the records do not settle is not guessed.

    ``step_times`` may hold a batch size several times, in other micro-batches. ``runs`` is how many runs a rule should
    have had (default: the spec's confirmation runs), ``train_seconds`` the budget they had; ``train_samples``, where
    known, says whether the whole training part fits into memory.
    """
    wanted = spec.confirm.runs if runs is None else runs
    optima = tuned_optima(spec, trials, step_times, memory)
    found = _cases(spec, trials, answer, optima)
    step_seconds = step_seconds_of(step_times, spec.timed_model)
    spent = spent_train_seconds(trials)
    is_spent = train_seconds is not None and spent >= train_seconds
    unmade = _why_unmade(spec, train_seconds if is_spent else None)
    measured = [
        (Rule.MEMORY, about_memory(spec, answer, optima, step_seconds, memory, train_samples)),
        (Rule.NOISE_SCALE, about_noise_scale(spec, answer)),
        (Rule.GENERALISATION, about_generalisation(spec, answer)),
        *((Rule.ACCUMULATION, one) for one in about_accumulation(spec, step_times)),
    ]
    rules = [_of_case(spec, trials, case, step_seconds, wanted, unmade) for case in found]
    rules += [_finding(rule, one.batch_size, None, one.judgement, one.trial_numbers) for rule, one in measured]
    return Audit(
        study=answer.study,
        rules=rules,
        learning_rate_slope=learning_rate_slope(spec, answer),
        spent_train_seconds=spent,
    )


def cases(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    answer: Answer,
    step_times: Collection[StepTime] = (),
    memory: MemoryBoundary = UNKNOWN,
) -> list[Case]:
    """Return every rule that gives a configuration, at the optimum's batch size and at the largest.

    The largest is that of the batch sizes with confirmation runs that run without accumulation. At the default's own
    batch size no rule changes anything. The belief in LARS and LAMB is not about the default: it has the largest alone.
    """
    return _cases(spec, trials, answer, tuned_optima(spec, trials, step_times, memory))


def _cases(
    spec: StudySpec, trials: Sequence[TrialRecord], answer: Answer, optima: Mapping[int, Candidate]
) -> list[Case]:
    base = default_configuration(spec, trials)
    largest = max(
        (size for size, one in optima.items() if one.is_confirmed and one.configuration.accumulation_steps == 1),
        default=answer.largest_that_fits.batch_size,
    )
    sizes = sorted({answer.optimal.batch_size, largest} - {base.batch_size})
    top, best = max(answer.optimal.batch_size, largest), answer.optimal.batch_size
    layerwise = _case(spec, base, Rule.LAYERWISE, top, optima.get(top), trials)
    growing = _case(spec, base, Rule.GROWING, best, optima.get(best), trials, answer.batch_schedule)
    if not sizes:
        reason = "it changes nothing: the optimum and the largest with confirmation runs are the default's batch size"
        return [*(Case(rule, base.batch_size, reason=reason) for rule in RULES), layerwise, growing]
    found = [_case(spec, base, rule, size, optima.get(size), trials) for rule in RULES for size in sizes]
    return [*found, layerwise, growing]


def tuned_optima(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    step_times: Collection[StepTime] = (),
    memory: MemoryBoundary = UNKNOWN,
) -> Mapping[int, Candidate]:
    """Return the best candidate of each batch size, as the answer has it; see `decide`."""
    fitting = [
        one
        for one in trials
        if not one.configuration.grows
        and (one.phase is not Phase.CONFIRM or memory.may_fit(one.configuration.micro_batch_size))
    ]
    verdict = decide(fitting, spec.confirm.runs, objective_of(spec), step_seconds_of(step_times, spec.timed_model))
    return {} if verdict is None else verdict.by_batch


def runs_of(spec: StudySpec, trials: Sequence[TrialRecord], configuration: Configuration) -> tuple[TrialRecord, ...]:
    """Return the runs of a configuration to the full limit that say something, each seed once, confirmation first."""
    found: dict[int, TrialRecord] = {}
    for phases in ({Phase.CONFIRM}, FULL_LIMIT_PHASES):
        for trial in trials:
            if trial.phase in phases and trial.configuration == configuration and is_result(spec, trial):
                found.setdefault(trial.seed, trial)
    return tuple(found.values())


def is_result(spec: StudySpec, trial: TrialRecord) -> bool:
    """Return whether a run ended by itself, and if short of the target then at no less than the full limit."""
    if not trial.state.is_finished or trial.state.is_missing or trial.state is TrialState.OOM:
        return False
    free = trial.state in {TrialState.REACHED, TrialState.DIVERGED}
    return free or trial.train_seconds_limit >= spec.budget.trial_train_seconds


def spent_train_seconds(trials: Sequence[TrialRecord]) -> float:
    """Return the train seconds of all runs that were made for an audit, however they ended.

    Those that train on past the target are made for something else.
    """
    return math.fsum(
        trial.outcome.train_seconds for trial in trials if trial.phase is Phase.AUDIT and trial.outcome is not None
    )


def learning_rate_slope(spec: StudySpec, answer: Answer) -> LearningRateSlope | None:
    """Return how the tuned learning rate follows the batch size; None below three tuned batch sizes.

    By least squares of the logarithms, every batch size with the same weight, and Student's t. Left out are batch sizes
    flagged untuned and those that another optimizer than the recommended one is best at; a learning rate that the
    space fixes has no slope.
    """
    if isinstance(spec.space.learning_rate, int | float):
        return None
    optimizer = answer.optimal.parameters.get("optimizer")
    points = [
        (math.log(row.batch_size), math.log(float(rate)))
        for row in answer.batches
        if row.best is not None and not row.untuned and row.best.parameters.get("optimizer") == optimizer
        if (rate := row.best.parameters.get("learning_rate")) is not None
    ]
    if len(points) < FEWEST_SIZES:
        return None
    low, estimate, high = _slope(points)
    return LearningRateSlope(
        estimate=estimate,
        low=low,
        high=high,
        excludes=[one for one in SLOPES if not low - ROUNDING <= one <= high + ROUNDING],
    )


def _slope(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return (low, estimate, high) of the slope of y over x."""
    count = len(points)
    middle_x, middle_y = (math.fsum(values) / count for values in zip(*points, strict=True))
    spread = math.fsum((x - middle_x) ** 2 for x, _ in points)
    slope = math.fsum((x - middle_x) * (y - middle_y) for x, y in points) / spread
    residual = math.fsum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in points)
    half = student_t(count - 2) * math.sqrt(residual / (count - 2) / spread)
    return slope - half, slope, slope + half


def _case(
    spec: StudySpec,
    base: Configuration,
    rule: Rule,
    batch_size: int,
    tuned: Candidate | None,
    trials: Sequence[TrialRecord],
    found: BatchScheduleAnswer | None = None,
) -> Case:
    if tuned is None:
        return Case(rule, batch_size, reason="no trial there says anything")
    if not tuned.is_confirmed:
        return Case(rule, batch_size, reason=f"no complete confirmation there{command(spec, f'confirm {spec.name}')}")
    if not math.isfinite(tuned.value):
        reached = f"{tuned.estimate.reached} of {tuned.estimate.runs}"
        return Case(rule, batch_size, reason=f"nothing to compare with: {reached} tuned runs there reached the target")
    given: Configuration | str
    if rule is Rule.LAYERWISE:
        given = other_kind(trials, tuned)
    elif rule is Rule.GROWING:
        given = growing_batch(spec, trials, tuned, found)
    elif not spec.default_is_known:
        given = "nobody said what the default is (import … --default-batch)"
    else:
        given = RULES[rule](spec.space, base, tuned.configuration)
    if isinstance(given, str):
        return Case(rule, batch_size, reason=given)
    return Case(rule, batch_size, given, tuned)


def _of_case(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    case: Case,
    step_seconds: StepSeconds,
    wanted: int,
    unmade: str,
) -> RuleFinding:
    if case.configuration is None or case.tuned is None:
        return _finding(case.rule, case.batch_size, None, Judgement("not_run", case.reason), ())
    if case.is_tuned:
        said = "the tuned optimum has none" if case.rule is Rule.WARMUP else "it gives the tuned configuration itself"
        judgement, runs = Judgement("held", said, NONE), case.tuned.runs
    else:
        runs = runs_of(spec, trials, case.configuration)
        judgement = _of_runs(spec, trials, case, runs, step_seconds, wanted, unmade)
    if case.rule is Rule.WARMUP:
        judgement = judgement.reversed()
    return _finding(case.rule, case.batch_size, case.configuration, judgement, [run.number for run in runs])


def _of_runs(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    case: Case,
    runs: tuple[TrialRecord, ...],
    step_seconds: StepSeconds,
    wanted: int,
    unmade: str,
) -> Judgement:
    """Return the judgement of a rule's runs, with the configuration that they are compared with."""
    assert case.configuration is not None and case.tuned is not None, "there is something to run"
    if not runs:
        return Judgement("not_run", _why_in_vain(trials, case.configuration) or unmade)
    objective = case.tuned.objective
    tuned = Candidate(case.tuned.configuration, runs_of(spec, trials, case.tuned.configuration), objective)
    rule = Candidate(case.configuration, runs, objective)
    compare = {Rule.LAYERWISE: judge_layerwise, Rule.GROWING: judge_growing}.get(case.rule, judge)
    judgement = compare(rule, tuned, step_seconds, wanted=wanted, limit=spec.budget.trial_train_seconds)
    why = f"{judgement.reason}; {_difference(case.configuration, tuned.configuration)}"
    if len(runs) < wanted and judgement.finding == "undecided":
        why += f"; {_why_in_vain(trials, case.configuration) or unmade}"
    return replace(judgement, reason=why)


def _difference(rule: Configuration, tuned: Configuration) -> str:
    """Return the parameters in which the rule differs from the tuned configuration."""
    mine, theirs = parameters_of(rule), parameters_of(tuned)
    return ", ".join(
        f"{name.replace('_', ' ')} {_shown(mine[name])} for {_shown(theirs[name])}"
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    )


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _why_in_vain(trials: Sequence[TrialRecord], configuration: Configuration) -> str:
    """Return how runs of a configuration failed, nothing where none did."""
    vain = [
        trial
        for trial in trials
        if trial.phase in FULL_LIMIT_PHASES
        and trial.configuration.trains_like(configuration)
        and trial.outcome is not None
        if trial.state in {TrialState.FAILED, TrialState.OOM}
    ]
    return f"trial {vain[-1].number} {vain[-1].state}: {vain[-1].outcome.reason}" if vain and vain[-1].outcome else ""


def _why_unmade(spec: StudySpec, spent_budget: float | None) -> str:
    if spec.is_imported:
        return "the study is imported: there is nothing that could be run"
    if spent_budget is not None:
        return f"the budget of {spent_budget:g} train seconds is spent (--train-seconds)"
    return f"bssearch audit {spec.name} runs it"


def _finding(
    rule: Rule,
    batch_size: int | None,
    configuration: Configuration | None,
    judgement: Judgement,
    trial_numbers: Collection[int],
) -> RuleFinding:
    whole: Parameters | None = None
    if configuration is not None:
        sizes = ("batch_size", "micro_batch_size", "accumulation_steps")
        whole = {**{name: getattr(configuration, name) for name in sizes}, **parameters_of(configuration)}
    return RuleFinding(
        rule=rule,
        batch_size=batch_size,
        configuration=whole,
        regret=judgement.regret,
        verdict=judgement.finding,
        reason=judgement.reason,
        trial_numbers=list(trial_numbers),
    )
