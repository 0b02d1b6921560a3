"""Reasons for failed trials and workers."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bssearch.errors import BSSearchError, WorkloadError
from bssearch.records import TrialState

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 40  # log lines shown for a dead worker

_LOG_BYTES = 48 * 1024  # output stored per trial: below the longest stored text, which would cut it again

_WORDS_OF_NO_MEMORY = (
    "std::bad_alloc",  # C++, before it aborts
    "Cannot allocate memory",  # strerror(ENOMEM)
    "libgomp: Out of memory",
    "MemoryError",  # Python's, out of a thread or while it starts
)

_WORDS_OF_PROGRAMS = (
    *_WORDS_OF_NO_MEMORY,
    "CUDA out of memory",  # PyTorch
    "CUDA_ERROR_OUT_OF_MEMORY",  # the CUDA driver
    "RESOURCE_EXHAUSTED",  # TensorFlow and JAX
)

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_SHIPPED_WORKLOADS = _PACKAGE + "workloads" + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe_exception(error: BaseException) -> str:
    """Return ``ExceptionType: message (file:line: code)`` of the user's innermost frame, else of a library's."""
    if isinstance(error, BSSearchError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if "more than 1 value per channel" in text:  # torch's words for batch normalisation over one value
        text += f"; the layer {_innermost_layer(error)} got one sample: use drop_last=True, or another batch size"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if _is_users(frame.filename)] or frames
    return f"{text} ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else text


def _innermost_layer(error: BaseException) -> str:
    """Kind of the layer, after its name in the outermost module."""
    layers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [one for one in layers if one is not None and hasattr(one, "named_modules")]
    if not modules:
        return "of batch normalisation"
    name = next((name for name, one in modules[0].named_modules() if one is modules[-1]), "")
    return f"{repr(name) if name else ''} ({type(modules[-1]).__name__})".lstrip()


def _is_users(filename: str) -> bool:
    return filename.startswith(_SHIPPED_WORKLOADS) or not filename.startswith(("<", _PACKAGE, *_LIBRARIES))


def describe_exit(return_code: int) -> str:
    """Describe an exit code; negative for a signal."""
    if return_code >= 0:
        return f"worker exited with code {return_code}"
    try:
        name = signal.Signals(-return_code).name
    except ValueError:
        name = "a signal"
    return f"worker killed by {name} (signal {-return_code})"


@dataclass(frozen=True, slots=True)
class Death:
    """A worker's ``return_code`` (negative for a signal) and its cause.

    ``killed_by_kernel``: whether the OOM killer acted, None if unknown. ``verdict`` takes precedence: we killed the
    process or its machine failed.
    """

    return_code: int
    killed_by_kernel: bool | None = None
    verdict: tuple[TrialState, str] | None = None

    @classmethod
    def since(cls, kernel_kills_before: int | None, return_code: int) -> Self:
        """A local process's exit, given `kernel_memory_kills` at its start."""
        kills = kernel_memory_kills()
        if kernel_kills_before is None or kills is None:
            return cls(return_code)
        return cls(return_code, killed_by_kernel=kills > kernel_kills_before)

    def judged(self, last_words: str | None = None) -> tuple[TrialState, str]:
        """State and reason of the trial; ``last_words`` come from `words_of_no_memory`."""
        if self.verdict is not None:
            return self.verdict
        reason = describe_exit(self.return_code)
        if self.return_code == -signal.SIGKILL and self.killed_by_kernel is not None:
            if self.killed_by_kernel:
                return TrialState.OOM, f"{reason} by the kernel, out of host memory"
            return TrialState.FAILED, f"{reason}, from outside"
        if last_words is not None and self.return_code not in (0, -signal.SIGKILL):
            return TrialState.OOM, f"{reason}, out of memory: {last_words}"
        return TrialState.FAILED, reason


def judge_exit(
    return_code: int, kernel_kills_before: int | None, last_words: str | None = None
) -> tuple[TrialState, str]:
    """State and reason of a trial whose local process exited; see `Death.since`."""
    return Death.since(kernel_kills_before, return_code).judged(last_words)


def judge_command(code: int, kernel_kills_before: int | None, printed: str) -> tuple[TrialState, str]:
    """State and reason of a command; shells report signals as 128 + number."""
    if code == 128 + signal.SIGKILL:
        code = -signal.SIGKILL
    state, reason = judge_exit(code, kernel_kills_before, _last_line_with(_WORDS_OF_PROGRAMS, printed))
    return state, reason.replace("worker", "the command", 1)


def code_has_changed(what: str, before: str | None, now: str | None) -> WorkloadError:
    """Error for changed code (None: no revision)."""
    return WorkloadError(
        f"{what} has changed since the run began ({before} → {now or 'no file'}): later trials would not compare "
        "with earlier ones",
        hint="undo the change and run again, or rename the study; "
        "`run --allow-changed-workload` if the change does not matter",
    )


def no_noise_scale(what: str) -> WorkloadError:
    """Error: only workloads have noise scales."""
    return WorkloadError(f"the gradient noise scale needs a workload: {what} does not expose its loss")


def kernel_memory_kills() -> int | None:
    """The kernel's count of OOM kills."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
    return None if found is None else int(found[1])


def words_of_no_memory(log: Path, start: int) -> str | None:
    """Last allocation failure after byte ``start``."""
    return _last_line_with(_WORDS_OF_NO_MEMORY, _last_bytes(log, start))


def _last_line_with(any_of: tuple[str, ...], text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if any(words in line for words in any_of)), None)


def tail(log: Path, start: int) -> str:
    """Last lines after byte ``start``."""
    return "\n".join(_last_bytes(log, start).splitlines()[-_TAIL_LINES:])


def _last_bytes(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def printed(log: Path, start: int) -> str:
    """Log after byte ``start``; its start and end above 64 KiB."""
    with log.open("rb") as file:
        size = file.seek(0, 2) - start
        file.seek(start)
        if size <= _LOG_BYTES:
            return file.read().decode(errors="replace")
        head = file.read(_LOG_BYTES // 2)
        file.seek(-(_LOG_BYTES // 2), 2)
        left_out = f"\n… {size - _LOG_BYTES} bytes left out …\n".encode()
        return (head + left_out + file.read()).decode(errors="replace")
