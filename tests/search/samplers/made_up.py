"""A simulated study without a store; a law decides its trials' outcomes."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from bssearch.records import Configuration, Phase, ProbeRecord, TrialPlan, TrialRecord, TrialState
from bssearch.search.engine import Planner
from bssearch.search.history import History
from bssearch.search.pruners.base import PruningController
from bssearch.search.samplers.base import Choice, Sampler, default_choice, make_sampler
from bssearch.spec import StudySpec
from tests.factories import make_probe, make_spec, make_trial, not_none
from tests.search.law import step_seconds, steps_needed

TARGET = 0.9
RAN_HALF = frozenset(state for state in TrialState if state.is_censored) | {TrialState.DIVERGED, TrialState.RUNNING}
EVALUATIONS = 10
WITH_STARTUP_TRIALS = ("auto", "tpe", "gp")

SecondsOf = Callable[[Configuration], float]


def law_seconds(configuration: Configuration) -> float:
    return steps_needed(configuration) * step_seconds(configuration.batch_size)


def step_seconds_near_64(batch_size: int) -> float:
    return 0.001 * (1 + batch_size / 32)


def seconds_near_64(configuration: Configuration) -> float:
    """Seconds to the target, smallest near batch 64 and learning rate 0.2."""
    size = configuration.batch_size
    steps = 100 * (1 + 128 / size) * math.exp(0.3 * math.log(configuration.learning_rate / 0.2) ** 2)
    return step_seconds_near_64(size) * steps


def study_spec(sampler: str = "auto", options: Mapping[str, Any] | None = None, **changes: Any) -> StudySpec:
    """A spec that only its budget of 1000 trials ends."""
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.0}
    usual = {"startup_trials": 4} if sampler in WITH_STARTUP_TRIALS else {}
    settings = {"name": sampler, "options": usual if options is None else options}
    return make_spec(**{"sampler": settings, "pruner": {"name": "balanced"}, "budget": budget, **changes})


class MadeUpStudy:
    """Trials with one history, sampler and planner."""

    def __init__(
        self,
        spec: StudySpec,
        seconds_of: SecondsOf = law_seconds,
        *,
        step_time: Callable[[int], float] = step_seconds,
        trials: Sequence[TrialRecord] = (),
        evaluations: Mapping[int, Sequence[tuple[float, float]]] | None = None,
        probes: Mapping[int, ProbeRecord] | None = None,
        now: float = 0.0,
    ) -> None:
        self.spec = spec
        self.seconds_of = seconds_of
        self.trials: list[TrialRecord] = []
        self.evaluations: dict[int, list[tuple[float, float]]] = defaultdict(list)
        timed = {size: make_probe(size, step_seconds=step_time(size)) for size in spec.batch_sizes}
        self.history = History(spec, (), timed if probes is None else probes, now=now)
        self.pruning = PruningController(spec, self.history)
        self.sampler: Sampler = make_sampler(spec)
        self.planner = Planner(spec, self.history, self.pruning, self.sampler)
        for trial in trials:
            self.keep(trial, (evaluations or {}).get(trial.number, ()))

    def restarted(self) -> Self:
        """The same study with a new history, sampler and planner."""
        old = self.history
        return type(self)(
            self.spec,
            self.seconds_of,
            trials=self.trials,
            evaluations=self.evaluations,
            probes=old.probes,
            now=old.now,
        )

    def keep(self, trial: TrialRecord, evaluations: Sequence[tuple[float, float]] = ()) -> TrialRecord:
        """Store a new or changed trial with its new evaluations."""
        if trial.number > len(self.trials):
            self.trials.append(trial)
        else:
            self.trials[trial.number - 1] = trial
        self.evaluations[trial.number] += evaluations
        self.history.observe(trial.number, self.evaluations[trial.number])
        self.history.take(trial)
        self.pruning.take(trial)
        return trial

    def choose(self, batch_size: int | None = None) -> Choice | None:
        """The default first, then the sampler's choice."""
        if batch_size is None and not self.history.tried(self.spec.default_configuration):
            return default_choice(self.spec)
        return self.sampler.choose(self.history, batch_size)

    def run(self, choice: Choice, state: TrialState = TrialState.REACHED, seconds: float | None = None) -> TrialRecord:
        """Run a trial of a choice; see `end`."""
        trial = make_trial(
            len(self.trials) + 1,
            state=TrialState.QUEUED if state is TrialState.QUEUED else TrialState.RUNNING,
            configuration=choice.configuration,
            sampled=choice.sampled,
            uncapped=choice.uncapped,
        )
        self.keep(replace(trial, expected_improvement=choice.expected_improvement))
        return trial if state is TrialState.QUEUED else self.end(trial.number, state, seconds)

    def run_plan(self, plan: TrialPlan, state: TrialState = TrialState.REACHED) -> TrialRecord:
        """Run the trial of a plan; see `end`."""
        if plan.known_number is not None:
            known = self.trials[plan.known_number - 1]
            self.keep(replace(known, state=TrialState.RUNNING, ended_at=None, outcome=None))
            return self.end(known.number, state)
        trial = make_trial(
            len(self.trials) + 1,
            state=TrialState.RUNNING,
            configuration=plan.configuration,
            sampled=plan.sampled,
            uncapped=plan.uncapped,
            retry_of=plan.retry_of,
            seed=plan.seed,
        )
        trial = replace(
            trial, train_seconds_limit=plan.train_seconds_limit, expected_improvement=plan.expected_improvement
        )
        self.keep(trial)
        return self.end(trial.number, state)

    def end(
        self, number: int, state: TrialState = TrialState.REACHED, seconds: float | None = None, **outcome: Any
    ) -> TrialRecord:
        """End or continue a running trial, on an even curve to the target, half-way unless reached.

        ``seconds``: time to the target, by default the law's.
        """
        trial = self.trials[number - 1]
        whole = self.seconds_of(trial.configuration) if seconds is None else seconds
        end = whole if state is TrialState.REACHED else whole / 2
        points = [
            (end * part / EVALUATIONS, TARGET * end / whole * part / EVALUATIONS) for part in range(EVALUATIONS + 1)
        ]
        seen = points if state is TrialState.REACHED or state in RAN_HALF else []
        known = self.evaluations[number]
        new = [one for one in seen if one[1] < TARGET and (not known or one[0] > known[-1][0])]
        ended = make_trial(
            number,
            state=state,
            seconds=end,
            configuration=trial.configuration,
            best_metric=TARGET * end / whole,
            **outcome,
        )
        return self.keep(
            replace(trial, state=state, ended_at=ended.ended_at, outcome=ended.outcome, phase=Phase.SEARCH), new
        )

    def step(self, state: TrialState = TrialState.REACHED) -> Choice:
        """Run the next choice."""
        choice = not_none(self.choose())
        self.run(choice, state)
        return choice
