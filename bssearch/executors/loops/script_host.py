"""The process that runs a training script: ``python -m bssearch.executors.loops.script_host``.

With ``--serve``, the process imports the script's packages once and forks a process for each rank. If CUDA or other
threads make a fork unsafe, the process restarts without the imports and starts new processes (``--once``). When the
worker ends, the process kills all its descendants.
"""

import argparse
import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from bssearch.errors import TrialStopped, WorkloadError
from bssearch.executors.base import TRIAL_VARIABLE
from bssearch.executors.process import LIBRARIES, become_subreaper, die_with_parent, end_descendants, outlive_parent
from bssearch.executors.programs.script import HOST
from bssearch.records import MAKE_TRAINER

TICK_SECONDS = 0.02  # seconds between checks on a trial's process, because each check takes microseconds

LEAVE_SECONDS = 5.0  # seconds for the other ranks to end after a rank's end, because gloo notices a lost rank at once

USAGE = 2  # exit code of argparse for missing arguments

NO_LINE = -1  # the line of ranks other than rank 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a training script. Only bssearch starts this program.")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--serve", type=int, help="file descriptor of the socket to the worker")
    parser.add_argument("--anew", help="reason not to fork")
    parser.add_argument("--once", type=int, help="file descriptor of one trial's connection")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    die_with_parent(given.parent)
    if given.once is not None:
        os._exit(run_script(given.script, given.arguments, given.once))
    worker = socket.socket(fileno=given.serve)
    if given.anew is None and (reason := prepare_to_fork(Path(given.script.removesuffix(MAKE_TRAINER)))) is not None:
        # Drop the imports.
        worker.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, "-P", "-m", HOST, "--anew", reason, *sys.argv[1:]])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The worker has ended.
        serve(worker, given.script, given.arguments, given.anew)


def prepare_to_fork(script: Path) -> str | None:
    """Import a script's packages. Returns the reason if forking is unsafe."""
    import torch._dynamo  # or else the first optimizer of every trial imports torch._dynamo for seconds

    import bssearch.executors.loops.current  # noqa: F401 - imports torch, which every trial needs

    import_packages_of(script)
    gc.collect()
    gc.freeze()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "the imports initialise CUDA"
    threads = psutil.Process().num_threads()
    return None if threads == 1 else f"the imports start other threads ({threads - 1})"


def serve(worker: socket.socket, script: str, arguments: list[str], anew: str | None) -> None:
    """Run the script once per connection from the worker, and report each exit code."""
    become_subreaper()
    outlive_parent()  # the socket shows the worker's end
    worker.set_inheritable(False)
    _tell(worker, {"anew": anew})
    while True:
        message, descriptors, _, _ = socket.recv_fds(worker, 16, 1)
        if not message:
            return
        (line,) = descriptors
        group = 0  # rank 0 leads the group of all ranks
        ranks: list[int] = []
        try:
            for variables in variables_of_ranks(int(message)):
                process = (script, arguments, NO_LINE if ranks else line, variables, group)
                ranks.append(_forked(worker, *process) if anew is None else _started(*process))
                group = ranks[0]
            os.close(line)
            _tell(worker, {"pid": group})
            code = _waited_for(ranks, worker)
        finally:
            if group:  # else `fork` failed, and group 0 would be this process's own
                end_descendants(group)
        if code is None:
            return
        _tell(worker, {"exit": code})


def variables_of_ranks(ranks: int) -> list[dict[str, str]]:
    """Return each rank's environment variables with torchrun's names."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return [{**together, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _forked(
    worker: socket.socket, script: str, arguments: list[str], line: int, variables: dict[str, str], group: int
) -> int:
    server = os.getpid()
    child = os.fork()
    if child == 0:
        worker.close()
        os.setpgid(0, group)
        die_with_parent(server)
        os.environ.update(variables)
        os._exit(run_script(script, arguments, line))
    with contextlib.suppress(OSError):
        os.setpgid(child, group or child)
    return child


def _started(script: str, arguments: list[str], line: int, variables: dict[str, str], group: int) -> int:
    if line != NO_LINE:
        os.set_inheritable(line, True)
    host = [sys.executable, "-P", "-m", HOST, "--parent", str(os.getpid()), "--once", str(line)]
    return os.posix_spawn(
        sys.executable, [*host, script, "--", *arguments], {**os.environ, **variables}, setpgroup=group
    )


def _waited_for(ranks: list[int], worker: socket.socket) -> int | None:
    codes: dict[int, int] = {}
    deadline = math.inf
    while len(codes) < len(ranks) and time.monotonic() < deadline:
        for rank, child in enumerate(ranks):
            ended, status = (0, 0) if rank in codes else os.waitpid(child, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if rank == 0 or codes[rank]:
                    deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
        if len(codes) == len(ranks):
            break
        if select.select([worker], [], [], TICK_SECONDS)[0] and not worker.recv(1, socket.MSG_PEEK):
            return None  # the worker has ended
    if 0 not in codes:
        os.kill(ranks[0], signal.SIGKILL)
        os.waitpid(ranks[0], 0)
    return codes[0] if 0 in codes else next(code for code in codes.values() if code)


def _tell(worker: socket.socket, message: dict[str, Any]) -> None:
    worker.sendall(json.dumps(message).encode() + b"\n")


def run_script(script: str, arguments: list[str], line: int) -> int:
    """Run a script like ``python script arguments``, or fit a ``file.py:make_trainer``. Returns the exit code."""
    from bssearch.executors.loops import current

    if line != NO_LINE:
        os.environ[TRIAL_VARIABLE] = str(line)
    session = current.session()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    code = 0
    try:
        if script.endswith(MAKE_TRAINER):
            assert session is not None, "cannot fit a Trainer without a connection to the search"
            current.train_made(script, session.assign.program.default)
        else:
            runpy.run_path(script, run_name="__main__")
        error: BaseException | None = None
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        arguments_hint = "give the script's arguments in the spec's `arguments:`" if code == USAGE else None
        error = WorkloadError(f"the script exited with code {left.code}", hint=arguments_hint) if code else None
    except BaseException as raised:
        error, code = raised, 0 if isinstance(raised, TrialStopped) else 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        if session is not None:
            session.ended(script, error)
        elif error is not None and code:
            traceback.print_exception(error)
        clean_up()
    except BaseException:
        traceback.print_exc()
        return 1
    return code


def clean_up() -> None:
    # A real exit would destroy all modules, which takes a third of a second per trial.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for one in gc.get_objects():
        if issubclass(type(one), io.IOBase) and not one.closed:
            with contextlib.suppress(OSError, ValueError):
                one.flush()


def import_packages_of(script: Path) -> None:
    """Import a script's installed packages. Errors have no effect, because the script repeats the imports."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if _is_installed(name.partition(".")[0]):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def _is_installed(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin in {"built-in", "frozen"} or str(found.origin).startswith(LIBRARIES))


if __name__ == "__main__":
    main()
