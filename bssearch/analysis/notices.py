"""What a reader of an answer must know besides it: each with a code for programs and a sentence for people."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from bssearch.analysis.answer import Batch
from bssearch.analysis.batches import about_models, default_configuration, is_at_end
from bssearch.analysis.confirmation_runs import (
    ENOUGH_RUNS,
    begun_late,
    fewest_runs,
    plain_misses,
    plainly_missed,
    says_something,
    too_few_runs,
)
from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.law.affine_step_time import fit_step_time
from bssearch.analysis.law.batch_model import LawFit, RunnableStep, predict_optimum
from bssearch.analysis.law.fitted import Predicted
from bssearch.analysis.measured import about_devices
from bssearch.analysis.optimum import Candidate, Verdict
from bssearch.analysis.shape import Interval, Notice
from bssearch.analysis.time_to_target import Estimate
from bssearch.records import WITH_CUDA_GRAPHS, Phase, ProbeRecord, SecondsBasis, Target, TrialRecord, TrialState
from bssearch.spec import StudySpec

NOISE = 0.10
"""Coefficient of variation over seeds above which an answer warns of them: a choice."""


@dataclass(frozen=True)
class _Study:
    """A study and its verdict: what notices are told from."""

    spec: StudySpec
    trials: Sequence[TrialRecord]
    verdict: Verdict

    @property
    def optimal(self) -> Candidate:
        """Return the optimum with its runs."""
        return self.verdict.optimal

    @property
    def best(self) -> int:
        """Return the optimum's batch size."""
        return self.optimal.configuration.batch_size


def notices(
    spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict, probes: Collection[ProbeRecord]
) -> list[Notice]:
    """Return what limits the answer, the gravest first."""
    study = _Study(spec, trials, verdict)
    found = [*(one for tell in NOTICES for one in tell(study)), *_about_measurements(verdict, probes)]
    found += about_devices(trials)
    return [Notice(code=code, message=message) for code, message in found]


def _about_measurements(verdict: Verdict, probes: Collection[ProbeRecord]) -> Iterator[tuple[str, str]]:
    """Yield what the runs of the optimum all warn of, and step times that were not measured alone."""
    warned = [set(run.outcome.warnings) for run in verdict.optimal.runs if run.outcome is not None]
    for sentence in sorted(set.intersection(*warned)) if warned else ():
        yield "measurement", sentence
    contended = [str(probe.batch_size) for probe in probes if probe.contended and probe.undelayed_step_seconds is None]
    if contended:
        yield (
            "step_times_contended",
            f"the step times of batch {', '.join(contended)} were not measured alone; bssearch probe step-time "
            "measures them again",
        )


def _unfinished(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield trials that run, or wait to."""
    trials = study.trials
    if any(trial.state is TrialState.RUNNING for trial in trials):
        yield "running", "trials are still running; the answer may change"
    queued = sum(trial.state is TrialState.QUEUED for trial in trials)
    if queued:
        yield "queued", f"{queued} enqueued trials have not been run; bssearch run tries them"


def _about_confirmation(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield an optimum that is not confirmed by all its fresh seeds."""
    spec, trials, verdict = study.spec, study.trials, study.verdict
    confirming = [trial for trial in trials if trial.phase is Phase.CONFIRM]
    if not verdict.confirmed:
        yield (
            "unconfirmed",
            "from single runs: the best of many is partly luck; repeats with other seeds would show how much"
            if spec.is_imported
            else "from single search trials: the best of many is partly luck until it is confirmed",
        )
    objective = study.optimal.objective
    made = fewest_runs(trials, spec.confirm.runs, objective)
    late = begun_late(trials, spec.confirm.runs, objective) if verdict.confirmed else {}
    if late:
        sizes = ", ".join(map(str, sorted({*late.values()})))
        yield (
            "confirmation_incomplete",
            f"its neighbours are not confirmed yet (batch {sizes}: {made} of {spec.confirm.runs} runs); bssearch run "
            "completes it",
        )
    elif confirming and made < spec.confirm.runs:
        how_far = f"{made} of {spec.confirm.runs} runs of each configuration"
        yield "confirmation_incomplete", f"its confirmation is not complete ({how_far}); bssearch run completes it"
    elif confirming and not verdict.confirmed:
        yield "confirmation_missed", "no finalist reached the target in half of its confirmation runs or more"
    for one in plain_misses(trials, objective):
        yield "confirmation_stopped", f"{plainly_missed(one)}: it has had no more confirmation runs"


def _about_the_seconds(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield whose seconds the times are, where bssearch did not measure them."""
    bases = {trial.outcome.seconds_basis for trial in study.trials if trial.outcome is not None and trial.outcome.steps}
    if SecondsBasis.WALL in bases:
        yield (
            "wall_seconds",
            "times are by the wall clock from the program's first report on, its evaluations included; they do not "
            "compare with measured ones",
        )
    if SecondsBasis.REPORTED in bases:
        yield "reported_seconds", "times are the seconds of training that the program reports of itself"
    if len(bases) > 1:
        yield (
            "seconds_mixed",
            "some trials report seconds of their own and some do not: they do not compare, and both are in the answer",
        )


def _about_the_range(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield an optimum at the edge of its study."""
    spec, verdict, optimal, best = (
        study.spec,
        study.verdict,
        study.optimal,
        study.best,
    )
    if len(verdict.by_batch) == 1:
        yield "only_one_batch_size", f"no batch size but {best} has run: there is nothing to compare it with"
    if len(spec.batch_sizes) > 1 and best in (min(spec.batch_sizes), max(spec.batch_sizes)):
        end = "smallest" if best == min(spec.batch_sizes) else "largest"
        yield "optimum_at_edge", f"batch {best} is the {end} of the study; the optimum may lie beyond"
    if is_at_end(spec, study.trials, optimal.configuration):
        yield (
            "learning_rate_at_edge",
            "the best learning rate is the least or the greatest that was tried; try others beyond it"
            if spec.is_imported
            else "the best learning rate lies at the edge of its range or beyond; widen it",
        )


def _about_runs(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield an optimum with few runs, runs that missed, or seeds that differ."""
    spec, verdict, optimal = study.spec, study.verdict, study.optimal
    known = optimal.estimate
    if 0 < known.runs < ENOUGH_RUNS and verdict.confirmed:
        yield "few_runs", too_few_runs(known.runs, wanted=None if spec.is_imported else spec.confirm.runs)
    if known.runs == known.reached >= ENOUGH_RUNS and known.low is None:
        yield (
            "equal_runs",
            f"the {known.runs} runs of the optimum are equal to the last digit, as where they are evaluated seldom: no "
            "interval",
        )
    if verdict.ignores_seeds:
        yield (
            "seeds_ignored",
            "runs of one configuration with different seeds are equal in steps and metric: what trains ignores the "
            "trial's seed, or sets one of its own, so how far seeds differ is not known",
        )
    missed = optimal.estimate.runs - optimal.estimate.reached
    if missed:
        yield "missed_runs", f"{missed} of {optimal.estimate.runs} runs of the optimum missed the target"
    variation = optimal.estimate.variation
    if variation is not None and variation > NOISE:
        yield (
            "seed_noise",
            f"the seeds of the optimum differ by {variation:.0%} (coefficient of variation); "
            f"differences below that are not settled by {optimal.estimate.runs} runs",
        )


def _about_the_choice(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield a recommendation that is not the least median."""
    verdict, optimal, best = study.verdict, study.optimal, study.best
    least = verdict.least.configuration.batch_size
    if verdict.rule == "law":
        yield (
            "chosen_by_law",
            f"steps and step times of all batch sizes together speak for batch {best}; batch {least} has the least "
            f"median, but {optimal.estimate.runs} runs cannot tell 5 % here",
        )
    elif verdict.rule == "smallest_shown_within_5_percent":
        yield (
            "smallest_within_5_percent",
            f"batch {least} has the least median; {best} is the smallest batch size shown to be within 5 % of it",
        )


def _about_rivals(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield batch sizes that may be as good or better."""
    verdict, optimal, best = study.verdict, study.optimal, study.best
    if verdict.confirmed:
        others = [(size, one) for size, one in verdict.by_batch.items() if one is not optimal]
        overlapping = [str(size) for size, one in others if _overlap(one.estimate, optimal.estimate)]
        if overlapping:
            yield "not_separated", f"the intervals of batch {', '.join(overlapping)} overlap that of {best}"
        single = [str(size) for size, one in others if not one.is_confirmed and one.value < optimal.value]
        if single:
            yield (
                "unconfirmed_rival",
                f"batch {', '.join(single)} was faster than {best} in a single "
                + (
                    "run, which is partly luck; repeat it with other seeds"
                    if study.spec.is_imported
                    else "search trial, which is partly luck; a larger confirm.top confirms it too"
                ),
            )


def _default_missed(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield a default that never reached the target."""
    spec, trials = study.spec, study.trials
    baseline = default_configuration(spec, trials)
    runs = [trial for trial in trials if trial.configuration.trains_like(baseline) and says_something(trial)]
    if runs and not any(trial.state is TrialState.REACHED for trial in runs):
        yield "default_missed", f"the default configuration never reached the target within its limit{_of(runs, spec)}"


def _of(runs: Sequence[TrialRecord], spec: StudySpec) -> str:
    """Return how many runs missed the target, and how near the best of them came."""
    bests = [run.outcome.best_metric for run in runs if run.outcome is not None and run.outcome.best_metric is not None]
    nearest = min(bests, key=spec.record_target.shortfall, default=None)
    came = "" if nearest is None else f", the best came to {spec.target.metric} {nearest:.4g}"
    return f" ({len(runs)} run{'s' if len(runs) > 1 else ''}{came})"


def _about_contention(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield runs during which something else used the device."""
    trials, verdict, optimal = study.trials, study.verdict, study.optimal
    confirming = [trial for trial in trials if trial.phase is Phase.CONFIRM and says_something(trial)]
    compared = confirming if verdict.confirmed else optimal.runs
    shared = sum(trial.outcome is not None and trial.outcome.contended for trial in compared)
    if shared:
        kind = "confirmation runs" if verdict.confirmed else "runs of the optimum"
        yield (
            "contended",
            f"in {shared} of {len(compared)} {kind} something else used the device: "
            + (
                f"all of them are compared by {optimal.objective.common.in_words}"
                if optimal.objective.common is not None
                else "such a run counts with steps × step time measured in isolation, where its model was timed"
                if study.spec.has_several_models
                else "such a run counts with steps × step time measured in isolation"
            ),
        )


def _about_evaluation(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield a target met at the first evaluation, and samples that are left out."""
    optimal, best = study.optimal, study.best
    hits = [run.outcome for run in optimal.runs if run.outcome and run.state is TrialState.REACHED]
    if hits and all(outcome.last_miss_step == 0 for outcome in hits):
        yield (
            "coarse_evaluation",
            f"batch {best} met the target at its first evaluation: the time is interpolated from step 0; "
            "a smaller budget.trial_train_seconds under a new name evaluates more often, or ask for a harder target",
        )
    dropped = max((run.outcome.dropped_samples_per_epoch or 0 for run in optimal.runs if run.outcome), default=0)
    if dropped:
        yield "incomplete_batch_dropped", f"batch {best} leaves {dropped} samples of each epoch out (incomplete batch)"


def _failed(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield trials that failed."""
    spec, trials = study.spec, study.trials
    failed = sum(trial.state is TrialState.FAILED for trial in trials)
    if failed:
        yield "failed_trials", f"{failed} trials failed; bssearch trials {spec.name} shows them"


def _default_outside_space(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield a default that the search could not have chosen."""
    spec, trials = study.spec, study.trials
    if (
        not spec.is_imported
        and spec.space.encode(default_configuration(spec, trials)) is None
        and any(trial.phase is Phase.SEARCH for trial in trials)
    ):
        yield "default_outside_space", "the default configuration lies outside the search space"


def _about_models(study: _Study) -> Iterator[tuple[str, str]]:
    """Yield what a search over models means for step times and the law."""
    yield from about_models(study.spec, study.verdict)


NOTICES: tuple[Callable[[_Study], Iterator[tuple[str, str]]], ...] = (
    _unfinished,
    _about_confirmation,
    _about_the_seconds,
    _about_the_range,
    _about_runs,
    _about_the_choice,
    _about_rivals,
    _default_missed,
    _about_models,
    _about_contention,
    _about_evaluation,
    _failed,
    _default_outside_space,
)
"""What may limit an answer, the gravest first; each yields codes with sentences."""


def retargeted(target: Target) -> Notice:
    """Return the caveat of an answer for an easier target than the one that the trials ran for."""
    return Notice(
        code="retargeted",
        message=f"from the curves of trials that ran for {target.metric} {target.value:g}: the search and the choice "
        "of finalists followed that target, so a batch size that is best at this one may have been passed over",
    )


def about_versions(versions: Sequence[str]) -> list[Notice]:
    """Return a caveat where trials of a study ran with several versions of torch, the earliest trial's first."""
    if len(versions) < 2:
        return []
    return [
        Notice(
            code="torch_changed",
            message=f"its trials ran with torch {' and '.join(versions)}: steps may take another time with each",
        )
    ]


def about_generalisation(found: Generalisation | None, target: Target) -> list[Notice]:
    """Return a caveat for each batch size that comes to a notably worse metric in the same train seconds.

    And one where these seconds were not the same to all: something else used the device during some runs.
    """
    if found is None:
        return []
    shared, runs = (sum(counts) for counts in zip(*((row.contended, row.runs) for row in found.batches), strict=True))
    unlike = Notice(
        code="generalisation_contended",
        message=f"in {shared} of {runs} runs of {found.train_seconds:g} s something else used the device: they came "
        "less far in the same seconds",
    )
    return [unlike] * bool(shared) + [
        Notice(code="generalisation_gap", message=_gap_sentence(found, row, row.gap, target))
        for row in found.batches
        if row.gap is not None and row.gap.value > found.notable_gap
    ]


def _gap_sentence(found: Generalisation, row: FinalMetrics, gap: Interval, target: Target) -> str:
    """Return by how much a batch size is worse, whether that may be chance, and what to do."""
    size, best = row.batch_size, found.best_batch_size
    text = (
        f"trained for the same {found.train_seconds:g} s, batch {size} comes to {target.metric} "
        f"{row.final_metric:.4g}, {gap.value:.3g} worse than batch {best} ({_certainty(gap)})"
    )
    near = [
        one.batch_size
        for one in found.batches
        if one.batch_size == best or (one.gap is not None and one.gap.value <= found.notable_gap)
    ]
    if size < best:
        return f"{text}: train it for longer, or take batch {min(one for one in near if one > size)} or more"
    advice = f"stay at or below batch {max(one for one in near if one < size)}"
    harder = found.more_regularised
    if harder is None or harder.batch_size != size or found.closed is None:
        return f"{text}: retune dropout, weight decay and label smoothing at that batch size, or {advice}"
    changed = {name: value for name, value in harder.parameters.items() if value != row.parameters[name]}
    how = f"more regularisation ({', '.join(f'{name} {value:.3g}' for name, value in changed.items())})"
    reached = f"{target.metric} {harder.final_metric:.4g}"
    if found.closed:
        return f"{text}: {how} closes it ({reached}); train with that at this batch size, or {advice}"
    return f"{text}: {how} does not close it ({reached}); {advice}, or retune the regularisation further"


def _certainty(gap: Interval) -> str:
    if gap.low is None or gap.high is None:
        return "no interval below three runs a side"
    interval = f"95 % interval [{gap.low:.3g}, {gap.high:.3g}]"
    return f"{interval} excludes 0" if gap.low > 0 else f"{interval} includes 0: it may be chance"


def _overlap(one: Estimate, other: Estimate) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high


HOST_BOUND = 0.10
"""The host-bound share above which a step counts as host-bound: a choice."""

FEWEST_SIZES = 2
"""Batch sizes that are not host-bound which the line of the device's step times takes."""


def about_the_host(
    batches: Sequence[Batch],
    optimal: Candidate,
    probes: Collection[ProbeRecord],
    law: LawFit | None,
    compile_mode: str,
) -> list[Notice]:
    """Return the caveat of an optimum that is host-bound: what the host takes, and the optimum without that.

    ``probes`` are the step times by which ``law`` gives seconds, ``compile_mode`` is the one that the study ran in.
    """
    size = optimal.configuration.batch_size
    share = next((row.host_bound_share for row in batches if row.batch_size == size), None)
    if share is None or share <= HOST_BOUND:
        return []
    return [Notice(code="host_bound", message="; ".join(_told(size, share, optimal, probes, law, compile_mode)))]


def _told(
    size: int,
    share: float,
    optimal: Candidate,
    probes: Collection[ProbeRecord],
    law: LawFit | None,
    compile_mode: str,
) -> Iterator[str]:
    yield (
        f"the host may not keep the device busy at the optimum: at batch {size} its host-bound share is {share:.0%} "
        f"(above {HOST_BOUND:.0%}), so that up to as much of a step is the program's time and not the device's"
    )
    if optimal.objective.trials_race:
        wanting = _wanting(probes, law)
        found = None if wanting or law is None else device_optimum(probes, law)
        if found is not None:
            yield f"with steps of the device's own time, {_in_words(found, size)}, by the law of steps"
        else:
            yield f"where it would be with steps of the device's own time cannot be told: {wanting or NO_LINE}"
    if compile_mode not in WITH_CUDA_GRAPHS:
        yield "training: {compile: reduce-overhead} runs the model as CUDA graphs, under a new name"


NO_LINE = "a larger batch is no slower among those that are not host-bound"


def _wanting(probes: Collection[ProbeRecord], law: LawFit | None) -> str | None:
    """Return what a prediction takes that there is not; None where it can be tried."""
    sizes = [one.batch_size for one in device_bound(probes)]
    if len(sizes) < FEWEST_SIZES:
        known = f"only batch {sizes[0]} has" if sizes else "none has"
        return f"that takes step times of two batch sizes with a share of at most {HOST_BOUND:.0%}, and {known}"
    if law is None or law.verdict != "fits":
        return "the law of steps does not fit, or has too few batch sizes"
    return None


def _in_words(found: Predicted, size: int) -> str:
    interval = "" if found.interval is None else f" [{found.interval[0]}, {found.interval[1]}]"
    if found.batch_size == size:
        return f"it would still be batch {size}{interval}"
    return f"it would be about batch {found.batch_size}{interval}"


def device_bound(probes: Collection[ProbeRecord]) -> list[ProbeRecord]:
    """Return the step times without accumulation that are known not to be host-bound, ascending."""
    return [
        one
        for one in sorted(probes, key=lambda one: one.batch_size)
        if one.step_seconds is not None
        and one.batch_size == one.micro_batch_size
        and one.host_bound_share is not None
        and one.host_bound_share <= HOST_BOUND
    ]


def device_optimum(probes: Collection[ProbeRecord], law: LawFit) -> Predicted | None:
    """Return the optimum among the batch sizes timed if each step took the device's own time alone, by the law.

    That time is α + β·B through the sizes that are not host-bound, of which it takes two. At the others it is no more
    than was measured, and no less than the seconds in which the host waited: (1 − share)·t. Steps that accumulate keep
    the time that was measured. None where there is no such line, or all sizes are above the largest that was run.
    """
    line = fit_step_time(device_bound(probes), FEWEST_SIZES)
    if line is None:
        return None
    steps = []
    for one in probes:
        seconds, share = one.step_seconds, one.host_bound_share
        if seconds is None:
            continue
        if share is not None and share > HOST_BOUND and one.batch_size == one.micro_batch_size:
            own = line.alpha_seconds + line.beta_seconds * one.batch_size
            seconds = min(max(own, (1 - share) * seconds), seconds)
        steps.append(RunnableStep(one.batch_size, one.micro_batch_size, seconds))
    return predict_optimum(law, steps)
