from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bssearch.executors.base import LONGEST_LINE_BYTES, LineSplitter
from bssearch.executors.process import SECRETS, Inbox, WorkerProcess, allocator_environment, worker_environment


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", {}, ":4096:8"),  # what repeatable sums on a GPU need
        ("CUBLAS_WORKSPACE_CONFIG", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8"),
        ("BSSEARCH_CHECKPOINT_DIR", {"BSSEARCH_CHECKPOINT_DIR": "sftp://ada:secret@host/x"}, None),
        ("BSSEARCH_CHECKPOINT_DIR", {"BSSEARCH_CHECKPOINT_DIR": "/scratch/ada"}, "/scratch/ada"),
        ("OMP_NUM_THREADS", {"OMP_NUM_THREADS": "7"}, "2"),
        ("PGPASSWORD", {"PGPASSWORD": "secret"}, None),
        ("HOME", {"HOME": "/home"}, "/home"),
    ],
)
def test_a_worker_has_the_drivers_environment_without_secrets(
    name: str, given: dict[str, str], found: str | None
) -> None:
    assert worker_environment(given, threads=2).get(name) == found


@contextmanager
def started(folder: Path) -> Iterator[WorkerProcess]:
    """Yield a worker process that has only just been started; kill and bury it in the end."""
    inbox: Inbox = queue.SimpleQueue()
    (folder / "log").write_text("from before\n")
    made = WorkerProcess(slot=3, threads=1, log=folder / "log", inbox=inbox, environment={})
    try:
        yield made
    finally:
        death = made.bury()
    assert death.return_code == -signal.SIGKILL
    assert inbox.get(timeout=10) == (made, None)


def test_the_id_of_a_worker_stays_its_own_until_it_is_buried(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        assert not worker.has_exited()
        worker.kill()
        while not worker.has_exited():
            os.sched_yield()
        assert psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(worker.pid)
    assert worker.has_exited()


def test_a_worker_leads_a_group_of_its_own_and_appends_to_its_log(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        assert os.getpgid(worker.pid) == os.getsid(worker.pid) == worker.pid
        assert (worker.slot, worker.log_start) == (3, len("from before\n"))
        assert worker.log.read_text().startswith("from before\n")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is kept from other processes")
@pytest.mark.parametrize("secret", ["BSSEARCH_DB_URL", "PGPASSWORD", "BSSEARCH_CHECKPOINT_DIR", None])
def test_a_driver_with_secrets_is_closed_to_other_processes_of_its_user(secret: str | None) -> None:
    code = "import ctypes; from bssearch.executors.process import hide_secrets; hide_secrets(); "
    code += "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
    if secret is not None:
        environment[secret] = "postgresql://me:secret@host/db"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("1" if secret is None else "0")


def test_a_message_has_a_longest_length() -> None:
    lines = LineSplitter()
    with pytest.raises(ValueError, match="a line of more than"):
        for _ in range(LONGEST_LINE_BYTES // 2**20 + 2):
            lines.feed(bytes(2**20))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_segments_grow_unless_the_user_has_set_the_allocator(name: str) -> None:
    assert allocator_environment({"HOME": "/home"}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_environment({name: "max_split_size_mb:64"}) == {}
