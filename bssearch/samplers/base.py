"""Which configuration the search tries next, by the sampler that a spec names: each a `Chooser` over the history."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bssearch.analysis.objectives.base import objective_of
from bssearch.history import TRIED_AGAIN, History, measured_seconds, octaves
from bssearch.pruners.base import Progress
from bssearch.pruners.controller import Watch
from bssearch.records import Configuration, ParameterValue, TrialRecord, TrialState
from bssearch.samplers import allocation
from bssearch.samplers.optuna import Sampler
from bssearch.samplers.time_model.candidates import SpaceCandidates
from bssearch.samplers.time_model.extrapolation import Run
from bssearch.samplers.time_model.sampler import Auto
from bssearch.samplers.time_model.step_times import StepTimes
from bssearch.spec import StudySpec

QUIET_ASKS = 2
"""So many times in a row little must be expected of the next trial before the search ends for it."""


RETUNED = 3
RETUNED_IN_VAIN = 5
"""How many trials a batch size in contention has before the search ends: more where none reached the target."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration to try, with its coordinates in the space; None where it lies outside."""

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    uncapped: bool = False


class Chooser(Protocol):
    """Chooses the trials of a search one by one."""

    @property
    def ending(self) -> str | None:
        """Say why little more can be gained, None while more can; what the answer needs is chosen all the same."""
        ...

    def choose(self, history: History) -> Choice | None:
        """Return what to try next, None where there is nothing."""
        ...


def chooser_for(spec: StudySpec, watch: Watch) -> Chooser:
    """Return the chooser of a spec: `auto` where it has no model of the objective is TPE."""
    if spec.sampler.name == "grid":
        return Grid(spec)
    if spec.sampler.name == "auto" and objective_of(spec).trials_race:
        return Modelled(spec, watch)
    return Allocated(spec, watch)


class Allocated:
    """Batch sizes by `bssearch.samplers.allocation`, the rest by one of Optuna's samplers."""

    ending: str | None = None

    def __init__(self, spec: StudySpec, watch: Watch) -> None:
        self._spec = spec
        self._watch = watch
        self._sampler = Sampler(
            "tpe" if spec.sampler.name == "auto" else spec.sampler.name,
            spec.space.dimensions(),
            seed=spec.seed,
            startup_trials=spec.sampler.startup_trials,
        )

    def choose(self, history: History) -> Choice | None:
        """Return what to try next, None where no batch size is feasible."""
        proposal = allocation.propose(history)
        if proposal is None:
            return None
        if proposal.source == "default":
            return default_choice(self._spec)
        sampled = known_coordinates(history, proposal)
        if sampled is None:
            reference = None if history.reference is None else self._watch.curves.get(history.reference.number)
            sampled = self._sampler.ask(history, proposal.batch_size, reference)
        return _choice(self._spec, proposal.batch_size, sampled, uncapped=proposal.uncapped)


class Modelled:
    """Everything by `bssearch.samplers.time_model`, but for evidence where no optimum can be."""

    def __init__(self, spec: StudySpec, watch: Watch) -> None:
        self.ending: str | None = None
        self._spec = spec
        self._watch = watch
        self._candidates: SpaceCandidates | None = None
        self._runs: dict[int, Run] = {}
        self._settled: set[int] = set()
        self._is_over = False
        """Whether the search has ended: what is confirmed meanwhile does not begin it anew."""
        self._quiet = 0
        self._asked_at: int | None = None

    def choose(self, history: History) -> Choice | None:
        """Return what to try next; None where no batch size is feasible, or where little more can be gained."""
        if self._is_over:
            return None
        if allocation.propose_default(history) is not None:
            return default_choice(self._spec)
        sizes = [size for size in self._spec.space.rungs if size in history.feasible]
        if not sizes:
            return None
        auto = self._auto(history, sizes)
        is_due = history.incumbent is not None and allocation.evidence_is_due(history)
        if is_due and (evidence := self._evidence(history, auto)) is not None:
            return evidence
        point = auto.ask(list(self._runs.values()))
        if self._is_done(history, auto):
            choice = self._retuned(history, auto) or self._evidence(history, auto)
            self._is_over = choice is None and all(trial.state.is_finished for trial in history.trials)
            return choice
        assert self._candidates is not None, "made with the model"
        return _choice(self._spec, *self._candidates[point])

    def _is_done(self, history: History, auto: Auto) -> bool:
        """Return whether little is expected of a further trial, now and when the last one ended."""
        least = self._spec.budget.least_improvement
        expected = -math.expm1(-auto.expected_improvement)
        if expected >= least:
            self._quiet, self.ending = 0, None
            return False
        ended = sum(trial.state.is_finished and trial.state is not TrialState.PAUSED for trial in history.trials)
        if self._asked_at is None and ended >= QUIET_ASKS:
            self._quiet = QUIET_ASKS - 1  # A search that had ended before this run began has ended with its first ask.
        if ended != self._asked_at:
            self._quiet, self._asked_at = self._quiet + 1, ended
        if self._quiet < QUIET_ASKS:
            return False
        self.ending = (
            f"a further trial is expected to better the time to the target by {expected:.2%}, "
            f"less than budget.least_improvement = {least:.2%}"
        )
        return True

    def _retuned(self, history: History, auto: Auto) -> Choice | None:
        """Return a trial at a batch size that may well be as good as the best and has had too few to be judged."""
        runs = list(self._runs.values())
        for size in auto.contenders(runs):
            here = history.at(size)
            if len(here) < (RETUNED if history.best_at(size) is not None else RETUNED_IN_VAIN):
                assert self._candidates is not None, "made with the model"
                return _choice(self._spec, *self._candidates[auto.ask(runs, batch_size=size)])
        return None

    def _evidence(self, history: History, auto: Auto) -> Choice | None:
        proposal = allocation.propose_evidence(history)
        if proposal is None:
            return None
        sampled = known_coordinates(history, proposal)
        if sampled is None:
            assert self._candidates is not None, "made with the model"
            runs = list(self._runs.values())
            _, sampled = self._candidates[auto.ask(runs, batch_size=proposal.batch_size)]
        return _choice(self._spec, proposal.batch_size, sampled, uncapped=True)

    def _auto(self, history: History, sizes: list[int]) -> Auto:
        """Return the sampler over what the trials have shown; the points of a space that has changed are new ones."""
        if self._candidates is None or self._candidates.batch_sizes != sizes:
            self._candidates = SpaceCandidates(self._spec.space, sizes)
            self._runs, self._settled = {}, set()
        candidates = self._candidates
        for trial in history.trials:
            if trial.number not in self._settled:
                self._take(trial, candidates)
        size, sampled = self._spec.space.nearest(self._spec.default_configuration)
        default = candidates.add(min(sizes, key=lambda one: octaves(one, size)), sampled)
        return Auto(
            candidates,
            default=default,
            target_gain=self._spec.record_target.gain(self._spec.target.value),
            step_times=StepTimes(sizes, lambda one: _step_seconds(history, one)),
            seed=self._spec.seed + history.length,
            noise_scale=_noise_scale(history),
        )

    def _take(self, trial: TrialRecord, candidates: SpaceCandidates) -> None:
        """Take in how far a trial has come."""
        number, state = trial.number, trial.state
        if state.is_finished and state is not TrialState.PAUSED:
            self._settled.add(number)
        if trial.sampled is None or not _tells(trial, candidates.batch_sizes):
            self._runs.pop(number, None)
            return
        if number not in self._runs:
            point = candidates.add(trial.configuration.batch_size, trial.sampled)
            self._runs[number] = Run(point, Progress())
        run = self._runs[number]
        run.progress = self._watch.curves.get(number) or run.progress
        run.running = not state.is_finished
        run.diverged = state is TrialState.DIVERGED
        run.hit = measured_seconds(trial) if state is TrialState.REACHED else None


class Grid:
    """Every combination of a space of lists, in an order that the study's seed fixes."""

    def __init__(self, spec: StudySpec) -> None:
        self.ending: str | None = None
        self._spec = spec
        dimensions = spec.space.dimensions()
        names = [dimension.name for dimension in dimensions]
        cells = [
            dict(zip(names, cell, strict=True)) for cell in itertools.product(*(one.choices for one in dimensions))
        ]
        choices = [_choice(spec, size, cell) for cell in cells for size in spec.space.rungs]
        self._choices = list({_key(choice.configuration): choice for choice in choices}.items())
        random.Random(spec.seed).shuffle(self._choices)

    def choose(self, history: History) -> Choice | None:
        """Return a combination that has not been tried; None where all have, of those whose batch size is feasible."""
        if allocation.propose_default(history) is not None:
            return default_choice(self._spec)
        tried = {_key(trial.configuration) for trial in history.trials if trial.state not in TRIED_AGAIN}
        fitting = [(key, one) for key, one in self._choices if one.configuration.batch_size in history.feasible]
        untried = next((one for key, one in fitting if key not in tried), None)
        where = "" if len(fitting) == len(self._choices) else " at batch sizes that fit"
        self.ending = None if untried else f"all {len(fitting)} combinations of the grid{where} have been tried"
        return untried


def default_choice(spec: StudySpec) -> Choice:
    """Return the default configuration, the baseline of every speed-up."""
    default = spec.default_configuration
    return Choice(default, spec.space.encode(default), uncapped=True)


def known_coordinates(history: History, proposal: allocation.Proposal) -> Mapping[str, ParameterValue] | None:
    """Return the coordinates that a proposal takes over, or None where the sampler is to choose them.

    It is where there are none, and where evidence would repeat a configuration that has had its trial.
    """
    if proposal.source == "sample":
        return None
    spec = history.spec
    if proposal.source == "transfer":
        sampled = history.coordinates_near(proposal.batch_size)
    else:
        sampled = spec.space.encode(spec.default_configuration)
    if sampled is None or not proposal.uncapped:
        return sampled
    configuration = spec.space.decode(proposal.batch_size, sampled)
    return None if any(trial.configuration.trains_like(configuration) for trial in history.trials) else sampled


def _choice(
    spec: StudySpec, batch_size: int, sampled: Mapping[str, ParameterValue], *, uncapped: bool = False
) -> Choice:
    return Choice(spec.space.decode(batch_size, sampled), sampled, uncapped)


def _tells(trial: TrialRecord, sizes: list[int]) -> bool:
    """Return whether a trial says something about points of the space that may be run."""
    says_nothing = trial.state.is_missing or trial.state in {TrialState.OOM, TrialState.QUEUED}
    return not says_nothing and trial.configuration.batch_size in sizes


def _key(configuration: Configuration) -> str:
    return configuration.in_micro_batches(1).key


def _noise_scale(history: History) -> float | None:
    """Return the gradient noise scale that the trials which reached the target have measured beside their training.

    That of the gradients as the optimizer takes them, the median over the trials; None before any has.
    """
    measured = [trial.outcome.noise for trial in history.trials if trial.state is TrialState.REACHED and trial.outcome]
    scales = [scale for one in measured if (scale := one.adam_scale or one.scale) is not None and scale > 0]
    return statistics.median(scales) if scales else None


def _step_seconds(history: History, batch_size: int) -> float:
    seconds = history.probes[batch_size].step_seconds
    assert seconds is not None, "it is feasible"
    return seconds
