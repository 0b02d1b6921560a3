"""The executor on Ray: nodes that are lost or of another kind, on a Ray that is made up; the actor of a slot."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bssearch.errors import LaunchError, UsageError
from bssearch.executors.base import (
    Event,
    ExecutorSettings,
    Load,
    Loaded,
    Refused,
    Reply,
    decode_command,
    decode_reply,
    encode,
    make_executor,
)
from bssearch.executors.process import Death
from bssearch.executors.ray import executor as ray_executor
from bssearch.executors.ray.executor import MOST_LOG_BYTES, Cluster, Heard, Node, Place, RayExecutor, SlotActor, said_by
from bssearch.records import TrialEnded, TrialObserved, TrialRequest, TrialState, TrialStop, WorkloadDescription
from bssearch.settings import environment_with
from tests.cli.task import environment
from tests.executors.fake import DESCRIPTION
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

# A stand-in for Ray: its actors live in this process, so that tests can lose one in every way -------------------------


class RayError(Exception):
    """The base of Ray's errors."""


class RayTaskError(RayError):
    """A method of an actor has raised."""


class GetTimeoutError(RayError, TimeoutError):
    """No answer in time."""


class Never(Future[Any]):
    """A call without an answer."""


class Actor:
    """An actor on a node; its worker loads, describes, and runs trials that never end.

    If ``is_gone``, each call fails; if ``is_silent``, no call is answered.
    """

    def __init__(self, node: str, kind: str, version: str, *, has_folder: bool = True) -> None:
        self.told: list[Any] = []
        self.node, self.kind, self.version, self.has_folder = node, kind, version, has_folder
        self.is_gone = self.is_silent = self.is_killed = False
        self._death: Death | None = None
        self._replies: list[Reply] = []
        self._said = threading.Condition()
        self._threads = ThreadPoolExecutor()

    def __getattr__(self, name: str) -> Any:
        method = getattr(Actor, f"do_{name}", None)
        if method is None:
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *given: self._call(lambda: method(self, *given)))

    def _call(self, method: Callable[[], Any]) -> Future[Any]:
        return Never() if self.is_silent else self._threads.submit(self._answer, method)

    def _answer(self, method: Callable[[], Any]) -> Any:
        if self.is_gone or self.is_killed:
            raise RayError("The actor died unexpectedly before finishing this task.\n\tclass_name: SlotActor")
        found = method()
        if self.is_gone:
            raise RayError("The actor died unexpectedly before finishing this task.")
        return found

    def do_place(self, current: str, folder: str) -> Place:
        return Place(self.node, f"host of {self.node}", self.version, self.has_folder)

    def do_start(self, slot: int, threads: int, environment: Mapping[str, str]) -> int:
        self.environment = environment
        return 1000 + slot

    def do_tell(self, line: bytes) -> None:
        command = decode_command(line)
        self.told.append(command)
        match command:
            case "describe":
                self.say(DESCRIPTION)
            case "exit":
                self.do_kill()
            case Load():
                self.say(Loaded(device="cuda:0", device_uuid=f"GPU-{self.node}", device_name=self.kind))

    def do_hear(self, seconds: float) -> Heard:
        with self._said:
            self._said.wait_for(lambda: self._replies or self._death or self.is_gone, timeout=0.01)
            replies, self._replies = self._replies, []
        return Heard(b"", tuple(encode(one) for one in replies), self._death)

    def do_kill(self) -> None:
        with self._said:
            self._death = Death(-signal.SIGKILL)
            self._said.notify_all()

    def do_leave(self) -> None: ...

    def runs(self) -> list[int]:
        """Return the numbers of its trials, at least one."""
        deadline = time.monotonic() + 30
        while not (found := [one.number for one in self.told if isinstance(one, TrialRequest)]):
            assert time.monotonic() < deadline, "it was told of no trial"
            time.sleep(0.01)
        return found

    def say(self, reply: Reply) -> None:
        with self._said:
            self._replies.append(reply)
            self._said.notify_all()


class FakeRay:
    """Returns the next of ``actors`` for each request; None stands for a request without an answer."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError)

    def __init__(self, actors: Sequence[Actor | None], nodes: Sequence[Node]) -> None:
        self.actors = list(actors)
        self.asked: list[dict[str, Any]] = []
        self.ray = self
        self._nodes = list(nodes)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the cluster that the executor finds."""
        monkeypatch.setattr(ray_executor, "Cluster", lambda address: self)

    def nodes(self) -> list[Node]:
        return self._nodes

    def close(self) -> None: ...

    def remote(self, of: type) -> FakeRay:
        return self

    def options(self, **asked: Any) -> SimpleNamespace:
        self.asked.append(asked)
        return SimpleNamespace(remote=self._next)

    def _next(self) -> Actor:
        found = self.actors.pop(0)
        if found is None:
            found = Actor("nowhere", "", "")
            found.is_silent = True
        return found

    def get(self, asked: Future[Any], timeout: float) -> Any:
        if isinstance(asked, Never):
            raise GetTimeoutError("too late")
        return asked.result(timeout=60)

    def wait(self, asked: Sequence[Future[Any]], *, num_returns: int, timeout: float) -> None: ...

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        actor.is_killed = True


# Tests ----------------------------------------------------------------------------------------------------------------


GPU_NODES = [Node("a", 8, 2), Node("b", 8, 2)]


def actors(*nodes: str, kind: str = "A100") -> list[Actor]:
    return [Actor(node, kind, version("bssearch")) for node in nodes]


@contextmanager
def opened(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[RayExecutor]:
    ray.install(monkeypatch)
    monkeypatch.setattr(ray_executor, "PLACE_SECONDS", 0.1)
    with closing(RayExecutor(ExecutorSettings(workload="digits", **settings))) as executor:
        yield executor


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs Ray, which is not installed") as refused:
        make_executor("ray", ExecutorSettings(workload="digits"))
    assert refused.value.hint == "pip install 'bssearch[ray]'"


def test_ray_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys; from bssearch import registry; registry.load('executors', 'ray'); sys.exit('ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_address_of_rays_client_is_refused() -> None:
    with pytest.raises(UsageError, match="must be auto or HOST:PORT"):
        Cluster("ray://127.0.0.1:10001")


def test_auto_is_a_slot_for_each_gpu_and_each_slot_sees_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = actors("a", "b", "c", "d")
    with opened(ray := FakeRay(here, GPU_NODES), monkeypatch, slots="auto", threads=2) as executor:
        assert (executor.slots, executor.slots_apart) == (4, True)
        for number in range(1, 5):
            executor.submit(request_trial(number))
        assert [one["num_gpus"] for one in ray.asked] == [1] * 4
        assert [(one["num_cpus"], one["max_restarts"], one["max_task_retries"]) for one in ray.asked] == [(2, 0, 0)] * 4
        loads = [one for actor in here for one in actor.told if isinstance(one, Load)]
        assert [(load.settings.device, load.slot, load.settings.slots) for load in loads] == [("cuda", 0, 1)] * 4
        assert not any(slot.trial.contended for slot in executor._slots if slot.trial)


def test_gpus_that_no_slot_uses_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(FakeRay(actors("a"), GPU_NODES), monkeypatch) as executor:
        notice = executor.describe().notice
        assert notice is not None and "executor.slots = 1, but the Ray cluster has room for 4 slots" in notice


@pytest.mark.parametrize(
    ("nodes", "settings", "message"),
    [
        (GPU_NODES, {"slots": 5}, "executor.slots = 5 must be <= 4"),
        (GPU_NODES, {"slots": 3, "threads": 8}, "executor.slots = 3 must be <= 2"),
        (GPU_NODES, {"threads": 9}, "executor.threads = 9 must be <= 8"),
        ([Node("a", 2, 1), Node("b", 8, 0)], {"threads": 4}, "no node of the Ray cluster with a GPU has 4 CPUs"),
        (GPU_NODES, {"device": "cuda:1"}, "executor.device = 'cuda:1' must be auto, cpu or cuda"),
        ([Node("a", 8, 0)], {"device": "cuda"}, "no node of the Ray cluster has a GPU"),
        ([], {}, "executor.threads = 1 must be <= 0"),
    ],
)
def test_more_than_the_cluster_has_is_refused_by_name(
    nodes: list[Node], settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as refused, opened(FakeRay([], nodes), monkeypatch, **settings):
        pass
    assert message in str(refused.value)


def test_a_store_that_is_no_folder_is_refused_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", "s3://key:secret@bucket/waiting")
    two = [Node("a", 8, 0), Node("b", 8, 0)]
    with (
        pytest.raises(UsageError, match=r"DIR = s3://… must be a folder, because the Ray cluster has 2 machines"),
        opened(FakeRay([], two), monkeypatch),
    ):
        pass
    with opened(FakeRay([], two[:1]), monkeypatch):
        pass


def test_what_is_added_to_the_environment_may_be_taken_away_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSS_GIVEN", "mine")
    with environment_with({"BSS_GIVEN": "other", "BSS_NEW": "1"}):
        assert (os.environ["BSS_GIVEN"], os.environ.pop("BSS_NEW")) == ("other", "1")
    assert (os.environ["BSS_GIVEN"], "BSS_NEW" in os.environ) == ("mine", False)


def test_another_kind_of_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [*actors("a"), *actors("b", kind="T4")]
    with opened(FakeRay(here, GPU_NODES), monkeypatch, slots=2) as executor:
        executor.describe()
        with pytest.raises(LaunchError, match="slot 1: host of b has T4, but host of a has A100"):
            executor.submit(request_trial(1))


def test_an_actor_that_is_lost_before_it_has_a_place_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, *good = actors("a", "b", "c")
    lost.is_gone = True
    with opened(FakeRay([lost, *good], GPU_NODES), monkeypatch, slots=2) as executor:
        executor.submit(request_trial(1))
        assert good[1].runs() == [1], "slot 1 has the second actor, slot 0 the third"
    gone = actors("a", "b", "c")
    for one in gone:
        one.is_gone = True
    with opened(FakeRay(gone, GPU_NODES), monkeypatch) as executor:
        with pytest.raises(LaunchError, match="slot 0: the Ray actor does not start: The actor died unexpectedly"):
            executor.submit(request_trial(1))
        assert all(one.is_killed for one in gone)


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        (Actor("a", "A100", "0.0.1"), r"host of a has bssearch 0\.0\.1, but this machine"),
        (Actor("a", "A100", version("bssearch"), has_folder=False), "host of a has no folder /no/such/place"),
    ],
    ids=["another bssearch", "a folder that is not shared"],
)
def test_a_node_without_the_same_bssearch_and_folder_is_refused_by_name(
    actor: Actor, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRay([actor], GPU_NODES).install(monkeypatch)
    settings = ExecutorSettings(workload="line.py:Line", folder=Path("/no/such/place"))
    with closing(RayExecutor(settings)) as executor, pytest.raises(LaunchError, match=said):
        executor.describe()


def test_a_node_that_is_lost_is_a_lost_trial_and_the_next_one_has_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = actors("a", "b", "c")
    with opened(FakeRay(here[:], GPU_NODES), monkeypatch, slots=2) as executor:
        executor.submit(request_trial(1))
        executor.submit(request_trial(2))
        here[0].is_gone = True
        ended = outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))
        assert {number: one.state for number, one in ended.items()} == {1: TrialState.LOST}
        assert "Ray lost the actor on host of a: The actor died unexpectedly" in ended[1].reason
        executor.submit(request_trial(3))
        assert here[2].runs() == [3]


def test_an_actor_that_does_not_answer_is_lost_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = actors("a")
    with opened(FakeRay(here[:], GPU_NODES), monkeypatch) as executor:
        executor.submit(request_trial(1))
        here[0].is_silent = True
        lost = outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))[1]
        assert (lost.state, lost.reason) == (
            TrialState.LOST,
            f"host of a has not answered for {ray_executor.SILENCE_SECONDS:g} s",
        )
        assert here[0].is_killed, "it may live on, with a GPU"


def test_a_description_whose_node_is_lost_is_made_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    here = actors("a", "b")
    tell = Actor.do_tell

    def die(self: Actor, line: bytes) -> None:
        if self is here[0] and line == b"describe\n":
            self.is_gone = True
        else:
            tell(self, line)

    monkeypatch.setattr(Actor, "do_tell", die)
    with opened(FakeRay(here[:], GPU_NODES), monkeypatch) as executor:
        assert executor.describe().metrics
        assert here[0].is_gone and here[1].told


def test_a_slot_without_a_node_any_more_is_given_up_and_the_last_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = actors("a", "b")
    with opened(FakeRay([*here, None, None], GPU_NODES), monkeypatch, slots=2) as executor:
        executor.submit(request_trial(1))
        executor.submit(request_trial(2))
        here[0].is_gone = True
        wait_for(executor, lambda events: 1 in outcomes(events))
        executor.submit(request_trial(3))
        (ended,) = executor.events(0.0)
        assert isinstance(ended, TrialEnded) and (ended.number, ended.outcome.state) == (3, TrialState.LOST)
        assert "no node of the Ray cluster had 1 CPU and a GPU free" in ended.outcome.reason
        assert executor.slots == 1
        here[1].is_gone = True
        wait_for(executor, lambda events: 2 in outcomes(events))
        with pytest.raises(LaunchError, match=r"slot 1: for .* no node"):
            executor.submit(request_trial(4))


def test_a_disk_that_takes_no_more_fails_the_trial_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = actors("a")
    hear = Actor.do_hear
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(FakeRay(here[:], GPU_NODES), monkeypatch, log_folder=tmp_path) as executor:
        executor.submit(request_trial(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            monkeypatch.setattr(Actor, "do_hear", lambda self, seconds: replace(hear(self, seconds), log=bytes(2**21)))
            failed = outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))[1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.state is TrialState.FAILED
    assert failed.reason == f"writing the log {tmp_path / 'slot-0.log'} failed: File too large"


def test_what_is_no_reply_and_what_an_actor_raises_fail_the_trial_and_end_the_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(self: Actor, seconds: float) -> Heard:
        raise RayTaskError('ray::SlotActor.hear()\n  File "actor.py"\nOSError: [Errno 28] No space left on device')

    hear = Actor.do_hear
    for other, reason in (
        (
            lambda self, seconds: replace(hear(self, seconds), replies=(b"{}\n",)),
            "a reply of host of a is unreadable",
        ),
        (raises, "the actor on host of a failed: OSError: [Errno 28] No space left on device"),
    ):
        here = actors("a")
        with opened(FakeRay(here[:], GPU_NODES), monkeypatch) as executor:
            executor.submit(request_trial(1))
            monkeypatch.setattr(Actor, "do_hear", other)
            failed = outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))[1]
            assert failed.state is TrialState.FAILED and failed.reason.startswith(reason)
            assert here[0].is_killed
        monkeypatch.setattr(Actor, "do_hear", hear)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("first\nmore"), "first"),
        (RuntimeError('A.boom()\n  File "x"\n    ^^^\nOSError: no space left'), "OSError: no space left"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_of_an_error_of_rays_the_line_that_says_it_is_kept(error: Exception, said: str) -> None:
    assert said_by(error) == said


CHATTY = """
    def evaluate(self, model, part):
        print("x" * 300_000 + "!")
"""


@contextmanager
def started(
    folder: Path, code: str = "", call: Callable[[Callable[[], int]], int] = lambda start: start()
) -> Iterator[SlotActor]:
    """Yield an actor whose worker, started by a call, has loaded the line workload."""
    path = write_workload(folder)
    path.write_text(
        path.read_text().replace(
            "\n    def evaluate(self, model, part):\n", code or "\n    def evaluate(self, model, part):\n"
        )
    )
    actor = SlotActor()
    call(lambda: actor.start(0, 1, {}))
    try:
        settings = ExecutorSettings(workload="line.py:Line", folder=folder, device="cpu")
        actor.tell(encode(Load(settings=settings, slot=0)))
        assert isinstance(until(actor, Loaded)[-1], Loaded)
        yield actor
    finally:
        actor.leave()


def heard(actor: SlotActor) -> Iterator[Heard]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        yield actor.hear(0.5)


def until(actor: SlotActor, kind: type[object]) -> list[Reply]:
    """Return the replies of the worker up to a reply of a kind."""
    replies: list[Reply] = []
    for one in heard(actor):
        replies += [decode_reply(line) for line in one.replies]
        if any(isinstance(reply, kind | Refused) for reply in replies):
            return replies
        assert one.death is None, one
    raise AssertionError(f"no {kind.__name__}; so far {replies}")


def test_a_long_log_comes_in_pieces_and_before_the_reply_that_followed_it(tmp_path: Path) -> None:
    with started(tmp_path, CHATTY) as actor:
        actor.tell(encode(request_endless_trial(1, seconds=0.01)))
        log = b""
        for one in heard(actor):
            assert len(one.log) <= MOST_LOG_BYTES
            log += one.log
            replies = [decode_reply(line) for line in one.replies]
            if any(isinstance(reply, TrialEnded) for reply in replies):
                break
        assert log.count(b"!") >= 1 and log.endswith(b"!\n")
        assert actor._log.stat().st_size == 0, "what has been passed on does not fill the node's disk"


def test_a_stop_goes_in_and_a_dead_worker_is_told_once_with_its_signal(tmp_path: Path) -> None:
    with started(tmp_path) as actor:
        actor.tell(encode(request_endless_trial(1)))
        actor.tell(encode(TrialStop(number=1, state=TrialState.PRUNED, reason="as asked")))
        (ended,) = [one for one in until(actor, TrialEnded) if isinstance(one, TrialEnded)]
        assert (ended.outcome.state, ended.outcome.reason) == (TrialState.PRUNED, "as asked")
        assert actor._worker is not None
        os.kill(actor._worker.pid, signal.SIGKILL)
        assert next(one.death for one in heard(actor) if one.death is not None).return_code == -signal.SIGKILL
        actor.kill()
        assert not psutil.pid_exists(actor._worker.pid)


def test_a_worker_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread, started(tmp_path, call=lambda start: thread.submit(start).result()) as actor:
        thread.shutdown()  # after the load: the worker has asked Linux to end with its thread by then
        actor.tell(encode("describe"))
        assert isinstance(until(actor, WorkloadDescription)[-1], WorkloadDescription)


# A real cluster -------------------------------------------------------------------------------------------------------


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
