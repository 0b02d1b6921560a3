"""The caveats of an answer."""

import shlex
from collections.abc import Collection, Iterator, Sequence

from bssearch.analysis.answer import Batch
from bssearch.analysis.batches import about_fixed_constants, about_models, default_configuration, is_at_end
from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.law.batch_model import LawFit, RunnableStep, fit_step_time, predict_optimum
from bssearch.analysis.measured import about_devices
from bssearch.analysis.optimum import (
    Candidate,
    Estimate,
    Verdict,
    begun_late,
    fewest_runs,
    plain_misses,
    plainly_missed,
    says_something,
)
from bssearch.analysis.shape import Interval, Notice, Predicted
from bssearch.records import (
    FEWEST_RUNS,
    WITH_CUDA_GRAPHS,
    Phase,
    ProbeRecord,
    SecondsBasis,
    Target,
    TrialRecord,
    TrialState,
    grouped,
)
from bssearch.records.text import percent, plural
from bssearch.spec import StudySpec

NOISE = 0.10  # a notice warns if the coefficient of variation over seeds is higher

FULL = 0.9  # a notice warns if steps have a lower mean share of the batch; 10 % hardly change the answer


Caveat = tuple[str, object, str]


def notices(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    verdict: Verdict,
    probes: Collection[ProbeRecord],
    worse: Collection[int],
) -> list[Notice]:
    tried = [(one.configuration.batch_size, one.configuration.parameters) for one in trials if says_something(one)]
    caveats: list[Caveat] = [
        _about_the_unit(spec, verdict.optimal),
        *_about_confirmation(spec, trials, verdict),
        *_about_the_clock(spec, trials),
        *_about_the_edges(spec, trials, verdict),
        *_about_the_seeds(spec, verdict),
        *_about_rivals(spec, verdict, worse),
        _about_the_default(spec, trials),
        *((code, True, sentence) for code, sentence in about_models(spec, verdict)),
        *((code, True, sentence) for code, sentence in about_fixed_constants(tried)),
        *_about_the_runs(trials, verdict),
        *_about_the_study(spec, trials, verdict.optimal),
        *_about_measurements(spec, verdict, probes),
        *((code, True, sentence) for code, sentence in about_devices(trials)),
    ]
    return [Notice(code=code, message=message) for code, holds, message in caveats if holds]


def _about_the_unit(spec: StudySpec, optimal: Candidate) -> Caveat:
    tokens, samples = (sum(getattr(one, name) or 0 for one in optimal.outcomes) for name in ("tokens", "samples"))
    padding = (
        f"; padding is {percent(1 - tokens / samples)} at batch {optimal.configuration.batch_size}" if tokens else ""
    )
    counted = "batch sizes, samples and B_crit count tokens, padding included"
    return "batch_unit", spec.training.counts_tokens, f"training.batch_unit = tokens: {counted}{padding}"


def _about_confirmation(spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict) -> list[Caveat]:
    queued, running = (
        sum(trial.state is state for trial in trials) for state in (TrialState.QUEUED, TrialState.RUNNING)
    )
    confirming = any(trial.phase is Phase.CONFIRM for trial in trials)
    wanted, objective = spec.confirm.runs, verdict.optimal.objective
    made = fewest_runs(trials, wanted, objective)
    late = begun_late(trials, wanted, objective) if verdict.confirmed else {}
    lacks_runs = confirming and made < wanted
    confirm = f"bssearch study confirm {shlex.quote(spec.name)}"
    return [
        (
            "running",
            running,
            f"running trials: {running}; the answer may change, so run the command again after these trials end",
        ),
        (
            "queued",
            queued,
            f"queued trials: {queued}; run these trials with `bssearch run {shlex.quote(spec.name)}`",
        ),
        (
            "unconfirmed",
            not verdict.confirmed,
            "the answer is from single runs, so the best result is partly luck; repeat the best runs with other seeds"
            if spec.is_imported
            else "the answer is from single search trials, so the best result is partly luck; repeat the best "
            f"configurations with `{confirm}`",
        ),
        (
            "confirmation_incomplete",
            late,
            f"confirmation of batch {', '.join(map(str, sorted({*late.values()})))} next to the optimum is incomplete, "
            f"with as few as {made} of {wanted} runs; add runs with `{confirm}`",
        ),
        (
            "confirmation_incomplete",
            lacks_runs and not late,
            f"a configuration has only {made} of {wanted} confirmation runs; add runs with `{confirm}`",
        ),
        (
            "confirmation_missed",
            confirming and not verdict.confirmed and not lacks_runs,
            "no finalist reached the target in more than half of the runs; "
            + (
                "import more runs, or give an easier --target and another --name"
                if spec.is_imported
                else "raise budget.trial_train_seconds, or run a new study with an easier target"
            ),
        ),
        *(
            ("confirmation_stopped", True, f"{plainly_missed(one)}; no more runs follow")
            for one in plain_misses(trials, objective)
        ),
    ]


def _about_the_clock(spec: StudySpec, trials: Sequence[TrialRecord]) -> list[Caveat]:
    bases = {one.outcome.seconds_basis for one in trials if one.outcome is not None and one.outcome.steps}
    clocks = sorted("measured" if one is None else one.value for one in bases)
    clock = "from the logs" if spec.is_imported else "since step 0"
    return [
        (
            "wall_seconds",
            SecondsBasis.WALL in bases,
            f"times are wall-clock seconds {clock}, evaluations included; do not compare these times with measured "
            "times",
        ),
        (
            "reported_seconds",
            SecondsBasis.REPORTED in bases,
            f"times are training seconds from the {'logs' if spec.is_imported else 'program'}, not by bssearch's clock",
        ),
        (
            "seconds_mixed",
            len(bases) > 1,
            f"times are by different clocks ({', '.join(clocks)}); compare only trials with the same clock",
        ),
    ]


def _about_the_edges(spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict) -> list[Caveat]:
    sizes, best = spec.batch_sizes, verdict.optimal.configuration.batch_size
    rate = f"the best learning rate {verdict.optimal.configuration.learning_rate:.3g}"
    return [
        (
            "only_one_batch_size",
            len(verdict.by_batch) == 1,
            f"only batch {best} ran; run another batch size to compare",
        ),
        (
            "optimum_at_edge",
            len(sizes) > 1 and best in (min(sizes), max(sizes)) and best > 1,
            f"the optimum may be beyond batch {best}, the {'smallest' if best == min(sizes) else 'largest'} size of "
            f"the study; run {'smaller' if best == min(sizes) else 'larger'} batch sizes",
        ),
        (
            "learning_rate_at_edge",
            is_at_end(spec, trials, verdict.optimal.configuration),
            f"{rate} is at an end of the tried rates; try rates beyond this end"
            if spec.is_imported
            else f"{rate} is near an end of the range; run a new study with a wider space.learning_rate",
        ),
    ]


def _about_the_seeds(spec: StudySpec, verdict: Verdict) -> list[Caveat]:
    known, variation = verdict.optimal.estimate, verdict.optimal.estimate.variation or 0.0
    missed = known.runs - known.reached
    name = shlex.quote(spec.name)
    return [
        (
            "few_runs",
            0 < known.runs < FEWEST_RUNS and verdict.confirmed,
            f"the optimum has {plural(known.runs, 'confirmation run')}, but an interval needs {FEWEST_RUNS}; "
            + (
                "add runs with other seeds"
                if spec.is_imported
                else f"add runs with `bssearch study confirm {name} --runs {max(FEWEST_RUNS, spec.confirm.runs)}`"
            ),
        ),
        (
            "equal_runs",
            known.runs == known.reached >= FEWEST_RUNS and known.low is None,
            f"the {known.runs} runs of the optimum have equal results, so the interval is unknown; evaluate more often",
        ),
        (
            "seeds_ignored",
            verdict.ignores_seeds,
            "runs with different seeds are equal, so the training ignores the seed; seed the training with the trial's "
            "seed",
        ),
        (
            "missed_runs",
            missed,
            f"{missed} of {known.runs} runs of the optimum missed the target; train for longer, or lower the learning "
            "rate if runs diverged",
        ),
        (
            "seed_noise",
            variation > NOISE,
            f"the seed-to-seed spread over {known.reached} runs of the optimum is {percent(variation)}, more than "
            f"{percent(NOISE)}; add runs to narrow the interval",
        ),
    ]


def _about_rivals(spec: StudySpec, verdict: Verdict, worse: Collection[int]) -> list[Caveat]:
    optimal, known = verdict.optimal, verdict.optimal.estimate
    best, least = optimal.configuration.batch_size, verdict.least.configuration.batch_size
    others = {size: one for size, one in verdict.by_batch.items() if verdict.confirmed and one is not optimal}
    overlapping = [str(size) for size, one in others.items() if size not in worse and _overlap(one.estimate, known)]
    single = [str(size) for size, one in others.items() if not one.is_confirmed and one.value < optimal.value]
    noun, verb = ("interval", "overlaps") if len(overlapping) == 1 else ("intervals", "overlap")
    return [
        (
            "chosen_by_law",
            verdict.rule == "law",
            f"batch {least} has the least median, but all runs together favour batch {best}; batch {least} is not "
            "shown to be better",
        ),
        (
            "smallest_within_5_percent",
            verdict.rule == "smallest_shown_within_5_percent",
            f"batch {least} has the least median; batch {best} is the smallest size shown to be within 5 % of this "
            "median",
        ),
        (
            "not_separated",
            overlapping,
            f"the {noun} of batch {', '.join(overlapping)} {verb} the interval of batch {best}; more runs may "
            "separate these batch sizes",
        ),
        (
            "unconfirmed_rival",
            single,
            f"batch {', '.join(single)} beat batch {best} in a single "
            + (
                "run, which is partly luck; repeat the run with other seeds"
                if spec.is_imported
                else "search trial, which is partly luck; raise confirm.top to confirm more batch sizes"
            ),
        ),
    ]


def _about_the_default(spec: StudySpec, trials: Sequence[TrialRecord]) -> Caveat:
    default = default_configuration(spec, trials)
    tried = [trial for trial in trials if trial.configuration.trains_like(default) and says_something(trial)]
    bests = [run.outcome.best_metric for run in tried if run.outcome and run.outcome.best_metric is not None]
    nearest = min(bests, key=spec.record_target.shortfall, default=None)
    came = "" if nearest is None else f"; the best {spec.target.metric} is {nearest:.4g}"
    return (
        "default_missed",
        spec.default_is_known and tried and not any(trial.state is TrialState.REACHED for trial in tried),
        f"the default configuration missed the target in {plural(len(tried), 'trial')}{came}",
    )


def _about_the_runs(trials: Sequence[TrialRecord], verdict: Verdict) -> list[Caveat]:
    optimal, best = verdict.optimal, verdict.optimal.configuration.batch_size
    confirming = [trial for trial in trials if trial.phase is Phase.CONFIRM and says_something(trial)]
    compared = confirming if verdict.confirmed else optimal.runs
    shared = [trial for trial in compared if trial.outcome is not None and trial.outcome.contended]
    timed = sum(optimal.objective.basis(trial) == "steps_x_step_time" for trial in shared)
    known, hits = optimal.outcomes, optimal.hits
    dropped = max((one.dropped_samples_per_epoch or 0 for one in known), default=0)
    skipped, taken = sum(one.skipped_steps or 0 for one in known), sum(one.steps for one in known)
    by_size = grouped(
        (one.configuration.batch_size, one.outcome)
        for one in trials
        if one.outcome is not None and one.outcome.samples and one.outcome.steps and not one.configuration.grows
    )
    means = {size: sum(one.samples for one in here) / sum(one.steps for one in here) for size, here in by_size.items()}
    smaller = [f"{mean:.3g} at batch {size}" for size, mean in sorted(means.items()) if mean < FULL * size]
    return [
        (
            "contended",
            shared,
            f"{len(shared)} of {len(compared)} {'confirmation runs' if verdict.confirmed else 'runs of the optimum'} "
            "shared the device with other work; "
            + (
                f"the answer compares all runs by {optimal.objective.common.in_words}"
                if optimal.objective.common is not None
                else "the times of these runs are steps × the uncontended step time"
                if timed == len(shared)
                else f"{len(shared) - timed} of the times are measured and may be too long; repeat the runs on an idle "
                "machine"
            ),
        ),
        (
            "coarse_evaluation",
            hits and all(outcome.last_miss_step == 0 for outcome in hits),
            f"batch {best} reached the target at the first evaluation, so the time is rough; in a new study, evaluate "
            "more often or set a harder target",
        ),
        (
            "incomplete_batch_dropped",
            dropped,
            f"batch {best} drops {dropped} samples per epoch (the incomplete last batch)",
        ),
        (
            "steps_skipped",
            skipped,
            f"loss scaling skipped {skipped} of {taken} steps of batch {best}, and the steps to the target include "
            "skipped steps; train in bf16",
        ),
        (
            "smaller_batches",
            smaller,
            f"mean samples per step are below the batch size: {', '.join(smaller)}; use drop_last=True and batch sizes "
            "below the number of training samples",
        ),
    ]


def _about_the_study(spec: StudySpec, trials: Sequence[TrialRecord], optimal: Candidate) -> list[Caveat]:
    best, name = optimal.configuration.batch_size, shlex.quote(spec.name)
    failed = sum(trial.state is TrialState.FAILED for trial in trials)
    return [
        (
            "failed_trials",
            failed,
            f"failed trials: {failed}; see the reasons with `bssearch trial list {name}`",
        ),
        (
            "default_outside_space",
            not spec.is_imported
            and spec.space.encode(default_configuration(spec, trials)) is None
            and any(trial.phase is Phase.SEARCH for trial in trials),
            "the default configuration is outside the search space; in a new study, widen the space or change the "
            "default",
        ),
        (
            "accuracy_not_compared",
            optimal.objective.stops_at_target
            and spec.default_is_known
            and not spec.is_imported
            and best >= 2 * spec.default.batch_size
            and not any(trial.phase is Phase.TO_BUDGET for trial in trials),
            f"batch {best} is {best / spec.default.batch_size:.3g} × your default batch size; compare "
            f"{spec.target.metric} after equal train seconds with `bssearch study confirm {name} --to-budget`",
        ),
    ]


def _about_measurements(spec: StudySpec, verdict: Verdict, probes: Collection[ProbeRecord]) -> list[Caveat]:
    warned = [set(one.warnings) for one in verdict.optimal.outcomes]
    contended = [str(probe.batch_size) for probe in probes if probe.contended and probe.undelayed_step_seconds is None]
    return [
        *(("measurement", True, sentence) for sentence in (sorted(set.intersection(*warned)) if warned else ())),
        (
            "step_times_contended",
            contended,
            f"other work disturbed the step times of batch {', '.join(contended)}; measure these step times again with "
            f"`bssearch probe step-time {shlex.quote(spec.name)}`",
        ),
    ]


def retargeted(target: Target) -> Notice:
    return Notice(
        code="retargeted",
        message=f"the search aimed at {target.metric} {target.value:g}, so another batch size may be better at "
        "the easier target; run a new study with the easier target",
    )


def about_versions(versions: Sequence[str]) -> list[Notice]:
    if len(versions) < 2:
        return []
    return [
        Notice(
            code="torch_changed",
            message=f"trials ran with torch {' and '.join(versions)}, so step times may differ; use one version in a "
            "new study",
        )
    ]


def about_generalisation(found: Generalisation | None, target: Target) -> list[Notice]:
    if found is None:
        return []
    shared, runs = (sum(counts) for counts in zip(*((row.contended, row.runs) for row in found.batches), strict=True))
    unlike = Notice(
        code="generalisation_contended",
        message=f"{shared} of {runs} runs of {found.train_seconds:g} s shared the device with other work "
        "and may have trained for fewer steps; repeat these runs on an idle machine",
    )
    return [unlike] * bool(shared) + [
        Notice(code="generalisation_gap", message=_gap_sentence(found, row, row.gap, target))
        for row in found.batches
        if row.gap is not None and row.gap.value > found.notable_gap
    ]


def _gap_sentence(found: Generalisation, row: FinalMetrics, gap: Interval, target: Target) -> str:
    size, best = row.batch_size, found.best_batch_size
    text = (
        f"after {found.train_seconds:g} train seconds, batch {size} reaches {target.metric} "
        f"{row.final_metric:.4g}, {gap.value:.3g} worse than batch {best} ({_certainty(gap)})"
    )
    near = [
        one.batch_size
        for one in found.batches
        if one.batch_size == best or (one.gap is not None and one.gap.value <= found.notable_gap)
    ]
    if size < best:
        return f"{text}. Train for longer, or use batch {min(one for one in near if one > size)} or more"
    advice = f"use batch {max(one for one in near if one < size)} or less"
    harder = found.more_regularised
    if harder is None or harder.batch_size != size or found.closed is None:
        return f"{text}. Retune dropout, weight decay and label smoothing at batch {size}, or {advice}"
    changed = {name: value for name, value in harder.parameters.items() if value != row.parameters[name]}
    how = f"More regularisation ({', '.join(f'{name} {value:.3g}' for name, value in changed.items())})"
    reached = f"{target.metric} {harder.final_metric:.4g}"
    if found.closed:
        return f"{text}. {how} closes the gap ({reached}); use this regularisation at batch {size}, or {advice}"
    return f"{text}. {how} does not close the gap ({reached}); {advice}, or retune the regularisation"


def _certainty(gap: Interval) -> str:
    if gap.low is None or gap.high is None:
        return "no interval, because a batch size has fewer than three runs"
    interval = f"95 % interval [{gap.low:.3g}, {gap.high:.3g}]"
    return f"{interval} excludes 0" if gap.low > 0 else f"{interval} includes 0, so the gap may be chance"


def _overlap(one: Estimate, other: Estimate) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high


HOST_BOUND = 0.10  # a notice warns if the host-bound share is higher

FEWEST_SIZES = 2  # a line of step times needs two batch sizes that are not host-bound


def about_the_host(
    batches: Sequence[Batch],
    optimal: Candidate,
    probes: Collection[ProbeRecord],
    law: LawFit | None,
    compile_mode: str,
) -> list[Notice]:
    """Return a caveat if the optimum is host-bound, with the optimum for a faster host if known."""
    size = optimal.configuration.batch_size
    share = next((row.host_bound_share for row in batches if row.batch_size == size), None)
    if share is None or share <= HOST_BOUND:
        return []
    return [
        Notice(code="host_bound", message=". ".join(_host_caveats(size, share, optimal, probes, law, compile_mode)))
    ]


def _host_caveats(
    size: int,
    share: float,
    optimal: Candidate,
    probes: Collection[ProbeRecord],
    law: LawFit | None,
    compile_mode: str,
) -> Iterator[str]:
    yield (
        f"the host limits steps at batch {size}: the host-bound share is {percent(share)}, "
        f"more than {percent(HOST_BOUND)}"
    )
    if optimal.objective.trials_race:
        missing = _missing_for_line(probes, law)
        found = None if missing or law is None else _device_optimum(probes, law)
        if found is not None:
            verb = "still be" if found.batch_size == size else "be about"
            yield f"With a faster host, the law's optimum would {verb} {found.name}"
        else:
            yield f"The optimum with a faster host is unknown: {missing or NO_LINE}"
    if compile_mode not in WITH_CUDA_GRAPHS:
        yield "In a new study, set training: {compile: reduce-overhead} to run the model as CUDA graphs"


NO_LINE = "steps that are not host-bound take no longer with a larger batch"


def _missing_for_line(probes: Collection[ProbeRecord], law: LawFit | None) -> str | None:
    sizes = [one.batch_size for one in device_bound(probes)]
    if len(sizes) < FEWEST_SIZES:
        known = f"only batch {sizes[0]}" if sizes else "no batch size"
        needs = f"step times of two batch sizes with a host-bound share of at most {percent(HOST_BOUND)}"
        return f"a prediction needs {needs}, and {known} has such a step time"
    if law is None or law.verdict == "too_few_points":
        return "the law needs three tuned batch sizes"
    return None if law.verdict == "fits" else "the law does not fit"


def device_bound(probes: Collection[ProbeRecord]) -> list[ProbeRecord]:
    """Return the probes without accumulation whose step is not host-bound, by ascending batch size."""
    return [
        one
        for one in sorted(probes, key=lambda one: one.batch_size)
        if one.step_seconds is not None
        and one.is_whole
        and one.host_bound_share is not None
        and one.host_bound_share <= HOST_BOUND
    ]


def _device_optimum(probes: Collection[ProbeRecord], law: LawFit) -> Predicted | None:
    # The predicted optimum if the host never limits a step. A host-bound step takes α + β·B by the fit to other sizes,
    # within (1 − share)·t and the measured time t. All other steps keep the measured time.
    if (line := fit_step_time(device_bound(probes), FEWEST_SIZES)) is None:
        return None
    steps = []
    for one in probes:
        seconds, share = one.step_seconds, one.host_bound_share
        if seconds is None:
            continue
        if share is not None and share > HOST_BOUND and one.is_whole:
            seconds = min(max(line.alpha_seconds + line.beta_seconds * one.batch_size, (1 - share) * seconds), seconds)
        steps.append(RunnableStep(one.batch_size, one.micro_batch_size * one.world_size, seconds))
    return predict_optimum(law, steps)
