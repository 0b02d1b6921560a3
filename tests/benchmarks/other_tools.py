"""Other tools answer bssearch's question: which configuration reaches the target soonest?

Run as ``python tests/benchmarks/other_tools.py [STUDY]`` (default: fashion_mnist_cpu), with Ray and Lightning. bssearch
runs the study with its confirmation; ``--trials`` and ``--confirm-top`` (with three runs of each finalist) shorten it.
Then Optuna (TPE, a median pruner) and Ray Tune (ASHA) get the train seconds, without waits for a CPU, of all trials of
this study. Space, target, cadence of evaluation, limit of a trial and first trial (the default) are the same; both
tools end a trial that is slower than their fastest. Lightning's Tuner finds the largest batch size, within the space.
Each answer (bssearch's recommendation, a tool's fastest trial, or Lightning's size with the default's other values by
the rule) is trained with ``--seeds`` fresh seeds, in turns. W&B sweeps are not run, because they need a server, even
with WANDB_MODE=offline.
"""

if not __package__:
    __import__("from_clone")

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from bssearch import Launch, open_store, run_study
from bssearch.commands.opening import described
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Observation, ProbeRecord, TrialEnded, TrialOutcome, TrialState, TrialStop
from bssearch.search.calibration import measure_step_time_at
from bssearch.spec import StudySpec, find_spec, load_spec
from bssearch.spec.space import UNKNOWN
from tests.benchmarks.harness import script, turned
from tests.evidence.peers import run_to_target
from tests.factories import make_request, not_none

FRESH = 1_000_000
"""First seed of the runs that judge an answer: no search draws it."""

BUCKET_S = 0.1
"""Train seconds between reports to a tool: Optuna's median pruner compares trials at equal whole steps."""

BATCH = "batch_size"


@dataclass
class Question:
    """The question for every tool, and its train seconds."""

    spec: StudySpec
    probes: Mapping[int, ProbeRecord]
    budget_s: float

    def configuration(self, values: Mapping[str, Any]) -> Configuration:
        """Return the configuration of a batch size and the space's coordinates."""
        return self.spec.space.decode(values[BATCH], {name: one for name, one in values.items() if name != BATCH})

    def default(self) -> dict[str, Any]:
        """Return the default's batch size and coordinates."""
        default = self.spec.default_configuration
        encoded = self.spec.space.encode(default)
        assert encoded is not None, "the default lies in its space"
        return {BATCH: default.batch_size, **encoded}


class Training:
    """A trial of an executor, one evaluation at a time."""

    def __init__(self, question: Question, executor: Executor, configuration: Configuration, number: int) -> None:
        probe = question.probes[configuration.batch_size]
        self.executor, self.number = executor, number
        self.outcome: TrialOutcome | None = None
        self.train_seconds = 0.0  # without waits for a CPU
        self._seen: list[Observation] = []
        executor.submit(
            make_request(
                number=number,
                configuration=configuration.in_micro_batches(probe.micro_batch_size),
                seed=number,
                target=question.spec.record_target,
                train_seconds_limit=question.spec.budget.trial_train_seconds,
                limit_state=TrialState.EXHAUSTED,
                eval_every_steps=probe.eval_every_steps,
                threads=question.spec.executor.threads,
            )
        )

    def next(self) -> Observation | None:
        """Wait for the next evaluation; None if the trial has ended."""
        while not self._seen and self.outcome is None:
            for event in self.executor.events(timeout=0.05):
                if isinstance(event, TrialEnded):
                    self.outcome = event.outcome
                else:
                    self._seen.append(event.observation)
                    self.train_seconds = event.observation.train_seconds
        return self._seen.pop(0) if self._seen else None

    def prune(self) -> None:
        """Stop the trial and wait for its end."""
        self.executor.stop(TrialStop(self.number, TrialState.PRUNED, "pruned by the tool"))
        while self.outcome is None:
            self.next()


@dataclass
class Search:
    """Trials of a tool: number, train seconds, and the fastest."""

    tool: str
    trials: int = 0
    spent_s: float = 0.0
    fastest_s: float = math.inf
    answer: Configuration | None = None
    wall_s: float = 0.0
    fresh: list[float] = field(default_factory=list)

    def ended(self, configuration: Configuration, train_seconds: float, reached_s: float | None) -> None:
        self.trials += 1
        self.spent_s += train_seconds
        if reached_s is not None and reached_s < self.fastest_s:
            self.fastest_s, self.answer = reached_s, configuration


def ask_optuna(question: Question, executor: Executor, search: Search) -> None:
    """Minimise the seconds to the target by Optuna's TPE and median pruner."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, target = question.spec.space, question.spec.record_target

    def suggested(trial: optuna.Trial) -> dict[str, Any]:
        values: dict[str, Any] = {BATCH: trial.suggest_categorical(BATCH, space.rungs)}
        for one in space.dimensions():
            if one.choices:
                values[one.name] = trial.suggest_categorical(one.name, one.choices)
            else:
                values[one.name] = trial.suggest_float(one.name, one.low, one.high, log=one.log)
        return values

    def objective(trial: optuna.Trial) -> float:
        configuration = question.configuration(suggested(trial))
        training = Training(question, executor, configuration, search.trials + 1)
        is_pruned, told = False, -1
        while not is_pruned and (seen := training.next()) is not None:
            if (bucket := int(seen.train_seconds / BUCKET_S)) > told:
                trial.report(target.shortfall(seen.metric), bucket)
                told = bucket
            is_pruned = trial.should_prune() or seen.train_seconds > search.fastest_s
        if is_pruned:
            training.prune()
        outcome = not_none(training.outcome)
        reached = outcome.time_to_target_s if outcome.state is TrialState.REACHED else None
        search.ended(configuration, training.train_seconds, reached)
        if search.spent_s >= question.budget_s:
            trial.study.stop()
        if reached is None and is_pruned:
            raise optuna.TrialPruned
        return reached if reached is not None else 2 * question.spec.budget.trial_train_seconds

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner())
    study.enqueue_trial(question.default())
    study.optimize(objective)


def ask_ray(question: Question, executor: Executor, search: Search) -> None:
    """Minimise the seconds to the target by Ray Tune's random search and ASHA, one trial at a time."""
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = "1"  # more would be prepared, and listed without a result
    import ray
    from ray import tune

    space, target, limit_s = question.spec.space, question.spec.record_target, question.spec.budget.trial_train_seconds

    class Trainable(tune.Trainable):  # type: ignore[misc] # Ray's classes have no types
        def setup(self, config: dict[str, Any]) -> None:
            self.stack, self.trials = ExitStack(), 0
            self.training: Training | None = None
            self.executor, _ = self.stack.enter_context(described(in_process(question.spec), Launch()))
            self.reset_config(config)

        def reset_config(self, config: dict[str, Any]) -> bool:
            if self.training is not None:
                self.training.prune()
            self.trials += 1
            self.training = Training(question, self.executor, question.configuration(config), self.trials)
            self.last = {"shortfall": math.inf, "train_seconds": 0.0}
            return True

        def step(self) -> dict[str, Any]:
            training = self.training
            assert training is not None, "Ray sets a trainable up first"
            told = self.last["train_seconds"] + BUCKET_S
            while (seen := training.next()) is not None:
                self.last = {"shortfall": target.shortfall(seen.metric), "train_seconds": seen.train_seconds}
                if seen.train_seconds >= told:
                    return {**self.last, "reached_s": None}
            outcome = not_none(training.outcome)
            reached = outcome.time_to_target_s if outcome.state is TrialState.REACHED else None
            return {**self.last, "train_seconds": training.train_seconds, "reached_s": reached, "done": True}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Save no file: Ray asks before it gives the actor to another trial."""

        def cleanup(self) -> None:
            self.stack.close()

    class Ends(tune.Stopper):  # type: ignore[misc]
        spent: dict[str, float] = {}  # noqa: RUF012 # train seconds by trial

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            self.spent[trial_id] = result["train_seconds"]
            if result["reached_s"] is not None:
                search.fastest_s = min(search.fastest_s, result["reached_s"])
            return bool(result["train_seconds"] > search.fastest_s)

        def stop_all(self) -> bool:
            return sum(self.spent.values()) >= question.budget_s

    domains: dict[str, Any] = {BATCH: tune.choice(space.rungs)}
    for one in space.dimensions():
        ranges = tune.loguniform if one.log else tune.uniform
        domains[one.name] = tune.choice(one.choices) if one.choices else ranges(one.low, one.high)
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        found = tune.Tuner(
            Trainable,
            param_space=domains,
            tune_config=tune.TuneConfig(
                metric="shortfall",
                mode="min",
                num_samples=10_000,
                reuse_actors=True,
                scheduler=tune.schedulers.ASHAScheduler(
                    time_attr="train_seconds", max_t=limit_s, grace_period=limit_s / 4**3
                ),
                search_alg=tune.search.basic_variant.BasicVariantGenerator(
                    points_to_evaluate=[question.default()], max_concurrent=1, random_state=0
                ),
            ),
            run_config=tune.RunConfig(stop=Ends(), storage_path=folder, verbose=0),
        ).fit()
        search.fastest_s = math.inf
        for one in found:
            last = one.metrics or {}
            if "train_seconds" in last:
                search.ended(question.configuration(one.config), last["train_seconds"], last["reached_s"])
        ray.shutdown()


def ask_lightning(question: Question, executor: Executor, search: Search) -> None:
    """Take the largest batch size of the space that Lightning's Tuner finds; other values are the default's by rule."""
    import torch

    from bssearch.training.batches import place
    from bssearch.training.computation import Computation
    from bssearch.workloads.base import resolve
    from tests.evidence.finders import Memory, lightning_finds

    spec, device = question.spec, torch.device("cpu")
    torch.set_num_threads(spec.executor.threads)
    workload = resolve(spec.workload, spec.workload_settings, Path())
    computation = Computation(device, spec.training.model_copy(update={"measure_noise": False}))
    data, _ = place(workload.load(device), computation)
    with tempfile.TemporaryDirectory() as folder:
        found = lightning_finds(Memory(workload, data, computation, spec.default_configuration), Path(folder), "power")
    size = max(one for one in spec.space.rungs if one <= found)
    search.answer = question.configuration({**question.default(), BATCH: size})


TOOLS: dict[str, Callable[[Question, Executor, Search], None]] = {
    "Optuna, TPE and median pruner": ask_optuna,
    "Ray Tune, ASHA": ask_ray,
    "Lightning's Tuner": ask_lightning,
}

LONGER = 4
"""Longest run with a fresh seed over the limit of a trial: the largest batch size takes long."""


def in_process(spec: StudySpec) -> StudySpec:
    """Return the spec with trials in the process that asks for them."""
    return spec.model_copy(update={"executor": spec.executor.model_copy(update={"name": "inline"})})


def own_search(spec: StudySpec, db: str) -> Search:
    """Run bssearch's study; the answer is its recommendation."""
    search, began = Search("bssearch"), time.monotonic()
    answer = run_study(spec, Launch(db=db))
    search.wall_s = time.monotonic() - began
    with open_store(db, write=False) as store:
        trials = store.trials.of(spec.name)
        curves = store.trials.curves(spec.name, [trial.number for trial in trials]).values()
    search.trials = len(trials)
    search.spent_s = sum(curve[-1].train_seconds for curve in curves if curve)
    recommended = answer.optimal.trial_numbers[0]
    search.answer = next(one.configuration.in_micro_batches(1) for one in trials if one.number == recommended)
    return search


def main(
    study: Annotated[str, typer.Argument()] = "fashion_mnist_cpu",
    trials: int | None = None,
    confirm_top: int | None = None,
    seeds: int = 10,
    tool: Annotated[list[str] | None, typer.Option(help="only this tool; may be repeated")] = None,
) -> None:
    """Ask all tools, judge their answers with fresh seeds, and print the results."""
    given = load_spec(find_spec(study))
    budget = given.budget.model_copy(update={"trials": trials or given.budget.trials})
    shorter = {} if confirm_top is None else {"top": confirm_top, "runs": 3, "max_runs": None}
    confirm = given.confirm.model_copy(update=shorter)
    spec = given.model_copy(update={"budget": budget, "confirm": confirm})
    with tempfile.TemporaryDirectory() as folder:
        db = f"sqlite:///{Path(folder) / 'study.db'}"
        searches = [own_search(spec, db)]
        with open_store(db, write=False) as store:
            environment = not_none(store.studies.get(spec.name).environment)
            probes = dict(store.probes.by_batch_size(spec.name, environment))
    with described(spec, Launch()) as (executor, _):
        for size in spec.space.rungs:
            probe = probes.get(size) or measure_step_time_at(spec, executor, size, UNKNOWN)
            assert probe is not None, "every batch size of the study fits"
            probes[size] = probe
        question = Question(spec, probes, searches[0].spent_s)
        for name in tool or TOOLS:
            search, began = Search(name), time.monotonic()
            TOOLS[name](question, executor, search)
            search.wall_s = time.monotonic() - began
            searches.append(search)
            print(f"{name}: {search.answer}", flush=True)
        answered = {one.tool: one for one in searches if one.answer is not None}
        for seed in range(seeds):
            for name in turned(list(answered), seed):
                one = answered[name]
                assert one.answer is not None
                probe, cap = probes[one.answer.batch_size], LONGER * spec.budget.trial_train_seconds
                outcome = run_to_target(spec, executor, one.answer, probe, FRESH + seed, cap)
                one.fresh.append(outcome.time_to_target_s or math.inf)
    print(f"{spec.name}: {question.budget_s:.3g} train seconds for each tool, {seeds} fresh seeds for each answer\n")
    print(f"{'tool':<30} {'trials':>6} {'train s':>8} {'wall s':>7} {'batch':>6}   seconds to the target")
    ours = statistics.median(searches[0].fresh)
    for one in searches:
        batch = "none" if one.answer is None else one.answer.batch_size
        median = statistics.median(one.fresh) if one.fresh else math.inf
        spread = f" [{min(one.fresh):.3g}, {max(one.fresh):.3g}]" if one.fresh else ""
        told = f"{median:.3g}{spread}, {median / ours:.2f} × ours"
        print(f"{one.tool:<30} {one.trials:>6} {one.spent_s:>8.1f} {one.wall_s:>7.0f} {batch:>6}   {told}")
    print("W&B sweeps: need a server, even with WANDB_MODE=offline; not run")


if __name__ == "__main__":
    script(main, __doc__)
