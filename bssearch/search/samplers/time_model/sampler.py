"""The sampler `auto`, with a model of the time to the target."""

import math
import statistics
from collections.abc import Sequence

from bssearch.records import Progress, TrialRecord, TrialState
from bssearch.search.history import History, measured_seconds, octaves
from bssearch.search.samplers.base import STARTUP_TRIALS, Choice, Sampler, StartupTrials, decoded
from bssearch.search.samplers.time_model.acquisition import KnowledgeGradient
from bssearch.search.samplers.time_model.candidates import Run, SpaceCandidates
from bssearch.spec import StudySpec


class TimeModelSampler(Sampler):
    """Chooses trials by `KnowledgeGradient`.

    ``startup_trials`` applies only to `tpe`, which replaces this sampler unless trials race to the target.
    """

    models_time = True

    def __init__(self, spec: StudySpec, startup_trials: StartupTrials = STARTUP_TRIALS) -> None:
        self._spec = spec
        self._history: History | None = None
        self._candidates: SpaceCandidates | None = None
        self._default = 0
        self._runs: dict[int, Run] = {}
        self._settled: set[int] = set()

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        model = self._model(history)
        if model is None:
            return None
        point = model.ask(list(self._runs.values()), batch_size=batch_size)
        gained = model.expected_improvement
        assert self._candidates is not None, "a model has candidates"
        size, sampled = self._candidates[point]
        return decoded(
            self._spec,
            size if batch_size is None else batch_size,
            sampled,
            expected_improvement=None if math.isinf(gained) else -math.expm1(-gained),
        )

    def contenders(self, history: History) -> Sequence[int]:
        model = self._model(history)
        return [] if model is None else model.contenders(list(self._runs.values()))

    def incumbent(self, history: History) -> Choice | None:
        model = self._model(history)
        point = None if model is None else model.incumbent(list(self._runs.values()))
        if point is None:
            return None
        assert self._candidates is not None, "a model has candidates"
        return decoded(self._spec, *self._candidates[point])

    def _model(self, history: History) -> KnowledgeGradient | None:
        space, feasible = self._spec.space, history.feasible
        sizes = [size for size in space.rungs if size in feasible]
        if not sizes:
            return None
        new = [trial for trial in history.trials if trial.number not in self._settled]
        is_known = history is self._history and not self._has_late(new, sizes)
        if self._candidates is None or self._candidates.batch_sizes != sizes or not is_known:
            self._history = history
            self._candidates = space.candidates(sizes) or SpaceCandidates(space, sizes)
            self._runs, self._settled = {}, set()
            size, sampled = space.nearest(self._spec.default_configuration)
            self._default = self._candidates.add(min(sizes, key=lambda one: octaves(one, size)), sampled)
            new = list(history.trials)
        for trial in new:
            self._take(trial, history, self._candidates)
        return KnowledgeGradient(
            self._candidates,
            default=self._default,
            target_gain=self._spec.record_target.gain(self._spec.target.value),
            step_seconds={
                size: seconds for size in sizes if (seconds := history.probes[size].step_seconds) is not None
            },
            seed=self._spec.seed + len(history.trials),
            noise_scale=_noise_scale(history),
        )

    def _has_late(self, new: Sequence[TrialRecord], sizes: list[int]) -> bool:
        # enqueued trials may run after trials with larger numbers
        last = max(self._runs, default=0)
        return any(trial.number < last and trial.number not in self._runs and _has_point(trial, sizes) for trial in new)

    def _take(self, trial: TrialRecord, history: History, candidates: SpaceCandidates) -> None:
        number, state = trial.number, trial.state
        if state.is_finished and state is not TrialState.PAUSED:
            self._settled.add(number)
        if trial.sampled is None or not _has_point(trial, candidates.batch_sizes):
            self._runs.pop(number, None)
            return
        if number not in self._runs:
            self._runs[number] = Run(candidates.add(trial.configuration.batch_size, trial.sampled), Progress())
        run = self._runs[number]
        run.progress = history.curves.get(number) or run.progress
        run.running = not state.is_finished
        run.diverged = state is TrialState.DIVERGED
        run.hit = measured_seconds(trial) if state is TrialState.REACHED else None


def _has_point(trial: TrialRecord, sizes: list[int]) -> bool:
    says_nothing = trial.state.is_missing or trial.state in {TrialState.OOM, TrialState.QUEUED}
    return not says_nothing and trial.sampled is not None and trial.configuration.batch_size in sizes


def _noise_scale(history: History) -> float | None:
    # Adam's noise scale if measured, else the plain noise scale
    measured = [trial.outcome.noise for trial in history.in_state(TrialState.REACHED) if trial.outcome is not None]
    scales = [scale for one in measured if (scale := one.adam_scale or one.scale) is not None and scale > 0]
    before = None if history.quick is None else history.quick.noise_scale
    return statistics.median(scales) if scales else before
