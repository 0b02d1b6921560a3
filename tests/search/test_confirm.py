from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

from bssearch.probes.cadence import eval_every_steps, probe_record
from bssearch.records import Phase, StepTime, TrialRecord, TrialState
from bssearch.search.confirm import finalists, remaining
from bssearch.search.history import History
from bssearch.search.owner import _start, is_alive, this_driver
from bssearch.search.planner import busy_seconds
from bssearch.search.seeds import trial_seed
from tests.factories import make_probe, make_spec, make_trial

SIZES = (8, 16, 32, 64, 128)
SPEC = make_spec(confirm={"top": 2, "runs": 3})


def history(trials: list[TrialRecord]) -> History:
    return History(SPEC, trials, {size: make_probe(size) for size in SIZES})


def searched() -> list[TrialRecord]:
    default = make_trial(1, configuration=SPEC.default_configuration, seconds=3.0)
    trials = [default]
    for size, seconds in [(8, 9.0), (16, 1.0), (16, 1.2), (16, 1.4), (64, 0.5), (64, 0.9), (128, 4.0)]:
        trials.append(make_trial(len(trials) + 1, batch_size=size, seconds=seconds, learning_rate=0.01 * len(trials)))
    return trials


def test_finalists_are_two_of_each_of_the_best_batches_the_default_and_the_largest() -> None:
    chosen = finalists(history(searched()))
    assert Counter(one.batch_size for one in chosen) == {16: 2, 64: 2, 32: 1, 128: 1}
    assert [one.learning_rate for one in chosen if one.batch_size == 16] == [0.02, 0.03]


def test_the_largest_is_confirmed_where_it_never_reached_by_what_came_nearest() -> None:
    trials = [trial for trial in searched() if trial.configuration.batch_size != 128]
    for number, metric in [(20, 0.5), (21, 0.8), (22, 0.7)]:
        trials.append(
            make_trial(number, batch_size=128, state=TrialState.CAPPED, best_metric=metric, learning_rate=metric)
        )
    assert [one.learning_rate for one in finalists(history(trials)) if one.batch_size == 128] == [0.8]


def test_nothing_is_confirmed_where_nothing_reached_the_target() -> None:
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


def test_what_is_confirmed_is_not_repeated_what_was_lost_is_and_failures_once() -> None:
    base = searched()
    first = remaining(history(base), [])[0]

    def after(*states: TrialState) -> int:
        done = [
            make_trial(50 + n, configuration=first.configuration, seed=first.seed, state=state, phase=Phase.CONFIRM)
            for n, state in enumerate(states)
        ]
        return len(remaining(history(base), done))

    assert after(TrialState.REACHED) == 17
    assert after(TrialState.EXHAUSTED) == 17
    assert after(TrialState.LOST, TrialState.CANCELLED) == 18
    assert after(TrialState.FAILED) == 18
    assert after(TrialState.FAILED, TrialState.FAILED) == 17


def test_cadence_bounds_the_number_of_evaluations_and_their_share() -> None:
    assert eval_every_steps(step_seconds=0.01, evaluation_seconds=0.0, full_limit=10.0) == 1
    assert eval_every_steps(step_seconds=0.001, evaluation_seconds=0.0, full_limit=10.0) == 10
    every = eval_every_steps(step_seconds=0.001, evaluation_seconds=0.02, full_limit=10.0)
    assert 0.02 / (every * 0.001 + 0.02) <= 0.2
    assert 0.02 / ((every - 1) * 0.001 + 0.02) > 0.2
    assert eval_every_steps(step_seconds=10.0, evaluation_seconds=0.1, full_limit=100.0) == 1


def test_a_dear_evaluation_still_leaves_twenty_looks_at_the_target() -> None:
    assert eval_every_steps(step_seconds=0.01, evaluation_seconds=3.0, full_limit=10.0) * 0.01 == 10.0 / 20


def test_a_probe_that_ran_out_of_memory_has_no_cadence() -> None:
    measured = StepTime(
        batch_size=8,
        micro_batch_size=8,
        step_seconds=None,
        evaluation_seconds=None,
        steps_timed=0,
        peak_memory_bytes=None,
        out_of_memory=True,
    )
    assert probe_record(measured, 10.0).eval_every_steps is None


def test_busy_seconds_count_overlaps_once_and_leave_pauses_out() -> None:
    first, second = make_trial(0), make_trial(1)  # 5 s each, ten seconds apart
    assert busy_seconds([first, second], now=0.0) == 10.0
    assert busy_seconds([first, replace(second, created_at=first.created_at, ended_at=first.ended_at)], now=0.0) == 5.0
    running = make_trial(2, state=TrialState.RUNNING)
    assert busy_seconds([running], now=running.created_at.timestamp() + 3.0) == 3.0
    assert busy_seconds([make_trial(0, state=TrialState.LOST)], now=0.0) == 0.0
    assert busy_seconds([make_trial(0, state=TrialState.QUEUED)], now=1e10) == 0.0


def test_seeds_differ_by_phase_and_index() -> None:
    seeds = {trial_seed(0, phase, index) for phase in Phase for index in range(100)}
    assert len(seeds) == 400
    assert trial_seed(0, Phase.SEARCH, 1) == trial_seed(0, Phase.SEARCH, 1) != trial_seed(1, Phase.SEARCH, 1)


def test_a_configuration_whose_confirmation_has_begun_is_confirmed_to_the_end() -> None:
    begun = replace(searched()[-1].configuration, batch_size=128, micro_batch_size=128, learning_rate=0.777)
    first = make_trial(50, configuration=begun, phase=Phase.CONFIRM, seed=trial_seed(SPEC.seed, Phase.CONFIRM, 0))
    assert begun.key not in {one.key for one in finalists(history(searched()))}
    left = [run for run in remaining(history(searched()), [first]) if run.configuration == begun]
    assert [run.seed for run in left] == [trial_seed(SPEC.seed, Phase.CONFIRM, index) for index in (1, 2)]


def test_a_driver_is_alive_while_its_process_is() -> None:
    owner = this_driver()
    assert is_alive(owner) is True
    host, pid, place, started, mark = owner.rsplit("/", 4)
    assert is_alive(f"{host}/999999999/{place}/{started}/{mark}") is False
    assert is_alive(f"{host}/{pid}/{place}/{int(started) - 100}/{mark}") is False  # the number was given again


def test_of_a_driver_elsewhere_nothing_is_known_whatever_its_host_is_called() -> None:
    host, pid, place, started, mark = this_driver().rsplit("/", 4)
    assert is_alive(f"elsewhere/{pid}/{place}/{started}/{mark}") is None
    assert is_alive(f"{host}/{pid}/another-boot/{started}/{mark}") is None
    assert is_alive(f"{host}/{pid}/{started}/{mark}") is None


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
