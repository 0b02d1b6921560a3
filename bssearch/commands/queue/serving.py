"""One shift of a worker: a study is run in a thread of its own, and this says how it went."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from bssearch.analysis.headline import headline
from bssearch.commands.opening import Launch, opened
from bssearch.commands.run import run_opened
from bssearch.errors import (
    BSSearchError,
    DatabaseError,
    InterruptedRunError,
    LaunchError,
    NotFoundError,
    OtherDeviceError,
    TargetNotReachedError,
    UsageError,
)
from bssearch.history import History
from bssearch.queue.submission import SubmissionState
from bssearch.records import TrialRecord
from bssearch.search.listener import Listener
from bssearch.spec import StudySpec

REFUSED_FOR_S = 600.0
"""Seconds for which a worker leaves alone what it cannot run: a choice, so that a node that is repaired takes it."""

FAILED_FOR_S = 15.0
"""Seconds for which it leaves alone what a process or a device of its machine failed at; each time in a row for
`LONGER` times as long, up to `REFUSED_FOR_S`. Choices: a process that was killed once is no reason to go for long."""

LONGER = 4

AWAY_FOR_S = 60.0
"""Seconds for which it does after the database was away for longer than anybody waits: a choice."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class End:
    """How a shift ended: the state of the submission then, why, and for how long this worker leaves it alone.

    What has ``failed_here`` may do so again: then for longer.
    """

    state: SubmissionState
    reason: str = ""
    alone_seconds: float = 0.0
    failed_here: bool = False

    def alone_after(self, failures: int) -> float:
        """Return for how many seconds it is left alone after so many ``failures`` in a row."""
        return min(REFUSED_FOR_S, self.alone_seconds * LONGER ** (failures - 1)) if failures else self.alone_seconds


class Meter(Listener):
    """Counts the slot seconds of a shift: those of its trials, and those without a trial as of one.

    It tells the lines of a run.
    """

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._since = clock()
        self._used = 0.0

    def take(self) -> float:
        """Return the slot seconds since this was last asked."""
        with self._lock:
            self._count()
            used, self._used = self._used, 0.0
            return used

    def note(self, message: str) -> None:
        """Tell a line, but not what to press: nobody sits at a worker."""
        if "Ctrl-C" not in message:
            self._tell(message)

    def started(self, trial: TrialRecord, history: History) -> None:
        """Count a trial from now on."""
        with self._lock:
            self._count()
            self._running.add(trial.number)
        self._tell(f"trial {trial.number} runs: batch {trial.configuration.batch_size}")

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Count a trial no more."""
        with self._lock:
            self._count()
            self._running.discard(trial.number)
        self._tell(f"trial {trial.number} {trial.state}: {trial.outcome.reason if trial.outcome else ''}")

    def _count(self) -> None:
        now = self._clock()
        self._used += (now - self._since) * max(1, len(self._running))
        self._since = now


class ServedStudy:
    """A study that is run in a thread, by a launch with a shift; `end` is there once it ``is_over``.

    ``device_name`` is known once the study is open.
    """

    def __init__(self, spec: StudySpec, launch: Launch, tell: Tell) -> None:
        self._spec, self._launch, self._tell = spec, launch, tell
        self.device_name: str | None = None
        self.end: End | None = None
        self._thread = threading.Thread(target=self._run, name=f"bssearch serves {spec.name}", daemon=True)

    def start(self) -> None:
        """Run the study from now on."""
        self._thread.start()

    def is_over(self, wait_seconds: float) -> bool:
        """Return whether it has ended, waiting a little for that."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with opened(self._spec, self._launch) as study:
                self.device_name = study.environment.device_name
                found = run_opened(study)
            self.end = End(SubmissionState.DONE, headline(found))
        except BaseException as error:
            self.end = ended_by(error)
            if not isinstance(error, BSSearchError):
                self._tell("".join(traceback.format_exception(error)))


def ended_by(error: BaseException) -> End:
    """Return what an error makes of a submission.

    What is wrong with what was asked ends it; of what is wrong with this worker's machine others know nothing.
    """
    if isinstance(error, InterruptedRunError | KeyboardInterrupt):
        return End(SubmissionState.WAITING)
    if isinstance(error, TargetNotReachedError):
        return End(SubmissionState.DONE, str(error))
    if isinstance(error, LaunchError):
        return End(SubmissionState.WAITING, str(error), FAILED_FOR_S, failed_here=True)
    if isinstance(error, OtherDeviceError):
        return End(SubmissionState.WAITING, str(error), REFUSED_FOR_S)
    if isinstance(error, DatabaseError):
        return End(SubmissionState.WAITING, str(error), AWAY_FOR_S)
    if isinstance(error, UsageError | NotFoundError):
        return End(SubmissionState.FAILED, str(error))
    return End(SubmissionState.WAITING, f"{type(error).__name__}: {error}", REFUSED_FOR_S)
