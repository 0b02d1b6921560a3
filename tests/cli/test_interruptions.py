"""Drivers that are stopped or killed in mid-study, alone and in a team, and what the same command then makes of it."""

import importlib.util
import json
import math
import os
import random
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from bssearch import DatabaseError, LaunchError, open_store, submit_study
from bssearch.records import Observation, Phase, TrialRecord, TrialState
from bssearch.search.leases import is_alive
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_VARIABLE, STATE_DIR_VARIABLE
from bssearch.spec.templates import SubmissionState
from tests.cli.task import (
    DEFAULT,
    UNCONFIRMED,
    command,
    environment,
    printed,
    read,
    space_of,
    write_task,
)
from tests.factories import not_none
from tests.postgres import Postgres
from tests.schema import execute
from tests.waiting import wait_for


class Proxy:
    """Forwards connections on ``port`` to a Unix socket, both ways, until they are cut."""

    def __init__(self, server: Path) -> None:
        self._server = str(server)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> int:
        """Cut every connection; return their number."""
        with self._lock:
            cut = dict(self._open)
            for one in cut:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in cut.values():
            thread.join()
        return len(cut)

    def close(self) -> None:
        """Take no more connections, and cut the open connections."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                thread = threading.Thread(target=self._pass_on, args=(client,), daemon=True)
                with self._lock:
                    self._open[client] = thread
                thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        """Forward bytes until one side ends; close the client at once if the server is away."""
        other = socket.socket(socket.AF_UNIX)
        with suppress(OSError), other:
            other.connect(self._server)
            sides = {client: other, other: client}
            while all([_pass(one, sides[one]) for one in select.select([*sides], [], [])[0]]):
                pass
        with self._lock:
            del self._open[client]
            client.close()


def _pass(source: socket.socket, sink: socket.socket) -> bool:
    """Forward received bytes; return False at the end of the source."""
    data = source.recv(2**16)
    sink.sendall(data)
    return bool(data)


@contextmanager
def proxy_of(server: Path) -> Iterator[Proxy]:
    """Proxy of a server's socket, closed at the end."""
    made = Proxy(server)
    try:
        yield made
    finally:
        made.close()


SLOW = {
    "workload_settings": {"step_seconds": 0.03},
    "executor": {"device": "cpu", "slots": 2},
    "space": space_of(32, 64),
    "budget": {"trials": 14, "trial_train_seconds": 2.0},
    "confirm": UNCONFIRMED,
}


@contextmanager
def driver(folder: Path, *, until: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run, yield it in mid-study, once it says where it is, and leave nothing of it."""
    process = subprocess.Popen(
        command("run", "task.yaml", "--verbose"), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    family = [psutil.Process(process.pid)]
    try:
        for line in not_none(process.stderr):
            if line.startswith(until):
                break
        family += psutil.Process(process.pid).children(recursive=True)
        yield process
    finally:
        for member in family:
            if member.is_running():
                member.kill()
        process.wait()
        not_none(process.stderr).close()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def trials(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = read(folder, "trial", "list")
    return found


def wait_for_start(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a trial starts, so that one is in its middle: between two trials nothing may run."""

    def running() -> set[Any]:
        return set(execute(folder / "bssearch.db", "SELECT number FROM bss_trial WHERE state = 'running'"))

    before = running()
    wait_for(lambda: running() - before, process)


def check_complete(folder: Path, searched: int) -> list[dict[str, object]]:
    """Run the study to its end; every number stands once, the counts add up, nothing that finished is repeated."""
    before = {trial["number"]: trial for trial in trials(folder) if trial["state"] not in {"running", "paused"}}
    printed(folder, "run", "task.yaml", *("--set", "executor.name=inline", "--set", "executor.slots=1"))
    found = trials(folder)
    assert [trial["number"] for trial in found] == list(range(1, len(found) + 1))
    states = Counter(trial["state"] for trial in found if trial["phase"] == "search")
    assert states.total() - states["lost"] - states["cancelled"] - states["failed"] == searched
    assert not states["running"] + states["paused"]
    kept = [found[int(str(number)) - 1] for number in before]
    assert [{**one, "answer": None} for one in kept] == [{**one, "answer": None} for one in before.values()]
    return found


@pytest.mark.slow
def test_after_sigkill_and_sigterm_no_process_is_left_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_task(tmp_path, **SLOW)
    with driver(tmp_path, until="search 4/") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        wait_for_start(tmp_path, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not alive(workers))
    killed = [trial["number"] for trial in trials(tmp_path) if trial["state"] == "running"]
    assert killed
    with driver(tmp_path, until="search 8/") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        wait_for_start(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130, errors
        assert "stopped; all trials are stored" in errors
        assert not alive(workers)
    states = Counter(trial["state"] for trial in trials(tmp_path))
    assert states["paused"] >= 1, f"it goes on with the next run: {states}"
    assert not states["running"]
    found = check_complete(tmp_path, 14)
    assert [found[int(str(number)) - 1]["state"] for number in killed] == ["lost"] * len(killed)
    retried = {trial["retry_of"]: trial for trial in found if trial["retry_of"] is not None}
    assert set(retried) == set(killed)
    for number, again in retried.items():
        same = ("batch_size", "learning_rate", "seed", "warmup_epochs", "phase")
        assert [again[key] for key in same] == [found[int(str(number)) - 1][key] for key in same]


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    write_task(
        tmp_path,
        workload_settings={"fault": "hang"},
        target={"metric": "accuracy", "value": 1.0},
        space=space_of(16),
        default={**DEFAULT, "batch_size": 16},
        budget={"trials": 4, "trial_train_seconds": 0.5},
        pruner={"name": "none"},
    )
    with driver(tmp_path, until="timing steps") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        while not any(trial["state"] == "running" for trial in trials(tmp_path)):
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(2)  # in which the trial comes to the step that hangs
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "it waits for the step"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 130, errors
        assert not alive(workers)


@pytest.mark.slow
def test_who_stops_reading_the_progress_does_not_stop_the_study(tmp_path: Path) -> None:
    write_task(tmp_path, space=space_of(32), budget={"trials": 3, "trial_train_seconds": 2.0}, confirm=UNCONFIRMED)
    run = command("run", "task.yaml")
    process = subprocess.Popen(run, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert sum(trial["phase"] == "search" for trial in trials(tmp_path)) == 3


INTERRUPTED_IMPORT = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = {argv!r}
from bssearch.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "bssearch.cli.app", "bssearch.commands.run", "torch"])
def test_ctrl_c_while_libraries_are_loading_ends_with_one_line(tmp_path: Path, module: str) -> None:
    argv = ["bssearch", "run", "digits", "--set", "executor.name=inline", "--set", "executor.device=cpu"]
    code = INTERRUPTED_IMPORT.format(module=module, argv=argv)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# On Ray ---------------------------------------------------------------------------------------------------------------


SECRETS = {"BSSEARCH_DB_URL": "sqlite:///bssearch.db", "PGPASSWORD": "a-secret-word"}
WORKER = "bssearch.executors.worker"


def states(folder: Path) -> list[str]:
    """Return the states of the trials so far, none before there are tables."""
    with closing(sqlite3.connect(folder / "bssearch.db")) as connection, suppress(sqlite3.OperationalError):
        return [state for (state,) in connection.execute("SELECT state FROM bss_trial ORDER BY number")]
    return []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None and "CI" not in os.environ, reason="Ray is not installed")
def test_a_killed_actor_is_a_trial_to_be_tried_again_and_ctrl_c_ends_ray_too(tmp_path: Path) -> None:
    write_task(tmp_path, **{**SLOW, "executor": {"name": "ray", "device": "cpu"}})
    with (tmp_path / "errors").open("w") as errors_file:
        process = subprocess.Popen(
            command("run", "task.yaml"),
            cwd=tmp_path,
            env=environment() | SECRETS,
            stdout=subprocess.PIPE,
            stderr=errors_file,
            text=True,
            start_new_session=True,
        )
    driver = psutil.Process(process.pid)
    family: list[psutil.Process] = []
    try:
        wait_for(lambda: "reached" in states(tmp_path), process)
        wait_for_start(tmp_path, process)
        family = driver.children(recursive=True)
        (worker,) = [one for one in family if WORKER in one.cmdline()]
        for one in family:
            names = {name for name, value in one.environ().items() if name in SECRETS or "a-secret-word" in value}
            assert names == set(), f"{one.cmdline()} knows {names}"
        assert worker.nice() == driver.nice(), "what is timed waits for other programs no longer than elsewhere"
        worker.parent().kill()  # type: ignore[union-attr]
        wait_for(lambda: "lost" in states(tmp_path), process)
        wait_for(lambda: not alive([worker]), process)  # its parent is gone: it ends by itself, not at once
        ended = len(states(tmp_path))
        wait_for(lambda: len(states(tmp_path)) > ended + 1, process)
        wait_for_start(tmp_path, process)
        family += driver.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        wait_for(lambda: not alive(family))
    finally:
        for one in [*family, driver]:
            if one.is_running():
                one.kill()
        process.wait()
    errors = (tmp_path / "errors").read_text()
    assert process.returncode == 130, errors
    assert "stopped; all trials are stored" in errors
    assert out == "", "stdout is for the answer, and Ray's processes have been heard of"

    found = check_complete(tmp_path, 14)
    (lost,) = [one for one in found if one["state"] == "lost"]
    assert "Ray lost the actor" in json.dumps(read(tmp_path, "trial", "show", "task", str(lost["number"])))
    assert [one["retry_of"] for one in found].count(lost["number"]) == 1


# A team ---------------------------------------------------------------------------------------------------------------


SCALE = float(os.environ.get("CHAOS_SCALE", "0.5"))
"""The guide's figures are of 2, which takes four times as long."""

DRIVERS, WORKERS, TRIALS = (max(2, round(one * SCALE)) for one in (4, 2, 100))
KILLS, SUSPENSIONS, RESTARTS, CUTS = (math.ceil(one * SCALE) for one in (7, 5, 1, 2))

LEASE_SECONDS = 8.0
SUSPENDED_SECONDS = 2 * LEASE_SECONDS
"""Then the others have marked the trials of a suspended driver as lost, unless all of them are down."""

SHORT_LEASES = f"""
from bssearch.storage import database, trials
trials.RESTART_GRACE_S, database.LONGEST_TURN_SECONDS = 2.0, 2.0
from bssearch.search import leases
leases.LEASE_SECONDS, leases.GONE_AFTER = {LEASE_SECONDS}, {2 * LEASE_SECONDS}
leases.HEARTBEAT_SECONDS, leases.LONGEST_LOOK = 1.0, 2.0
from bssearch.cli import main
main()
"""

STRUCK_UNTIL = round(90 * SCALE)
"""After so many trials nothing more happens: then there is always somebody to strike, however fast the machine is."""

ENDED = {0, 5, LaunchError.exit_code, DatabaseError.exit_code, -signal.SIGKILL}
"""Complete, complete without a hit, without its worker as it measured, without the server as it began, killed."""

ENDINGS = """
CREATE TABLE ending (trial_id integer, state text);
CREATE FUNCTION note_ending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state IS DISTINCT FROM OLD.state AND NEW.state NOT IN ('queued', 'running', 'paused') THEN
        INSERT INTO ending VALUES (NEW.id, NEW.state);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER note_ending AFTER UPDATE ON bss_trial FOR EACH ROW EXECUTE FUNCTION note_ending();
"""
"""Notes each time that a trial ends for good: of a row one sees only the last."""


@dataclass
class Member:
    """One of those that work on the study, on a machine of its own as far as its folders go."""

    folder: Path
    words: tuple[str, ...]
    process: subprocess.Popen[str] | None = None

    def start(self, url: str) -> None:
        own = {
            DATABASE_URL_VARIABLE: url,
            STATE_DIR_VARIABLE: str(self.folder / "state"),
            CHECKPOINT_DIR_VARIABLE: str(self.folder / "checkpoints"),
        }
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SHORT_LEASES, *self.words],
                cwd=self.folder,
                env={**environment(), **own},
                stderr=log,
                stdout=log,
                text=True,
            )

    @property
    def log(self) -> Path:
        return self.folder / "run.log"


class Team:
    """The members, and every process that they ever started."""

    def __init__(self, members: list[Member], url: str) -> None:
        self._members = members
        self._url = url
        self.family: dict[int, psutil.Process] = {}
        self.exits: list[tuple[int, str]] = []
        self._is_done: set[int] = set()
        self._suspended: dict[psutil.Process, float] = {}

    def keep_up(self) -> bool:
        """Start members that are not there, and note who has ended how; return whether anybody has work left."""
        self._resume(time.monotonic())
        for index, member in enumerate(self._members):
            if member.process is not None and member.process.poll() is not None:
                self.exits.append((member.process.returncode, member.log.read_text()[-2000:]))
                if member.process.returncode in {0, 5}:
                    self._is_done.add(index)
                member.process = None
            if member.process is None and index not in self._is_done:
                member.start(self._url)
            if member.process is not None:
                with suppress(psutil.Error):
                    own = psutil.Process(member.process.pid)
                    self.family |= {one.pid: one for one in (own, *own.children(recursive=True))}
        return len(self._is_done) < len(self._members)

    def kill_one(self, rng: random.Random) -> bool:
        """Kill a member or a worker process of it; return whether there was one."""
        running = [one.process.pid for one in self._members if one.process is not None]
        if not running:
            return False
        with suppress(psutil.Error):
            member = psutil.Process(rng.choice(running))
            rng.choice([member, *member.children(recursive=True)]).kill()
            return True
        return False

    def suspend_one(self, rng: random.Random, owners: list[str]) -> bool:
        """Suspend a member that runs a trial, alone or with its processes; return whether there was one."""
        pids = {int(owner.split("/")[1]) for owner in owners}
        running = [one.process.pid for one in self._members if one.process is not None and one.process.pid in pids]
        with suppress(psutil.Error, IndexError):
            member = psutil.Process(rng.choice(running))
            for one in [member, *rng.choice([[], member.children(recursive=True)])]:
                one.suspend()
                self._suspended[one] = time.monotonic() + SUSPENDED_SECONDS
            return True
        return False

    def _resume(self, until: float) -> None:
        for one in [one for one, end in self._suspended.items() if end <= until]:
            del self._suspended[one]
            with suppress(psutil.Error):
                one.resume()

    def end(self) -> None:
        """Kill what is left."""
        for one in alive(list(self.family.values())):
            with suppress(psutil.Error):
                one.kill()
        for member in self._members:
            if member.process is not None:
                member.process.wait()


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """Give a folder on a disk of its own of one MiB, which a test may fill up."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill_up(folder: Path) -> None:
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**14))


def make_members(folder: Path) -> list[Member]:
    """Return drivers of a study and workers that serve it, each with a folder that holds all that its machine would."""
    made = []
    served = ("queue", "worker", "--templates", "templates.yaml", "--until-empty")
    for index, words in enumerate([("run", "task.yaml")] * DRIVERS + [served] * WORKERS):
        own = folder / f"machine-{index}"
        own.mkdir()
        (own / "templates.yaml").write_text("templates: {task: {spec: task.yaml}}")
        write_task(
            own,
            target={"metric": "accuracy", "value": 1.0},
            space=space_of(32, 64),
            budget={"trials": TRIALS, "trial_train_seconds": 0.1},
            confirm=UNCONFIRMED,
        )
        made.append(Member(own, words))
    return made


def strikes(rng: random.Random) -> list[str]:
    """Return what will happen, in the order in which it does."""
    found = ["kill"] * KILLS + ["suspend"] * SUSPENSIONS + ["restart"] * RESTARTS + ["cut"] * CUTS + ["fill"]
    rng.shuffle(found)
    return found


def check_curve(trial: TrialRecord, curve: list[Observation]) -> None:
    """See that no evaluation of a trial is missing, and none too many, and that the curve ends where the row says."""
    assert trial.outcome is not None
    steps = [one.step for one in curve]
    assert steps == sorted(set(steps))
    assert all(one.samples == one.step * trial.configuration.batch_size for one in curve)
    if not steps:
        return
    unevaluated = trial.outcome.steps - steps[-1]  # stopped between two evaluations
    assert 0 <= unevaluated <= (0 if trial.state is TrialState.LOST else trial.eval_every_steps), trial.number
    assert trial.outcome.final_metric == curve[-1].metric, trial.number
    if trial.state.is_missing:
        return
    due = {*range(0, trial.outcome.steps + 1, trial.eval_every_steps)}
    assert set(steps) - {trial.outcome.steps} == due - {trial.outcome.steps}, trial.number


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_team_s_study_outlives_whatever_happens_to_its_members(
    tmp_path: Path, own_postgres: Postgres, seed: int
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk that is full")
    rng = random.Random(seed)
    own_postgres.start_if_stopped()
    database = own_postgres.create_database("team")
    own_postgres.execute(ENDINGS, database="team")
    members = make_members(tmp_path)
    with open_store(database) as store:
        submit_study(store, "task", {}, name="task")
    socket = own_postgres.folder / ".s.PGSQL.5432"
    with (
        proxy_of(socket) as proxy,
        full_disk(members[0].folder / "checkpoints") as disk,
    ):
        team = Team(members, f"postgresql://postgres@127.0.0.1:{proxy.port}/team")
        try:
            began = time.monotonic()
            while team.keep_up() and not count_of(own_postgres, "true"):
                time.sleep(0.2)
            happen(strikes(rng), team, rng, own_postgres, proxy, disk)
            while team.keep_up():
                assert time.monotonic() - began < 900, "the study does not end"
                time.sleep(0.2)
        finally:
            team.end()
    assert all(code in ENDED for code, _ in team.exits), team.exits
    assert not any("Traceback" in said for _, said in team.exits)
    assert not alive(list(team.family.values()))
    check_study(database)


def happen(strikes: list[str], team: Team, rng: random.Random, server: Postgres, proxy: Proxy, disk: Path) -> None:
    """Have everything happen at random moments of the study, whatever is running then."""
    for moment, strike in zip(sorted(rng.randrange(STRUCK_UNTIL) for _ in strikes), strikes, strict=True):
        while team.keep_up() and count_of(server, "state NOT IN ('queued', 'running', 'paused')") < moment:
            time.sleep(0.1)
        match strike:
            case "kill":
                while not team.kill_one(rng):  # the one that was drawn has just ended
                    assert team.keep_up(), "the study has ended before everything had happened"
            case "suspend":
                while not team.suspend_one(rng, owners_of(server)):
                    assert team.keep_up(), "the study has ended before everything had happened"
            case "restart":
                server.restart()
            case "cut":
                while not proxy.cut():  # they are about to connect, all of them
                    time.sleep(0.01)
            case "fill":
                fill_up(disk)


def count_of(server: Postgres, condition: str) -> int:
    return len(owners_of(server, condition))


def owners_of(server: Postgres, condition: str = "state = 'running'") -> list[str]:
    with psycopg.connect(server.url("team")) as connection:
        rows = connection.execute(f"SELECT lease_owner FROM bss_trial WHERE {condition}".encode()).fetchall()
    return [owner for (owner,) in rows]


def check_study(database: str) -> None:
    """See that every trial ended once, the budget is spent to the trial, and nothing is left behind."""
    with open_store(database, write=False) as store:
        trials = store.trials.of("task")
        curves = store.trials.curves("task", [one.number for one in trials])
        [submission] = store.queue.submissions()
    assert [one.number for one in trials] == list(range(1, len(trials) + 1))
    assert submission.state is SubmissionState.DONE, submission.reason
    assert all(one.state.is_finished and one.state is not TrialState.PAUSED for one in trials)
    assert sum(not one.state.is_missing for one in trials if one.phase is Phase.SEARCH) == TRIALS
    lost = [one.number for one in trials if one.state is TrialState.LOST]
    assert lost and max(Counter(one.retry_of for one in trials if one.retry_of is not None).values()) == 1
    for trial in trials:
        check_curve(trial, curves[trial.number])
    with psycopg.connect(database) as connection:
        endings = connection.execute(
            "SELECT number, count(*) FROM ending JOIN bss_trial ON trial_id = bss_trial.id GROUP BY number"
        ).fetchall()
        assert dict(endings) == {one.number: 1 for one in trials}
        claims = connection.execute("SELECT name, owner FROM bss_claim").fetchall()
    assert [name for name, owner in claims if is_alive(owner) is not False] == [], "what the dead held is anybody's"
