import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.opening import stored_spec
from bssearch.commands.run import confirm_study, run_study, with_confirmation
from bssearch.errors import InterruptedRunError, TargetNotReachedError, UsageError
from bssearch.records import (
    Configuration,
    ParameterValue,
    Phase,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search.confirmation import beside, compared_sizes, ending, finalists, next_run, remaining
from bssearch.search.history import History, trial_seed
from bssearch.search.leases import _start, is_alive, living, this_driver
from bssearch.spec import StudySpec
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import answer_of
from tests.benchmarks.settling import Cell, Lab, spec_of
from tests.factories import make_probe, make_spec, make_trial, not_none
from tests.search.law import LawExecutor, interrupt, trials_in, url_in
from tests.waiting import Ear

SIZES = (8, 16, 32, 64, 128)
SPEC = make_spec(confirm={"top": 2, "runs": 3})


def history(trials: list[TrialRecord]) -> History:
    return History(SPEC, trials, {size: make_probe(size) for size in SIZES})


def searched() -> list[TrialRecord]:
    trials = [make_trial(1, configuration=SPEC.default_configuration, seconds=3.0)]
    for size, seconds in [(8, 9.0), (16, 1.0), (16, 1.2), (16, 1.4), (64, 0.5), (64, 0.9), (128, 4.0)]:
        trials.append(make_trial(len(trials) + 1, batch_size=size, seconds=seconds, learning_rate=0.01 * len(trials)))
    return trials


def test_finalists_are_two_of_each_of_the_best_batches_the_default_and_the_largest() -> None:
    chosen = finalists(history(searched()))
    assert Counter(one.batch_size for one in chosen) == {16: 2, 64: 2, 32: 1, 128: 1}
    assert [one.learning_rate for one in chosen if one.batch_size == 16] == [0.02, 0.03]


def test_the_neighbours_of_the_best_are_confirmed_beside_it() -> None:
    times = {8: 2.0, 16: 0.5, 64: 3.0, 128: 4.0}
    trials = [make_trial(1, configuration=SPEC.default_configuration, seconds=3.0)]
    trials += [make_trial(n, batch_size=size, seconds=seconds) for n, (size, seconds) in enumerate(times.items(), 2)]
    first = History(make_spec(confirm={"top": 1, "runs": 3}), trials, {size: make_probe(size) for size in SIZES})
    assert {one.batch_size for one in finalists(first)} == {8, 16, 32, 128}
    assert [one.batch_size for one in beside(first, 8)] == [16]
    assert [one.batch_size for one in beside(first, 7)] == []


def test_a_neighbour_without_a_hit_is_confirmed_with_the_carried_over_best_unless_that_missed() -> None:
    best = SPEC.default_configuration
    sampled = not_none(SPEC.space.encode(best))
    probes = {size: make_probe(size) for size in SIZES}
    trials = [
        make_trial(1, configuration=best, seconds=0.5, sampled=sampled),
        make_trial(2, batch_size=16, seconds=2.0),
    ]
    missed = make_trial(3, batch_size=64, state=TrialState.CAPPED, learning_rate=0.9)
    [below, above] = beside(History(SPEC, [*trials, missed], probes), best.batch_size)
    assert below == trials[1].configuration
    assert above == SPEC.space.decode(64, sampled) and above.learning_rate > best.learning_rate
    stopped = replace(missed, number=4, configuration=above)
    assert beside(History(SPEC, [*trials, stopped], probes), best.batch_size) == [below, above]
    whole = replace(stopped, state=TrialState.EXHAUSTED)
    assert beside(History(SPEC, [*trials, whole], probes), best.batch_size) == [below]


def test_neighbours_of_a_newly_recommended_batch_size_are_confirmed_too() -> None:
    times = {8: 2.0, 16: 0.5, 64: 0.9, 128: 4.0}
    trials = [make_trial(1, configuration=SPEC.default_configuration, seconds=0.8)]
    trials += [make_trial(n, batch_size=size, seconds=seconds) for n, (size, seconds) in enumerate(times.items(), 2)]
    known = History(make_spec(confirm={"top": 1, "runs": 3}), trials, {size: make_probe(size) for size in SIZES})
    chosen = finalists(known)
    assert 64 not in {one.batch_size for one in chosen}
    runs = [
        run
        for n, one in enumerate(chosen)
        for run in made(one, 0.4 if one.batch_size == 32 else 0.45, start=100 * n + 100)
    ]
    assert Counter(run.configuration.batch_size for run in remaining(known, runs)) == {64: 3}
    assert remaining(known, [*runs[:-1], replace(runs[-1], state=TrialState.RUNNING)]) == [], "it may change that"


def test_the_largest_batch_size_without_a_hit_is_confirmed_by_its_nearest_trial() -> None:
    trials = [trial for trial in searched() if trial.configuration.batch_size != 128]
    for number, metric in [(20, 0.5), (21, 0.8), (22, 0.7)]:
        trials.append(
            make_trial(number, batch_size=128, state=TrialState.CAPPED, best_metric=metric, learning_rate=metric)
        )
    assert [one.learning_rate for one in finalists(history(trials)) if one.batch_size == 128] == [0.8]


def test_step_times_are_compared_at_confirmed_sizes_without_a_trial_twice_as_slow_as_the_best() -> None:
    assert compared_sizes(history(searched())) == {16, 64}
    begun = make_trial(20, batch_size=8, seconds=0.6, phase=Phase.CONFIRM)
    untried = [trial for trial in searched() if trial.configuration.batch_size != 8]
    assert compared_sizes(history([*untried, begun])) == {8, 16, 64}


def test_without_a_hit_no_trial_is_confirmed() -> None:
    assert finalists(history([make_trial(1, state=TrialState.EXHAUSTED)])) == []


def test_runs_are_interleaved_seed_by_seed_and_fresh() -> None:
    runs = remaining(history(searched()), [])
    assert len(runs) == 18
    for index in range(3):
        part = runs[6 * index : 6 * index + 6]
        assert len({run.configuration.key for run in part}) == 6
        assert {run.seed for run in part} == {trial_seed(SPEC.seed, Phase.CONFIRM, index)}
    orders = [[run.configuration.key for run in runs[6 * i : 6 * i + 6]] for i in range(3)]
    assert orders[0] != orders[1] or orders[1] != orders[2]


@pytest.mark.parametrize(
    ("states", "left"),
    [
        ([TrialState.REACHED], 17),
        ([TrialState.EXHAUSTED], 17),
        ([TrialState.LOST, TrialState.CANCELLED], 18),
        ([TrialState.FAILED], 18),
        ([TrialState.FAILED, TrialState.FAILED], 17),
    ],
)
def test_lost_and_cancelled_runs_are_repeated_and_failed_ones_once(states: list[TrialState], left: int) -> None:
    known = history(searched())
    first = remaining(known, [])[0]
    done = [
        make_trial(50 + n, configuration=first.configuration, seed=first.seed, state=state, phase=Phase.CONFIRM)
        for n, state in enumerate(states)
    ]
    assert len(remaining(known, done)) == left


def test_a_configuration_whose_confirmation_has_begun_is_confirmed_to_the_end() -> None:
    begun = replace(searched()[-1].configuration, batch_size=128, micro_batch_size=128, learning_rate=0.777)
    first = make_trial(50, configuration=begun, phase=Phase.CONFIRM, seed=trial_seed(SPEC.seed, Phase.CONFIRM, 0))
    assert begun.key not in {one.key for one in finalists(history(searched()))}
    left = [run for run in remaining(history(searched()), [first]) if run.configuration == begun]
    assert [run.seed for run in left] == [trial_seed(SPEC.seed, Phase.CONFIRM, index) for index in (1, 2)]


def test_a_driver_is_alive_while_its_process_is() -> None:
    owner, another = this_driver(), this_driver()
    assert is_alive(owner) is False, "the process lives, but its driver has not begun"
    with living(owner):
        assert is_alive(owner) is True
        assert is_alive(another) is False
    assert is_alive(owner) is False
    host, pid, place, started, mark = owner.rsplit("/", 4)
    assert is_alive(f"{host}/999999999/{place}/{started}/{mark}") is False
    assert is_alive(f"{host}/{pid}/{place}/{int(started) - 100}/{mark}") is False  # the number was given again


@pytest.mark.parametrize(
    "elsewhere",
    [
        "elsewhere/{pid}/{place}/{started}/{mark}",
        "{host}/{pid}/another-boot/{started}/{mark}",
        "{host}/{pid}/{started}/{mark}",
    ],
)
def test_the_state_of_a_driver_elsewhere_is_unknown_whatever_its_host_name(elsewhere: str) -> None:
    names = ("host", "pid", "place", "started", "mark")
    assert is_alive(elsewhere.format(**dict(zip(names, this_driver().rsplit("/", 4), strict=True)))) is None


def test_of_a_stopped_driver_the_lease_decides() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        host, _, place, _, mark = this_driver().rsplit("/", 4)
        owner = f"{host}/{process.pid}/{place}/{_start(process.pid)}/{mark}"
        assert is_alive(owner) is True
        process.send_signal(signal.SIGSTOP)
        assert os.waitpid(process.pid, os.WUNTRACED)[0] == process.pid
        assert is_alive(owner) is None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(owner) is False  # a zombie


# Sequential confirmation: runs beyond the first, while they could change the recommendation.

FACTORS = (0.9, 1.0, 1.12, 1.05, 0.93, 1.08)


# Sampled values of each configuration
VALUES: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "weight_decay": 0.0, "dropout": 0.1}


def at(size: int) -> Configuration:
    return SPEC.space.decode(size, VALUES)


def made(configuration: Configuration, median: float, runs: int = 3, start: int = 100) -> list[TrialRecord]:
    """First confirmation runs of a configuration, with times of `FACTORS` × ``median``."""
    return [
        make_trial(
            start + index,
            configuration=configuration,
            phase=Phase.CONFIRM,
            seed=trial_seed(SPEC.seed, Phase.CONFIRM, index),
            seconds=median * FACTORS[index],
            sampled=VALUES,
        )
        for index in range(runs)
    ]


def left(
    trials: list[TrialRecord], micro_batch_sizes: dict[int, int] | None = None, *, spares: bool = True, **confirm: Any
) -> list[TrialPlan]:
    """Remaining runs after one search trial at each batch size; none is the default."""
    default = {"batch_size": 64, "learning_rate": 0.1, "weight_decay": 0.0, "dropout": 0.0}
    spec = make_spec(confirm={"top": 2, "runs": 3, **confirm}, default=default)
    micro = {trial.configuration.batch_size: trial.configuration.batch_size for trial in trials}
    probes = {
        size: make_probe(size, micro_batch_size=used) for size, used in {**micro, **(micro_batch_sizes or {})}.items()
    }
    searched = [
        make_trial(n, configuration=next(one.configuration for one in trials if one.configuration.batch_size == size))
        for n, size in enumerate(sorted(micro), start=1)
    ]
    return remaining(History(spec, searched, probes), trials, spares=spares)


def running(configuration: Configuration, index: int) -> TrialRecord:
    seed = trial_seed(SPEC.seed, Phase.CONFIRM, index)
    return make_trial(200, configuration=configuration, state=TrialState.RUNNING, phase=Phase.CONFIRM, seed=seed)


def indices(runs: list[TrialPlan]) -> list[tuple[int, int]]:
    """Batch size and seed index of each run."""
    seeds = [trial_seed(SPEC.seed, Phase.CONFIRM, index) for index in range(20)]
    return sorted((run.configuration.batch_size, seeds.index(run.seed)) for run in runs)


def test_close_finalists_get_another_seed_and_slower_ones_do_not() -> None:
    trials = [*made(at(8), 9.0, start=120), *made(at(16), 1.0), *made(at(32), 1.02, start=110)]
    assert left(trials) == []
    assert indices(left(trials, max_runs=6)) in ([(16, 3)], [(32, 3)])


@pytest.mark.parametrize(("seconds", "more"), [(9.0, []), (1.5, [(8, 1), (8, 2)])])
def test_a_beaten_finalist_gets_one_run_and_a_slow_finalist_waits(seconds: float, more: list[tuple[int, int]]) -> None:
    close = [*made(at(16), 1.0), *made(at(32), 1.02, start=110)]
    first = made(at(8), seconds, runs=1, start=120)
    assert indices(left([*close[:5], *first])) == sorted([*more, (32, 2)])
    assert indices(left([*close, *first])) == more
    missed = replace(first[0], state=TrialState.EXHAUSTED)
    assert missed.outcome is not None
    late = replace(missed.outcome, state=TrialState.EXHAUSTED, time_to_target_s=None, last_miss_seconds=seconds)
    assert indices(left([*close, replace(missed, outcome=late)])) == more


def test_slow_finalists_run_side_by_side_but_not_beside_a_fast_finalist() -> None:
    slow = [*made(at(8), 9.0, runs=1, start=120), *made(at(32), 8.0, runs=1, start=110)]
    assert indices(left([*made(at(16), 1.0, runs=2), *slow, running(at(8), 1)], runs=2)) == [(32, 1)]
    assert left([*made(at(16), 1.0, runs=1), *slow, running(at(16), 1)], runs=2) == []


def test_a_command_may_ask_for_runs_of_beaten_finalists_and_of_plain_misses() -> None:
    trials = [*made(at(16), 1.0, runs=6), *made(at(32), 9.0, runs=1, start=110)]
    assert left([*trials, *missed(at(8), 5)], runs=6) == []
    assert indices(left([*trials, *missed(at(8), 5)], runs=6, spares=False)) == [(8, 5)]
    assert indices(left([*trials, *missed(at(8), 6)], runs=6, spares=False)) == [(32, index) for index in range(1, 6)]


def test_the_finalist_with_the_fewest_runs_goes_first_up_to_the_maximum() -> None:
    trials = [*made(at(16), 1.0, runs=5), *made(at(32), 1.0, runs=4, start=110)]
    assert indices(left(trials, max_runs=6)) == [(32, 4)]
    assert indices(left(trials, max_runs=5)) == [(32, 4)]


def test_a_free_slot_runs_another_size_unless_the_runs_that_ended_are_enough() -> None:
    fourth = running(at(32), 3)
    trials = [*made(at(16), 1.0, runs=4), *made(at(32), 1.02, start=110)]
    assert indices(left([*trials, fourth], max_runs=6)) == [(16, 4)]
    assert left([*[*made(at(16), 1.0, runs=4), *made(at(32), 2.0, start=110)], fourth], max_runs=6) == []
    assert [run.retry_of for run in left([*trials, replace(fourth, state=TrialState.LOST)], max_runs=6)] == [200]


def test_a_failed_further_run_is_made_once_more_and_then_passed_over() -> None:
    trials = [*made(at(16), 1.0, runs=5), *made(at(32), 1.02, start=110)]
    seed = trial_seed(SPEC.seed, Phase.CONFIRM, 3)
    failed = [
        make_trial(200 + n, configuration=at(32), state=TrialState.FAILED, phase=Phase.CONFIRM, seed=seed)
        for n in range(2)
    ]
    assert indices(left([*trials, failed[0]], max_runs=6)) == [(32, 3)]
    assert indices(left([*trials, *failed], max_runs=6)) == [(32, 4)]


def test_the_first_runs_are_always_made_and_later_runs_only_within_the_train_seconds() -> None:
    trials = [*made(at(16), 1.0), *made(at(32), 1.02, start=110)]
    spent = sum(trial.outcome.train_seconds for trial in trials if trial.outcome)
    assert left(trials, max_runs=6, train_seconds=spent) == []
    assert len(left(trials, max_runs=6, train_seconds=spent + 0.1)) == 1
    assert indices(left(trials[:-1], max_runs=6, train_seconds=0.1)) == [(32, 2)]


def test_after_out_of_memory_runs_in_larger_micro_batches_do_not_count() -> None:
    trials = [*made(at(16), 1.0), *made(at(32), 1.02, start=110)]
    assert indices(left(trials, {32: 16}, max_runs=6)) == [(32, 0), (32, 1), (32, 2)]
    faster = [*made(at(16), 1.0), *made(at(32), 0.4, start=110)]
    assert len(left([*faster, *made(at(32).in_micro_batches(16), 1.02, start=120)], {32: 16}, max_runs=6)) == 1


@pytest.mark.parametrize(("cell", "index"), [(Cell(noise=0.26, step_error=0.3), 3), (Cell(noise=0.05), 2)])
def test_confirmation_proposes_no_runs_that_could_not_settle_the_answer(cell: Cell, index: int) -> None:
    """Step-time errors of 30 % keep the first case open; the second is final."""
    lab = Lab(cell, np.random.default_rng((11, index)), index)
    made_up = History(spec_of(3, 8), lab.search(), lab.probes())
    while (plan := next_run(made_up)) is not None:
        trial = lab.run(len(made_up.all_trials) + 1, plan.configuration, plan.seed, Phase.CONFIRM)
        made_up.take(replace(trial, sampled=plan.sampled))
    said, answer = not_none(ending(made_up)), answer_of(made_up.spec, made_up.all_trials, made_up.probes)
    assert f"probability of {math.floor(100 * not_none(answer.within_5_percent))} %" in said
    assert remaining(made_up, made_up.of_phase(Phase.CONFIRM)) == []
    assert answer.provisional == said.startswith("provisional")
    if answer.provisional:
        assert "more runs would hardly help" in said
        assert answer.would_settle in {"step_times", "tuning"}
        assert answer.runs_to_settle is None
    assert not [step for step in answer.next if "study confirm" in step.command]


# With a driver, and runs that differ by their seeds.


def noisy_law(noise: float = 0.2, **changes: Any) -> LawExecutor:
    def ends(request: TrialRequest, outcome: TrialOutcome) -> TrialOutcome:
        if outcome.time_to_target_s is None or outcome.steps_to_target is None:
            return outcome
        factor = random.Random(f"{request.plan.seed}/{request.plan.configuration.batch_size}").lognormvariate(0, noise)
        steps = round(outcome.steps_to_target * factor)
        return replace(outcome, time_to_target_s=outcome.time_to_target_s * factor, steps_to_target=steps)

    return LawExecutor(ended_as=ends, **changes)


def noisy_study(folder: Path, **confirm: Any) -> StudySpec:
    """Store a study with three confirmation runs each."""
    spec = make_spec(budget={"trials": 16, "trial_train_seconds": 100.0}, confirm={"top": 3, "runs": 3, **confirm})
    run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: noisy_law()))
    return spec


@pytest.fixture(scope="module")
def stored_search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Search once for all tests that continue the confirmation."""
    folder = tmp_path_factory.mktemp("searched")
    noisy_study(folder)
    return folder / "study.db"


@pytest.fixture
def begun(stored_search: Path, tmp_path: Path) -> Path:
    """Folder with a copy of the study, with three confirmation runs each."""
    shutil.copy(stored_search, tmp_path / "study.db")
    return tmp_path


def confirmation(folder: Path) -> list[TrialRecord]:
    return trials_in(folder, Phase.CONFIRM)


def go_on(folder: Path, executor: LawExecutor, *, spares: bool = True, **settings: Any) -> tuple[Any, list[str]]:
    """Continue the confirmation with the stored spec; return the answer and messages."""
    ear = Ear()
    spec = with_confirmation(stored_spec("toy", Launch(db=url_in(folder)))[0], **settings)
    launch = Launch(db=url_in(folder), listener=ear, make_executor=lambda *_: executor)
    return confirm_study(spec, launch, spares=spares), ear.notes


def test_confirmation_goes_on_until_it_is_settled_and_says_so(begun: Path) -> None:
    before = confirmation(begun)
    answer, notes = go_on(begun, noisy_law(), max_runs=60)
    after = confirmation(begun)
    assert len(after) > len(before)
    assert answer.settle is not None
    assert (answer.settle.settled, answer.settle.undecided) == (True, [])
    assert notes[-1].startswith(f"final after {len(after)} confirmation runs: batch {answer.optimal.batch_size}")
    assert min(Counter(trial.configuration.key for trial in after).values()) == 1  # the slowest had no more
    with open_store(url_in(begun), write=False) as store:
        assert StudySpec.model_validate(store.studies.get("toy").spec).confirm.max_runs == 60
    assert go_on(begun, noisy_law())[1][-1] == notes[-1]
    assert len(confirmation(begun)) == len(after)


def test_a_spent_budget_names_the_open_question(begun: Path) -> None:
    answer, notes = go_on(begun, noisy_law(0.5), max_runs=4)
    assert answer.settle is not None
    assert not answer.settle.settled
    assert answer.settle.undecided
    assert notes[-1].startswith("provisional after confirm.max_runs = 4 per finalist: ")
    assert max(Counter(trial.configuration.key for trial in confirmation(begun)).values()) == 4
    count = len(confirmation(begun))
    _, notes = go_on(begun, noisy_law(), max_runs=9, train_seconds=1.0)
    assert notes[-1].startswith("provisional after confirm.train_seconds = 1: ")
    assert len(confirmation(begun)) == count


def test_more_runs_are_made_and_stored(begun: Path) -> None:
    go_on(begun, noisy_law(), runs=5)
    made = Counter(trial.configuration.key for trial in confirmation(begun))
    assert sorted(made.values()) == [1, *[5] * (len(made) - 1)]  # one is beaten
    go_on(begun, noisy_law(), spares=False)
    assert Counter(trial.configuration.key for trial in confirmation(begun)) == dict.fromkeys(made, 5)
    with pytest.raises(UsageError, match=r"--runs 4 must be >= confirm.runs = 5 of the stored study 'toy'"):
        go_on(begun, noisy_law(), runs=4)


def test_an_interrupted_confirmation_goes_on_where_it_stopped(begun: Path) -> None:
    whole = begun / "whole"
    whole.mkdir()
    shutil.copy(begun / "study.db", whole)
    noisy = noisy_law(0.5)
    stopped = noisy_law(0.5, on_look=lambda law: sum(one.plan.is_tested for one in law.requests) > 2 and interrupt())
    go_on(whole, noisy, max_runs=6)
    with pytest.raises(InterruptedRunError, match="all ended trials are stored"):
        go_on(begun, stopped, max_runs=6)
    assert Counter(trial.state for trial in confirmation(begun))[TrialState.CANCELLED] == 1
    go_on(begun, noisy)  # the settings are those that were stored
    counted = [
        sorted((one.configuration.key, one.seed) for one in confirmation(place) if not one.state.is_missing)
        for place in (begun, whole)
    ]
    assert counted[0] == counted[1]
    cancelled = next(one for one in confirmation(begun) if one.state is TrialState.CANCELLED)
    assert [one.seed for one in confirmation(begun) if one.retry_of == cancelled.number] == [cancelled.seed]


def test_confirming_alone_starts_no_search_trial_even_within_the_budget(begun: Path) -> None:
    with open_store(url_in(begun)) as store:
        spec = dict(store.studies.get("toy").spec)
        searched = len(store.trials.of("toy", phase=Phase.SEARCH))
        store.studies.update_spec("toy", {**spec, "budget": {**spec["budget"], "trials": 99}})  # type: ignore[dict-item]
    go_on(begun, noisy_law(), runs=4)
    assert len(trials_in(begun, Phase.SEARCH)) == searched


def test_the_confirmation_that_a_command_asks_for() -> None:
    assert with_confirmation(make_spec(confirm={"runs": 0})).confirm.runs == 3
    assert with_confirmation(make_spec(confirm={"runs": 0}), runs=2).confirm.runs == 2
    more = with_confirmation(make_spec(confirm={"runs": 3, "max_runs": 9}), runs=10).confirm
    assert (more.runs, more.max_runs) == (10, 10), "an earlier limit does not forbid it"
    with pytest.raises(UsageError, match=r"confirm: max_runs = 2 must be >= runs = 3"):
        with_confirmation(make_spec(), max_runs=2)
    with pytest.raises(UsageError, match=r"confirm.train_seconds = -1.0: must be > 0"):
        with_confirmation(make_spec(), max_runs=4, train_seconds=-1.0)


# What plainly misses the target.


def missed(configuration: Configuration, runs: int, start: int = 200) -> list[TrialRecord]:
    """First confirmation runs of a configuration, all without a hit."""
    return [
        make_trial(
            start + index,
            configuration=configuration,
            phase=Phase.CONFIRM,
            seed=trial_seed(SPEC.seed, Phase.CONFIRM, index),
            state=TrialState.EXHAUSTED,
            best_metric=0.8,
        )
        for index in range(runs)
    ]


def test_a_finalist_that_clearly_misses_gets_no_more_runs() -> None:
    trials = [*made(at(16), 1.0, runs=5), *missed(at(32), 4)]
    assert Counter(run.configuration.batch_size for run in left(trials, runs=9)) == {16: 4, 32: 5}
    assert Counter(run.configuration.batch_size for run in left([*trials, *missed(at(32), 5)], runs=9)) == {16: 4}


def lucky_once(law: LawExecutor) -> None:
    law.reachable = bool(law.running) and not law.running[0].plan.is_tested


def test_a_confirmation_ends_with_a_notice_when_every_finalist_clearly_misses(tmp_path: Path) -> None:
    ear = Ear()
    spec = make_spec(budget={"trials": 12, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 9})
    db = url_in(tmp_path)
    with suppress(TargetNotReachedError):  # A hit of the search that is no finalist is an answer, unconfirmed.
        run_study(spec, Launch(db=db, listener=ear, make_executor=lambda *_: LawExecutor(on_look=lucky_once)))
    runs = Counter(trial.configuration.key for trial in confirmation(tmp_path))
    assert set(runs.values()) == {5}
    assert len([note for note in ear.notes if "no more confirmation runs" in note]) == len(runs)
    assert [note for note in ear.notes if note.startswith("the confirmation has ended")]


def test_the_default_s_miss_is_told_when_its_run_ends(tmp_path: Path) -> None:
    ear = Ear()
    default = {"batch_size": 32, "learning_rate": 0.9, "weight_decay": 0.0, "dropout": 0.1}
    spec = make_spec(default=default, budget={"trials": 20, "trial_train_seconds": 3.0}, confirm={"top": 1, "runs": 3})
    answer = run_study(spec, Launch(db=url_in(tmp_path), listener=ear, make_executor=lambda *_: LawExecutor()))
    told = [note for note in ear.notes if note.startswith("the default configuration (batch 32) missed")]
    assert len(told) == 4, "its search trial and its three confirmation runs"
    assert "in trial 1 with" in told[0]
    assert ["--suggest-target" in note for note in told] == [True, False, False, False], "until a trial reaches it"
    assert "default_missed" in {notice.code for notice in answer.warnings}


def test_without_confirmation_runs_there_is_no_ending() -> None:
    assert ending(history(searched())) is None


def test_seeds_differ_by_study_phase_and_index_and_use_all_of_31_bits() -> None:
    seeds = {trial_seed(study, phase, index) for study in (0, 1) for phase in Phase for index in range(1000)}
    assert len(seeds) == 2 * len(Phase) * 1000
    assert 2**30 < max(seeds) < 2**31
    assert trial_seed(0, Phase.SEARCH, 0) == trial_seed(0, Phase.SEARCH, 0)
