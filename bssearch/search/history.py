"""The history of a search: trials, step times and spent budget."""

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from bssearch.analysis.law.quick import QuickAnswer
from bssearch.analysis.objectives import Objective, objective_of
from bssearch.records import (
    Configuration,
    ParameterValue,
    Phase,
    ProbeRecord,
    Progress,
    TrialRecord,
    TrialState,
    model_parameters,
    step_seconds_of,
    with_step_time,
)
from bssearch.spec import StudySpec, are_coordinates


def trial_seed(study_seed: int, phase: Phase, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{study_seed}/{phase}/{index}".encode()).digest()[:4]) >> 1


def busy_seconds(trials: Iterable[TrialRecord], now: float, slots: int) -> float:
    """The seconds until ``now`` during which a trial ran, except failed, lost and cancelled trials.

    A resumed trial counts from its last start, plus its earlier seconds divided by ``slots``. An ended trial counts for
    at most its wall seconds.
    """
    spans, earlier = list[tuple[float, float]](), 0.0
    for trial in trials:
        start = trial.created_at.timestamp()
        if trial.state is TrialState.RUNNING:
            spans.append((start, now))
        elif not trial.state.is_missing and trial.ended_at is not None:
            wall = trial.outcome.wall_seconds if trial.outcome is not None else 0.0
            # the database's clock may jump
            seconds = max(0.0, min(trial.ended_at.timestamp() - start, wall or math.inf))
            spans.append((start, start + seconds))
            earlier += max(0.0, wall - seconds)
    busy, until = earlier / slots, -math.inf
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


# Prior seed-to-seed spread of log seconds, between MLPerf (0.04) and small networks (0.4), and degrees of freedom
SEED_NOISE = 0.15
SEED_NOISE_FREEDOM = 4

Identity = tuple[object, ...]


def spread(runs: Collection[TrialRecord]) -> tuple[float, int]:
    """The sum of squared deviations of log seconds to the target, and the degrees of freedom.

    Returns (0, 0) if fewer than two runs reached the target or a run is censored.
    """
    seconds = [measured_seconds(run) for run in runs if run.state is TrialState.REACHED]
    logs = [math.log(one) for one in seconds if 0 < one < math.inf]
    if len(logs) < 2 or any(run.state.is_censored for run in runs):
        return 0.0, 0
    mean = statistics.fmean(logs)
    return math.fsum((log - mean) ** 2 for log in logs), len(logs) - 1


def identity_of(configuration: Configuration) -> Identity:
    one = configuration
    rates = (one.learning_rate, one.warmup_epochs, one.weight_decay, one.dropout, one.label_smoothing)
    return (one.batch_size, *rates, one.optimizer, *sorted(one.parameters.items()))


def measured_seconds(trial: TrialRecord | None) -> float:
    """The measured train seconds to the target; infinite if unknown."""
    value = trial.outcome.time_to_target_s if trial is not None and trial.outcome is not None else None
    return math.inf if value is None else value


FAILURES = 3  # this many failed trials exclude a batch size, unless at least as many trials ran

TRIED_AGAIN = frozenset({TrialState.LOST, TrialState.CANCELLED, TrialState.OOM})

ATTEMPTS = 5  # limit of a trial's attempts, because a trial may kill drivers

INTERRUPTED = "stopped by the user"  # interrupted trials resume first


class History:
    """A study's trials, including running trials, and step times.

    Attributes:
        curves: Best metrics so far, by search trial.
        now: Time of the last decision, in seconds since 1970.
        all_trials, trials: Views of all trials and of the search trials.
        ended: Number of ended search trials, without paused trials.
        last_expectation: Expected improvement of the newest ended trial with a stored expected improvement.
    """

    def __init__(
        self,
        spec: StudySpec,
        trials: Sequence[TrialRecord] = (),
        probes: Mapping[int, ProbeRecord] | None = None,
        *,
        now: float = 0.0,
    ) -> None:
        self.spec = spec
        self.objective: Objective = objective_of(spec)
        self._timed_model = spec.timed_model
        self._dimensions = spec.space.dimensions()
        self._probes: Mapping[int, ProbeRecord] = {} if probes is None else probes
        self._step_seconds = step_seconds_of(self._probes.values(), self._timed_model)
        self.now = now
        self.quick: QuickAnswer | None = None
        self.curves: dict[int, Progress] = {}
        self._all: dict[int, TrialRecord] = {}
        self._search: dict[int, TrialRecord] = {}
        self.all_trials: Collection[TrialRecord] = self._all.values()
        self.trials: Collection[TrialRecord] = self._search.values()
        self.spent = 0
        self.ended = 0
        self.last_expectation: float | None = None
        self._last_expected = 0
        self._as_stored: dict[int, TrialRecord] = {}
        self._by_state: dict[TrialState, dict[int, TrialRecord]] = defaultdict(dict)
        self._by_batch_size: dict[int, dict[int, TrialRecord]] = defaultdict(dict)
        self._best: dict[int, TrialRecord] = {}
        self._keys: dict[int, Identity] = {}
        self._tried: Counter[Identity] = Counter()
        self._runs: dict[Identity, dict[int, TrialRecord]] = defaultdict(dict)
        self._spreads: dict[Identity, tuple[float, int]] = {}
        self._changed: set[Identity] = set()  # configurations with runs that `_spreads` lacks
        self._retried: Counter[int] = Counter()
        self._failed: Counter[int] = Counter()
        self._ran: Counter[int] = Counter()
        self._takes = 0
        self._busy_known: tuple[tuple[float, int], float] | None = None
        for trial in trials:
            self.take(trial)

    def take(self, trial: TrialRecord) -> None:
        self._takes += 1
        is_sampled = trial.phase is Phase.SEARCH and trial.sampled is not None
        if is_sampled and not are_coordinates(trial.sampled, self._dimensions):
            trial = replace(trial, sampled=None)
        self._as_stored[trial.number] = trial
        trial = with_step_time(trial, self._step_seconds)
        before = self._all.get(trial.number)
        self._all[trial.number] = trial
        if trial.phase is not Phase.DEVICES:
            key = self._key(trial)
            self._runs[key][trial.number] = trial
            self._changed.add(key)
        if before is not None and before.phase is Phase.SEARCH:
            self._count(before, -1)
        if trial.phase is Phase.SEARCH:
            self._search[trial.number] = trial
            self._count(trial, +1)
            self._expect(trial)
            self._note_best(trial)
            if trial.state is TrialState.REACHED:
                self._reach(trial)

    @property
    def probes(self) -> Mapping[int, ProbeRecord]:
        """The step times by batch size, in current micro-batches. Setting `probes` updates all trials."""
        return self._probes

    @probes.setter
    def probes(self, probes: Mapping[int, ProbeRecord]) -> None:
        self._probes, self._step_seconds = probes, step_seconds_of(probes.values(), self._timed_model)
        for stored, known in zip(list(self._as_stored.values()), list(self.all_trials), strict=True):
            if with_step_time(stored, self._step_seconds).steps_x_step_time_s != known.steps_x_step_time_s:
                self.take(stored)

    def step_seconds(self, configuration: Configuration) -> float | None:
        """The seconds of a configuration's step; None if untimed, or if the batch size grows."""
        if configuration.grows:
            return None
        probe = self.probes.get(configuration.batch_size)
        is_timed = model_parameters(configuration) == self._timed_model
        return probe.step_seconds if probe is not None and is_timed else None

    def observe(self, number: int, evaluations: Sequence[tuple[float, float]]) -> None:
        """Add (train seconds, metric) pairs that are newer than the trial's curve and miss the target."""
        curve, target = self.curves.get(number, Progress()), self.spec.record_target
        seen = curve.now if curve.gains else -math.inf
        sign, goal = target.gain(1.0), target.gain(target.value)
        for train_seconds, metric in evaluations:
            if train_seconds > seen and not sign * metric >= goal:
                curve.add(train_seconds, sign * metric)
        if curve.gains:
            self.curves[number] = curve

    @property
    def length(self) -> int:
        """The newest trial's number; 0 if no trial exists."""
        return next(reversed(self._all), 0)

    def trial(self, number: int) -> TrialRecord | None:
        return self._all.get(number)

    def value(self, trial: TrialRecord | None) -> float:
        """Return a trial's objective value; infinite if unknown."""
        found = self.objective.figure(trial) if trial is not None else None
        return math.inf if found is None else found

    def figure_text(self, trial: TrialRecord) -> str:
        is_product = self.objective.trials_race and self.objective.basis(trial) != "measured"
        basis = " as steps × step time" if is_product else ""
        return f"{self.objective.shown(self.value(trial)):.3g}{self.objective.unit}{basis}"

    @property
    def incumbent(self) -> TrialRecord | None:
        """The trial with the least objective value, if any."""
        return min(self._best.values(), key=lambda trial: (self.value(trial), trial.number), default=None)

    @property
    def reference(self) -> TrialRecord | None:
        """The incumbent, else the first censored trial, if any."""
        if (best := self.incumbent) is not None:
            return best
        ran = [trial for state in TrialState if state.is_censored for trial in self._by_state[state].values()]
        return min(ran, key=lambda trial: trial.number, default=None)

    @property
    def feasible(self) -> tuple[int, ...]:
        """The timed batch sizes without too many `FAILURES`, ascending."""
        timed = (size for size, probe in sorted(self.probes.items()) if probe.step_seconds is not None)
        return tuple(size for size in timed if self._failed[size] < max(FAILURES, self._ran[size] + 1))

    @property
    def untimed(self) -> tuple[int, ...]:
        return tuple(size for size in self.spec.batch_sizes if size not in self.probes)

    @property
    def largest(self) -> int | None:
        """The largest feasible batch size without accumulation, if any."""
        return max([size for size in self.feasible if self.probes[size].is_whole], default=None)

    @property
    def budget_share(self) -> float:
        return max(self.spent / self.spec.budget.trials, self.time_share)

    @property
    def time_share(self) -> float:
        """The spent share of ``budget.wall_seconds``; 0 if unlimited."""
        seconds = self.spec.budget.wall_seconds
        return 0.0 if seconds is None else self.busy_seconds / seconds

    @property
    def busy_seconds(self) -> float:
        asked = self.now, self._takes  # a decision asks several times, each over all trials
        if self._busy_known is None or self._busy_known[0] != asked:
            self._busy_known = asked, busy_seconds(self.trials, self.now, self.spec.executor.least_slots)
        return self._busy_known[1]

    @property
    def seed_noise(self) -> float:
        """The seed-to-seed spread: the standard deviation of log seconds to the target, shrunk towards `SEED_NOISE`."""
        for key in self._changed:
            self._spreads[key] = spread(self._runs[key].values())
        self._changed.clear()
        known = self._spreads.values()
        squares = SEED_NOISE_FREEDOM * SEED_NOISE**2 + math.fsum(squares for squares, _ in known)
        return math.sqrt(squares / (SEED_NOISE_FREEDOM + sum(freedom for _, freedom in known)))

    def at(self, batch_size: int) -> list[TrialRecord]:
        """The search trials at a batch size, except failed, lost, cancelled and out-of-memory trials."""
        return [trial for trial in self._by_batch_size[batch_size].values() if _says_something(trial)]

    def of_phase(self, phase: Phase) -> list[TrialRecord]:
        return [trial for trial in self.all_trials if trial.phase is phase]

    def best_at(self, batch_size: int) -> TrialRecord | None:
        return self._best.get(batch_size)

    def in_state(self, *states: TrialState) -> list[TrialRecord]:
        found = [trial for state in states for trial in self._by_state[state].values()]
        return sorted(found, key=lambda trial: trial.number)

    def tried(self, configuration: Configuration) -> bool:
        """True if the configuration has a search trial that is not lost, cancelled or out of memory."""
        return self._tried[identity_of(configuration)] > 0

    def has_trial_of(self, configuration: Configuration) -> bool:
        here = self._by_batch_size[configuration.batch_size].values()
        return any(trial.configuration.trains_like(configuration) for trial in here)

    def as_run(self, configuration: Configuration) -> Configuration:
        """Return the configuration in its batch size's current micro-batches; unchanged if untimed."""
        probe = self.probes.get(configuration.batch_size)
        return configuration if probe is None else configuration.on_devices(probe.world_size, probe.micro_batch_size)

    def eval_every_steps(self, batch_size: int) -> int:
        """The steps between evaluations at a batch size; 1 if unknown."""
        probe = self.probes.get(batch_size)
        return 1 if probe is None else probe.eval_every_steps or 1

    def coordinates_near(self, batch_size: int) -> Mapping[str, ParameterValue] | None:
        """The coordinates of the best trial at the nearest batch size whose best trial is not the default.

        If no size qualifies, returns the default's coordinates, or None if the default is outside the space.
        """
        default, best = self.spec.default_configuration, map(self.best_at, self.feasible)
        winners = [one for one in best if one and one.sampled and not one.configuration.trains_like(default)]
        if not winners:
            return self.spec.space.encode(default)
        return min(
            winners, key=lambda trial: (octaves(trial.configuration.batch_size, batch_size), self.value(trial))
        ).sampled

    def to_retry(self, *, uncapped: bool) -> TrialRecord | None:
        """Return the next lost, out-of-memory or failed trial to retry, if any.

        A trial has at most `ATTEMPTS` attempts, and a failed retry is the last. If ``uncapped``, return an uncapped
        trial, which may also be cancelled, else a capped trial.
        """
        states = [TrialState.LOST, TrialState.OOM, TrialState.FAILED, *[TrialState.CANCELLED][: int(uncapped)]]
        feasible = self.feasible
        for trial in self.in_state(*states):
            is_asked_for = trial.uncapped is uncapped and trial.configuration.batch_size in feasible
            had_its_chance = trial.is_refused or (trial.state is TrialState.FAILED and trial.retry_of is not None)
            is_open = is_asked_for and not had_its_chance and not self._retried[trial.number]
            if is_open and self._attempts(trial) < ATTEMPTS:
                return trial
        return None

    def _note_best(self, trial: TrialRecord) -> None:
        size = trial.configuration.batch_size
        best = self._best.get(size)
        rivals = [trial] if best is None else [best, trial]
        if best is not None and best.number == trial.number:
            rivals = list(self._by_batch_size[size].values())
        known = [(value, one.number, one) for one in rivals if math.isfinite(value := self.value(one))]
        if known:
            self._best[size] = min(known, key=lambda one: one[:2])[2]
        else:
            self._best.pop(size, None)

    def _expect(self, trial: TrialRecord) -> None:
        has_ended = trial.state.is_finished and trial.state is not TrialState.PAUSED
        if has_ended and trial.expected_improvement is not None and trial.number >= self._last_expected:
            self._last_expected, self.last_expectation = trial.number, trial.expected_improvement

    def _reach(self, trial: TrialRecord) -> None:
        curve = self.curves.setdefault(trial.number, Progress())
        seconds, gain = measured_seconds(trial), self.spec.record_target.gain(self.spec.record_target.value)
        if curve.gain < gain and math.isfinite(seconds):
            curve.add(seconds, gain)

    def _count(self, trial: TrialRecord, by: int) -> None:
        state, size = trial.state, trial.configuration.batch_size
        self.spent += by * (not state.is_missing)
        self.ended += by * (state.is_finished and state is not TrialState.PAUSED)
        self._failed[size] += by * (state is TrialState.FAILED and not trial.is_refused)
        self._ran[size] += by * (state.is_finished and _says_something(trial))
        if state not in TRIED_AGAIN:
            self._tried[self._key(trial)] += by
        if trial.retry_of is not None:
            self._retried[trial.retry_of] += by
        if by > 0:
            self._by_state[state][trial.number] = trial
            self._by_batch_size[size][trial.number] = trial
        else:
            del self._by_state[state][trial.number]

    def _key(self, trial: TrialRecord) -> Identity:
        if trial.number not in self._keys:
            self._keys[trial.number] = identity_of(trial.configuration)
        return self._keys[trial.number]

    def _attempts(self, trial: TrialRecord | None) -> int:
        attempts = 0
        while trial is not None:
            attempts += 1
            earlier = trial.retry_of
            # another program may have stored a trial as the retry of itself
            trial = self.trial(earlier) if earlier is not None and earlier < trial.number else None
        return attempts


def is_interrupted(trial: TrialRecord) -> bool:
    return trial.outcome is not None and trial.outcome.reason == INTERRUPTED


def octaves(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def _says_something(trial: TrialRecord) -> bool:
    return not trial.state.is_missing and trial.state is not TrialState.OOM
