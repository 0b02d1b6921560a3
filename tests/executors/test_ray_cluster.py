"""Trials on a real Ray of two nodes on this machine, whose actors, nodes and drivers are killed."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from bssearch.executors.base import Event, ExecutorSettings
from bssearch.executors.ray import executor as ray_executor
from bssearch.executors.ray.executor import RayExecutor
from bssearch.records import TrialObserved, TrialState, TrialStop
from tests.cli.task import environment
from tests.executors.line_workload import (
    outcomes,
    request_endless_trial,
    request_trial,
    run_to_the_end,
    wait_for,
    write_workload,
)
from tests.factories import not_none
from tests.waiting import wait_until_gone

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Yield a cluster of two nodes with a CPU each, the first of them its head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            made = Cluster(initialize_head=True, head_node_args=NODE)
        made.add_node(**NODE)
    yield made
    made.shutdown()


@pytest.fixture
def executor(cluster: Any, tmp_path: Path) -> Iterator[RayExecutor]:
    write_workload(tmp_path)
    settings = ExecutorSettings(
        workload="line.py:Line", folder=tmp_path, device="cpu", slots="auto", address=cluster.address
    )
    with closing(RayExecutor(settings)) as executor:
        yield executor


def pid_of(executor: RayExecutor, slot: int) -> int:
    return not_none(executor._slots[slot].worker).pid


def trained(events: list[Event]) -> set[int]:
    """Return the trials that have been evaluated after a step."""
    return {event.number for event in events if isinstance(event, TrialObserved) and event.observation.step > 0}


def test_an_actor_and_a_node_that_are_killed_are_each_a_lost_trial_and_no_other(
    cluster: Any, executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert executor.slots == 2
    jobs = executor._cluster.ray._private.state.jobs()
    assert [job["Entrypoint"] for job in jobs if not job["IsDead"]] == ["bssearch"], (
        "a command line may have a password"
    )
    for number in (1, 2):
        executor.submit(request_endless_trial(number))
    wait_for(executor, lambda events: trained(events) == {1, 2})
    worker = pid_of(executor, 0)
    os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
    ended = outcomes(wait_for(executor, lambda events: 1 in outcomes(events), 90))
    assert {number: one.state for number, one in ended.items()} == {1: TrialState.LOST}
    assert ended[1].steps > 0 and "Ray lost the actor" in ended[1].reason
    wait_until_gone(worker)

    executor.submit(request_endless_trial(3))
    wait_for(executor, lambda events: 3 in trained(events), 90)
    assert {seat.place.node for seat in executor._seats.values() if seat.place} == {
        node.node_id for node in cluster.list_all_nodes()
    }

    (node,) = cluster.worker_nodes
    (on_it,) = [slot for slot in executor._slots if slot.worker and slot.worker.place == node.node_id]
    lost, worker = not_none(on_it.trial).request.number, pid_of(executor, on_it.index)
    cluster.remove_node(node, allow_graceful=False)
    ended = outcomes(wait_for(executor, lambda events: lost in outcomes(events), 90))
    assert {number: one.state for number, one in ended.items()} == {lost: TrialState.LOST}
    wait_until_gone(worker)

    monkeypatch.setattr(ray_executor, "PLACE_SECONDS", 5.0)
    executor.submit(request_trial(4))
    ended = outcomes(wait_for(executor, lambda events: 4 in outcomes(events)))
    assert (ended[4].state, executor.slots) == (TrialState.LOST, 1)
    (left,) = {2, 3} - {lost}
    executor.stop(TrialStop(left, TrialState.CANCELLED, "enough"))
    wait_for(executor, lambda events: left in outcomes(events))
    assert run_to_the_end(executor, request_trial(5))[0].state is TrialState.REACHED
    cluster.add_node(**NODE)


DRIVER = """
import sys, time
from pathlib import Path
from tests.executors.line_workload import request_endless_trial
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.ray.executor import RayExecutor

settings = ExecutorSettings(workload="line.py:Line", folder=Path(sys.argv[1]), device="cpu", address=sys.argv[2])
executor = RayExecutor(settings)
executor.submit(request_endless_trial(1))
while not executor.events(0.1):
    pass
print(executor._slots[0].worker.pid, flush=True)
time.sleep(1000)
"""


TOLD = """\
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from bssearch.executors.ray.executor import Cluster

told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())

def is_told():
    told.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    return told.wait(60)

with ThreadPoolExecutor(1) as thread:
    cluster = thread.submit(Cluster, sys.argv[1]).result()
    print(is_told())
    thread.submit(cluster.close).result()
    print(is_told())
"""


def test_a_process_that_connects_in_a_thread_is_still_told_to_stop_by_sigterm(cluster: Any) -> None:
    """As a worker of the queue does, which has its trials saved then."""
    done = subprocess.run(
        [sys.executable, "-c", TOLD, cluster.address], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr


def test_a_driver_that_is_killed_leaves_no_worker_on_the_cluster(cluster: Any, tmp_path: Path) -> None:
    write_workload(tmp_path)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), cluster.address],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    assert driver.stdout is not None
    with driver.stdout:
        worker = int(driver.stdout.readline())
        family = [worker, psutil.Process(worker).ppid()]
        driver.kill()
        driver.wait()
    for pid in family:
        wait_until_gone(pid)


def test_without_an_address_a_ray_of_its_own_is_started_beside_a_cluster(cluster: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BESIDE],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


BESIDE = """
from bssearch.executors.ray.executor import Cluster

here = Cluster(None)
print(len(here.nodes()))
here.close()
"""


SILENT = """
import os
import socket

from bssearch.errors import LaunchError
from bssearch.executors.ray import executor

executor.CONNECT_SECONDS = 1.0
with socket.create_server(("127.0.0.1", 0)) as silent:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    try:
        executor.Cluster(address)
    except LaunchError as error:
        print(str(error).replace(address, "ADDRESS"), flush=True)
os._exit(0)  # Ray still tries to connect, in another thread
"""


def test_a_cluster_that_does_not_answer_is_named_and_waited_for_no_longer() -> None:
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=120, check=False)
    said = "executor.address = 'ADDRESS': cannot reach a Ray cluster at this address: no answer for 1 s\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
