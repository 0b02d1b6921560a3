"""The process in which a script of the user's own trains: ``python -m bssearch.integrations.script_host``.

Started by a worker. With ``--serve`` it imports what the script imports and then forks a process for each trial, so
that heavy imports are paid once; with ``--once`` it runs the script itself, once. A fork is safe only where nothing has
begun to compute: no CUDA context, and no thread beside the main one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

from bssearch.executors.lifeline import die_with_parent
from bssearch.executors.messages import TRIAL_VARIABLE

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphans of this process's descendants become its own children."""

_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def main() -> None:
    """Serve a worker until it hangs up, or run the script once."""
    parser = argparse.ArgumentParser(description="Runs a training script; started by bssearch itself.")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--serve", type=int, help="descriptor of the socket to the worker")
    parser.add_argument("--once", type=int, help="descriptor of the line of one trial")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    die_with_parent(given.parent)
    if given.once is not None:
        os._exit(run_script(given.script, given.arguments, given.once))
    serve(socket.socket(fileno=given.serve), given.script, given.arguments)


def serve(worker: socket.socket, script: str, arguments: list[str]) -> None:
    """Say whether trials may be forked; then fork one for each line that comes, and say how each ended."""
    become_subreaper()
    import bssearch.integrations.current  # noqa: F401 - with torch, which every trial needs

    import_packages_of(Path(script))
    reason = why_not_to_fork()
    gc.collect()
    gc.freeze()
    worker.sendall(json.dumps({"forks": reason is None, "reason": reason}).encode() + b"\n")
    if reason is not None:
        return
    while True:
        message, descriptors, _, _ = socket.recv_fds(worker, 1, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            worker.close()
            signal.signal(signal.SIGTERM, _leave)
            os.setpgid(0, 0)
            die_with_parent(os.getppid())
            os._exit(run_script(script, arguments, descriptors[0]))
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        os.close(descriptors[0])
        worker.sendall(json.dumps({"pid": child}).encode() + b"\n")
        _, status = os.waitpid(child, 0)
        end_descendants(child)
        worker.sendall(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def run_script(script: str, arguments: list[str], line: int) -> int:
    """Run a script as ``python script arguments`` would, with its line to the search; return its exit code."""
    from bssearch.integrations import current

    os.environ[TRIAL_VARIABLE] = str(line)
    session = current.session()
    assert session is not None, "the variable has just been set"
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
        error: BaseException | None = None
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        error = RuntimeError(f"the script left with exit code {left.code}") if code else None
    except BaseException as raised:
        error, code = raised, 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        session.ended(script, error)
    except BaseException:
        traceback.print_exc()
        return 1
    return code


def import_packages_of(script: Path) -> None:
    """Import the installed packages that a script imports at its top; what fails will fail in the script."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if _is_installed(name.partition(".")[0]):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def why_not_to_fork() -> str | None:
    """Return why a fork of this process would not be safe; None where it is."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "its imports begin to use CUDA"
    try:
        threads = len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return "this system does not say which threads run"
    return None if threads == 1 else f"its imports start {threads - 1} threads"


def become_subreaper() -> None:
    """Have orphans of this process's descendants become its children, so that they can be ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(group: int, keep: frozenset[int] = frozenset()) -> None:
    """Kill what is left of a process group, and of this process's descendants, those to ``keep`` excepted."""
    import psutil

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while left := [one for one in psutil.Process().children(recursive=True) if one.pid not in keep]:
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        with contextlib.suppress(ChildProcessError):
            for one in left:
                os.waitpid(one.pid, 0)
        psutil.wait_procs(left, timeout=1.0)


def _is_installed(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin in {"built-in", "frozen"} or str(found.origin).startswith(_PACKAGES))


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave at SIGTERM as at the end of the script: what it cleans up in ``finally`` is cleaned up."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
