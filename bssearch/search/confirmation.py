"""Confirmation: rerun finalists with fresh seeds, because the best of many single-seed trials is partly luck."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from bssearch.analysis.certainty import Beliefs, beliefs, carries, step_figures
from bssearch.analysis.objectives import Objective
from bssearch.analysis.optimum import (
    FAR_BEHIND,
    Candidate,
    Verdict,
    beaten,
    compared,
    decide,
    far_behind,
    plain_misses,
    plainly_missed,
    says_something,
)
from bssearch.records import (
    Configuration,
    Phase,
    StepSeconds,
    TrialPlan,
    TrialRecord,
    TrialState,
    step_seconds_of,
    train_seconds_of,
)
from bssearch.records.text import plural
from bssearch.search.history import History, trial_seed
from bssearch.spec.admission import problem_with
from bssearch.spec.space import is_alike

CONFIGURATIONS_PER_BATCH = 2  # a single configuration may be lucky

FAILURES_ALLOWED = 1  # a run repeats after this many failures


def repeat(
    history: History,
    configuration: Configuration,
    seed: int,
    phase: Phase,
    *,
    retry_of: int | None = None,
) -> TrialPlan:
    """Plan a run with the full limit. A `Phase.TO_BUDGET` run continues past the target."""
    is_to_budget = phase is Phase.TO_BUDGET
    return TrialPlan(
        configuration=configuration,
        sampled=history.spec.space.encode(configuration),
        phase=phase,
        seed=seed,
        train_seconds_limit=history.spec.budget.trial_train_seconds,
        eval_every_steps=history.eval_every_steps(configuration.batch_size),
        threads=history.spec.executor.threads,
        uncapped=is_to_budget,
        stop_at_target=not is_to_budget and history.objective.stops_at_target,
        retry_of=retry_of,
        after=history.length,
    )


def finalists(history: History) -> list[Configuration]:
    """The configurations to confirm, in current micro-batches. Empty before a success.

    Each of the ``confirm.top`` best batch sizes has up to two finalists. The first is the size's best
    configuration. The second has the values of the best trial of all sizes; if these values are the first's or
    unavailable, the second is the size's second best. Further finalists are the default, the best at the default's
    batch size, and neighbours of the best size (see `beside`). The last finalist has the best result at the largest
    size without accumulation.
    """
    reached = [(history.value(best), size) for size in history.feasible if (best := history.best_at(size))]
    if not reached:
        return []
    chosen = []
    contending = [size for _, size in sorted(reached)[: history.spec.confirm.top]]
    best = history.best_at(contending[0])
    for size in contending:
        known = [trial for trial in history.at(size) if math.isfinite(history.value(trial))]
        ranked = [trial.configuration for trial in sorted(known, key=history.value)]
        if (common := _carried_over(history, size, best)) is not None:
            ranked.insert(1, common)
        chosen += list({run.key: run for run in map(history.as_run, ranked)}.values())[:CONFIGURATIONS_PER_BATCH]
    chosen += beside(history, contending[0])
    if history.spec.default.batch_size in history.feasible:
        chosen.append(history.spec.default_configuration)
        if (tuned := history.best_at(history.spec.default.batch_size)) is not None:
            chosen.append(tuned.configuration)
    if history.largest is not None and (nearest := _nearest_at(history, history.largest)):
        chosen.append(nearest.configuration)
    return list({run.key: run for run in map(history.as_run, chosen)}.values())


def compared_sizes(history: History) -> frozenset[int]:
    """The batch sizes of finalists and confirmation runs, except sizes that are `FAR_BEHIND` the incumbent."""
    # at twice the incumbent's time, a first visit's error of about 10 % changes no decision
    chosen = [*finalists(history), *(trial.configuration for trial in history.of_phase(Phase.CONFIRM))]

    def is_near(size: int) -> bool:
        best, incumbent = history.best_at(size), history.incumbent
        if best is None or incumbent is None:
            return True
        return history.objective.ratio(history.value(best), history.value(incumbent)) <= math.exp(FAR_BEHIND)

    return frozenset(filter(is_near, (one.batch_size for one in chosen)))


def beside(history: History, batch_size: int) -> list[Configuration]:
    """Return the best configuration of each neighbouring batch size.

    A neighbour without a success gets ``batch_size``'s best values if possible, unless a trial of these values was
    exhausted or diverged.
    """
    # The seed of a trial that stopped early may be unlucky.
    sizes = list(history.feasible)
    if batch_size not in sizes:
        return []
    place = sizes.index(batch_size)
    neighbours = sizes[max(0, place - 1) : place] + sizes[place + 1 : place + 2]
    found = [_best_or_carried_over(history, size, history.best_at(batch_size)) for size in neighbours]
    return [history.as_run(one) for one in found if one is not None]


def _best_or_carried_over(history: History, batch_size: int, near: TrialRecord | None) -> Configuration | None:
    best = history.best_at(batch_size)
    if best is not None:
        return best.configuration
    carried = _carried_over(history, batch_size, near)
    missed = [one for one in history.at(batch_size) if one.state in {TrialState.EXHAUSTED, TrialState.DIVERGED}]
    return None if carried is None or any(one.configuration.trains_like(carried) for one in missed) else carried


def _carried_over(history: History, batch_size: int, best: TrialRecord | None) -> Configuration | None:
    # The configuration with the values of `best` at another batch size; None if `best` was not sampled
    if best is None or best.sampled is None or not history.objective.stops_at_target:
        return None
    return history.spec.space.decode(batch_size, best.sampled)


def next_run(history: History, *, spares: bool = True) -> TrialPlan | None:
    return next(iter(remaining(history, history.of_phase(Phase.CONFIRM), spares=spares)), None)


def remaining(history: History, trials: Sequence[TrialRecord], *, spares: bool = True) -> list[TrialPlan]:
    """Return missing runs of finalists, seed by seed, in random order.

    Configurations with runs stay finalists. If ``spares``, `beaten` configurations and `plain_misses` get no more
    runs. The plans retry lost and cancelled runs, and failed runs once. If a run was out of memory, the plans retry all
    runs of the batch size in smaller micro-batches. Next are runs of a confirmed optimum's untried neighbours, and
    then further runs of contenders.
    """
    made, done = CompletedRuns(history, trials), in_force(history, trials)
    refused, missed = _refused(history, trials), _missed(history, trials)
    objective = compared([*history.trials, *done], history.objective, _timed(history))
    left = refused | missed | beaten(done, objective) if spares else refused

    def planned(chosen: Iterable[Configuration]) -> list[TrialPlan]:
        return _planned(history, done, made, [one for one in chosen if one.key not in left], objective)

    if first := planned(({one.key: one for one in finalists(history)} | made.begun).values()):
        return first
    verdict = verdict_of(history, trials)
    if verdict is None or not verdict.confirmed:
        return []
    confirmed = {trial.configuration.batch_size for trial in trials}
    near = beside(history, verdict.optimal.configuration.batch_size)
    untried = planned(one for one in near if one.batch_size not in confirmed)
    return untried or _further(history, trials, made, verdict, barred=refused | missed)


def _planned(
    history: History,
    done: Sequence[TrialRecord],
    made: CompletedRuns,
    chosen: Sequence[Configuration],
    objective: Objective,
) -> list[TrialPlan]:
    # Slow configurations get further seeds last, when no other run can show that they are `beaten`.
    runs, slow = history.spec.confirm.runs, far_behind(done, objective)
    first = list(interleaved(history, made, chosen, min(1, runs)))
    first += interleaved(history, made, [one for one in chosen if one.key not in slow], runs)
    if first or any(not one.state.is_finished and one.configuration.key not in slow for one in done):
        return list({(one.configuration.key, one.seed): one for one in first}.values())
    return list(interleaved(history, made, chosen, runs))


def _refused(history: History, trials: Sequence[TrialRecord]) -> set[str]:
    refused = [history.as_run(trial.configuration) for trial in trials if trial.is_refused]
    return {one.key for one in refused if problem_with(history.spec, one) is not None}


def _missed(history: History, trials: Sequence[TrialRecord]) -> set[str]:
    return {one.configuration.key for one in _plain_misses(history, trials)}


def _plain_misses(history: History, trials: Sequence[TrialRecord]) -> list[Candidate]:
    return plain_misses(in_force(history, trials), history.objective)


def miss_of(history: History, trial: TrialRecord) -> str | None:
    """Return a message if this trial shows that the configuration plainly misses the target, else None."""
    if trial.phase is not Phase.CONFIRM or not says_something(trial):
        return None
    runs = [one for one in history.of_phase(Phase.CONFIRM) if one.configuration.key == trial.configuration.key]
    now = _plain_misses(history, runs)
    before = _missed(history, [one for one in runs if one.number != trial.number])
    if before or not now:
        return None
    return f"{plainly_missed(now[0])}; this configuration gets no more confirmation runs"


def interleaved(
    history: History,
    made: CompletedRuns,
    chosen: Sequence[Configuration],
    runs: int,
    phase: Phase = Phase.CONFIRM,
) -> Iterator[TrialPlan]:
    """Yield the missing runs of ``chosen``, seed by seed, in random order."""
    for index in range(runs):
        seed = trial_seed(history.spec.seed, Phase.CONFIRM, index)
        for configuration in random.Random(seed).sample(chosen, len(chosen)):
            if made.is_missing(configuration, seed):
                yield repeat(history, configuration, seed, phase, retry_of=made.retried(configuration, seed))


def in_force(history: History, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials with the current micro-batch size of their batch size."""
    return [
        trial
        for trial in trials
        if trial.configuration.batch_size in history.probes
        and trial.configuration == history.as_run(trial.configuration)
    ]


def verdict_of(history: History, trials: Sequence[TrialRecord]) -> Verdict | None:
    """The verdict over search and confirmation; None if no trial reached the target."""
    counted = [*history.trials, *in_force(history, trials)]
    return decide(counted, history.spec.confirm.runs, history.objective, _timed(history))


def _timed(history: History) -> StepSeconds:
    return step_seconds_of(history.probes.values(), history.spec.timed_model)


def in_vain(history: History) -> str | None:
    """Return a message if every confirmed configuration plainly misses the target, else None."""
    trials = history.of_phase(Phase.CONFIRM)
    missed = _missed(history, trials)
    if not missed or any(trial.configuration.key not in missed for trial in in_force(history, trials)):
        return None
    target = history.spec.record_target
    return (
        f"the confirmation has ended, because no finalist reaches {target.metric} {target.goal.sign} "
        f"{target.value:g} in at least half of the runs (95 % confidence); raise "
        "budget.trial_train_seconds, or run a new study with an easier target"
    )


def ending(history: History) -> str | None:
    """Return `in_vain`'s message, or why the recommendation is final or provisional; None if unknown."""
    if (message := in_vain(history)) is not None:
        return message
    trials = history.of_phase(Phase.CONFIRM)
    verdict = verdict_of(history, trials)
    known = None if verdict is None else _beliefs(history, trials, verdict)
    if known is None:
        return None
    sure = f"within 5 % of the best with a probability of {math.floor(100 * known.share)} %"
    if is_final(history, trials, known) or (known.are_sure and not known.contenders()):
        count = sum(trial.state.has_result for trial in in_force(history, trials))
        return f"final after {plural(count, 'confirmation run')}: batch {known.recommended} is {sure}"
    text = f"provisional after {_stopped_by(history, trials, known)}: batch {known.recommended} is {sure}"
    rivals = " or ".join(str(size) for size in sorted(known.contenders()) if size != known.recommended)
    return f"{text}; batch {rivals} may be better" if rivals else text


def is_final(history: History, trials: Sequence[TrialRecord], known: Beliefs) -> bool:
    """True if the answer is sure now and was sure before the last run."""
    # A single check is not enough, because with a check after each run, any answer seems sure at some time.
    if not known.are_sure:
        return False
    before = [one for one in in_force(history, trials) if one.state.has_result][:-1]
    verdict = verdict_of(history, before)
    earlier = None if verdict is None else _beliefs(history, before, verdict)
    return earlier is not None and earlier.are_sure


def _beliefs(history: History, trials: Sequence[TrialRecord], verdict: Verdict) -> Beliefs | None:
    steps = step_figures(history.spec, verdict, history.probes)
    return beliefs(verdict, steps, [*history.trials, *trials], history.feasible)


def _further(
    history: History, trials: Sequence[TrialRecord], made: CompletedRuns, verdict: Verdict, *, barred: set[str]
) -> list[TrialPlan]:
    limit = history.spec.confirm.max_runs
    known = None if limit is None or _is_spent(history, trials) else _beliefs(history, trials, verdict)
    if limit is None or known is None:
        return []
    running = Counter(one.configuration.batch_size for one in trials if not one.state.is_finished)
    is_enough = bool(running) or is_final(history, trials, known)
    if is_enough if known.are_sure else not known.runs_help:
        return []  # a running trial's result may change this decision
    seeds = [trial_seed(history.spec.seed, Phase.CONFIRM, index) for index in range(limit)]
    for size in sorted(known.contenders(), key=lambda one: running[one]):
        configuration = _following(history, made, verdict, size)
        if configuration.key in barred:
            configuration = history.as_run(verdict.by_batch[size].configuration)
        missing = [seed for seed in seeds if made.is_missing(configuration, seed)]
        if missing:
            retry_of = made.retried(configuration, missing[0])
            return [repeat(history, configuration, missing[0], Phase.CONFIRM, retry_of=retry_of)]
    return []


def _following(history: History, made: CompletedRuns, verdict: Verdict, size: int) -> Configuration:
    # The configuration to run at `size`, with the values of `Verdict.least`, so that only the batch sizes differ
    sampled = verdict.least.runs[0].sampled
    if size == verdict.least.configuration.batch_size or sampled is None or not carries(verdict.least):
        return history.as_run(verdict.by_batch[size].configuration)
    carried = history.as_run(history.spec.space.decode(size, sampled))
    return next((one for one in made.begun.values() if is_alike(one, carried)), carried)


def _is_spent(history: History, trials: Sequence[TrialRecord]) -> bool:
    budget = history.spec.confirm.train_seconds
    return budget is not None and train_seconds_of(trials) >= budget


def _stopped_by(history: History, trials: Sequence[TrialRecord], known: Beliefs) -> str:
    confirm = history.spec.confirm
    if confirm.max_runs is None:
        return f"confirm.runs = {confirm.runs} per finalist"
    if confirm.train_seconds is not None and _is_spent(history, trials):
        return f"confirm.train_seconds = {confirm.train_seconds:g}"
    if not known.are_sure and not known.runs_help:
        return f"{plural(len(in_force(history, trials)), 'run')}, because more runs would hardly help"
    return f"confirm.max_runs = {confirm.max_runs} per finalist"


class CompletedRuns:
    """Started runs at timed batch sizes, by configuration and seed.

    ``begun``: all configurations with a run, by key.
    """

    def __init__(
        self,
        history: History,
        trials: Sequence[TrialRecord],
        as_run: Callable[[Configuration], Configuration] | None = None,
    ) -> None:
        """``as_run`` returns a configuration in current micro-batches (default: `History.as_run`)."""
        self.begun: dict[str, Configuration] = {}
        self._done: Counter[tuple[str, int]] = Counter()
        self._in_vain: dict[tuple[str, int], int] = {}
        for trial in trials:
            if trial.configuration.batch_size in history.probes:
                self._add(trial, (as_run or history.as_run)(trial.configuration))

    def is_missing(self, configuration: Configuration, seed: int) -> bool:
        return self._done[configuration.key, seed] <= FAILURES_ALLOWED

    def retried(self, configuration: Configuration, seed: int) -> int | None:
        return self._in_vain.get((configuration.key, seed))

    def _add(self, trial: TrialRecord, run: Configuration) -> None:
        self.begun[run.key] = run
        key = (run.key, trial.seed)
        if trial.state.is_missing or trial.state is TrialState.OOM:
            self._in_vain[key] = trial.number
        if trial.configuration == run and trial.state not in {TrialState.LOST, TrialState.CANCELLED}:
            self._done[key] += 1 if trial.state is TrialState.FAILED else FAILURES_ALLOWED + 1


def _nearest_at(history: History, batch_size: int) -> TrialRecord | None:
    best = history.best_at(batch_size)
    if best is not None:
        return best
    shortfall = history.spec.record_target.shortfall
    measured = [
        (shortfall(trial.outcome.best_metric), trial.number, trial)
        for trial in history.at(batch_size)
        if trial.outcome is not None and trial.outcome.best_metric is not None
    ]
    return min(measured)[2] if measured else None
