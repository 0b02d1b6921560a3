"""Serve the queue on a node. In a *shift*, a worker runs one study."""

import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from bssearch.analysis.headline import headline
from bssearch.commands.launch import HERE, TURN_SECONDS, Launch
from bssearch.commands.opening import opened
from bssearch.commands.queue.submissions import settle_cancelled, settle_left_behind, why_not_offered
from bssearch.commands.run import run_opened
from bssearch.errors import (
    BSSearchError,
    DatabaseError,
    InterruptedRunError,
    LaunchError,
    NotFoundError,
    OtherDeviceError,
    SpecError,
    TargetNotReachedError,
    UsageError,
    require,
    with_hint,
)
from bssearch.records import TrialRecord
from bssearch.search.driver import SIGNALS, Listener, Shift
from bssearch.search.history import History
from bssearch.search.leases import heartbeat, this_driver
from bssearch.settings import user_name
from bssearch.spec import StudySpec, load_spec
from bssearch.spec.templates import Submission, SubmissionState, Templates, WorkerRecord, check_tags, load_templates
from bssearch.storage.repository import Store, open_store

STOPS_WITHIN_S = 25.0  # seconds to save trials before bssearch kills them; schedulers allow at least 30 s

LEAVES_WITHIN_S = 3.0  # seconds after STOPS_WITHIN_S until the process ends

_LOOK_SECONDS = 0.1


class Stop:
    """Handles SIGTERM and Ctrl-C by calling ``obey`` in a thread.

    If the ``with`` block runs ``within`` seconds longer, calls ``kill``. If the block runs `LEAVES_WITHIN_S` more
    seconds, ends the process. Outside the main thread, `Stop` handles no signal; call `ask` instead.
    """

    def __init__(self, obey: Callable[[], None], kill: Callable[[], None], within: float = STOPS_WITHIN_S) -> None:
        self._obey, self._kill, self._within = obey, kill, within
        self._asked_at: float | None = None
        self._is_over = threading.Event()
        self._previous: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._guard, name="bssearch worker's stop", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, lambda *_: self.ask()) for number in SIGNALS}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def is_asked(self) -> bool:
        return self._asked_at is not None

    def ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_SECONDS, left))

    def _guard(self) -> None:
        while self._asked_at is None:
            if self._is_over.wait(_LOOK_SECONDS):
                return
        self._obey()
        if self._is_over.wait(self._asked_at + self._within - time.monotonic()):
            return
        sys.stderr.write(f"the worker did not stop within {self._within:g} s; killing the running trials\n")
        threading.Thread(target=self._kill, daemon=True).start()
        if not self._is_over.wait(LEAVES_WITHIN_S):
            os._exit(1)


# Seconds to skip a study that this node cannot run; the operator may repair the node in this time.
REFUSED_FOR_S = 600.0

# Seconds to skip a study after a process or device failed. Each failure in a row multiplies the seconds by
# `LONGER`, up to `REFUSED_FOR_S`.
FAILED_FOR_S = 15.0

LONGER = 4

AWAY_FOR_S = 60.0  # seconds until the next attempt after the database was unreachable

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class End:
    """The outcome of a shift: the submission's new state and the reason."""

    state: SubmissionState
    reason: str = ""
    alone_seconds: float = 0.0  # seconds to skip the study
    failed_here: bool = False  # True if failures in a row lengthen the time

    def alone_after(self, failures: int) -> float:
        return min(REFUSED_FOR_S, self.alone_seconds * float(LONGER) ** max(0, failures - 1))


class Meter(Listener):
    """Counts a shift's slot seconds; while no trial runs, counts one slot."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._since = clock()
        self._used = 0.0

    def take(self) -> float:
        """Return the slot seconds since the last call."""
        with self._lock:
            self._count()
            used, self._used = self._used, 0.0
            return used

    def note(self, message: str) -> None:
        if "Ctrl-C" not in message:
            self._tell(message)

    def started(self, trial: TrialRecord, history: History) -> None:
        with self._lock:
            self._count()
            self._running.add(trial.number)
        self._tell(f"trial {trial.number} runs: batch {trial.configuration.batch_size}")

    def ended(self, trial: TrialRecord, history: History) -> None:
        with self._lock:
            self._count()
            self._running.discard(trial.number)
        self._tell(f"trial {trial.number} {trial.state}: {trial.outcome.reason if trial.outcome else ''}")

    def _count(self) -> None:
        now = self._clock()
        self._used += (now - self._since) * max(1, len(self._running))
        self._since = now


class ServedStudy:
    """Runs a study in a thread."""

    def __init__(self, spec: StudySpec, launch: Launch, tell: Tell) -> None:
        self._spec, self._launch, self._tell = spec, launch, tell
        self.device_name: str | None = None
        self.end: End | None = None
        self._thread = threading.Thread(target=self._run, name=f"bssearch serves {spec.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_over(self, wait_seconds: float) -> bool:
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with opened(self._spec, self._launch, reports=True) as study:
                self.device_name = study.environment.device_name
                found = run_opened(study)
            self.end = End(SubmissionState.DONE, headline(found))
        except BaseException as error:
            self.end = ended_by(error)
            if not isinstance(error, BSSearchError):
                self._tell("".join(traceback.format_exception(error)))


def ended_by(error: BaseException) -> End:
    """Return a shift's outcome; a bad request fails the submission, but a problem of this machine does not."""
    said = with_hint(error) if isinstance(error, BSSearchError) else ""
    ends: dict[type[BaseException] | tuple[type[BaseException], ...], End] = {  # the first match counts
        (InterruptedRunError, KeyboardInterrupt): End(SubmissionState.WAITING),
        TargetNotReachedError: End(SubmissionState.DONE, said),
        LaunchError: End(SubmissionState.WAITING, said, FAILED_FOR_S, failed_here=True),
        OtherDeviceError: End(SubmissionState.WAITING, said, REFUSED_FOR_S),
        DatabaseError: End(SubmissionState.WAITING, said, AWAY_FOR_S),
        (UsageError, NotFoundError): End(SubmissionState.FAILED, said),
        BaseException: End(SubmissionState.WAITING, f"{type(error).__name__}: {error}", REFUSED_FOR_S),
    }
    return next(end for kinds, end in ends.items() if isinstance(error, kinds))


LOOK_SECONDS = 2.0  # poll interval for paused or cancelled studies and new work

WAITS_AT_MOST_S = 5.0  # most seconds that a worker stays with a study whose trials all run in other drivers

BACK_AFTER_S = 15.0  # seconds until the worker returns to such a study

SETTLE_SECONDS = 15.0  # interval between checks for cancelled studies of killed workers

_TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The settings of a worker; ``slots`` and ``device`` override the specs.

    Example: ``bssearch.run_worker("templates.yaml", serving=bssearch.Serving(tags=("a100",), until_empty=True))``
    """

    tags: tuple[str, ...] = ()  # the worker serves no submission with other tags
    slots: int | Literal["auto"] | None = None
    device: str | None = None
    turn_seconds: float = TURN_SECONDS  # seconds until a study yields to a higher priority
    until_empty: bool = False

    def __post_init__(self) -> None:
        check_tags(self.tags)
        require(not isinstance(self.slots, int) or self.slots >= 1, f"slots = {self.slots} must be at least 1, or auto")
        require(0 < self.turn_seconds < math.inf, f"turn_seconds = {self.turn_seconds:g} must be a finite number > 0")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides of the specs in the form of ``--set``."""
        slots = () if self.slots is None else (f"executor.slots={self.slots}",)
        return slots if self.device is None else (*slots, f"executor.device={self.device}")


ALL = Serving()


def run_worker(
    templates: Path | str, launch: Launch = HERE, serving: Serving = ALL, *, tell: Tell = lambda line: None
) -> None:
    """Serve the queue with a file's templates until SIGTERM or Ctrl-C, which pause or stop trials.

    If ``serving.until_empty``, also ends when the queue has no study that this worker can serve soon. Serves one study
    at a time, by priority, then by age. Raises `UsageError` or `NotFoundError` for an unusable file, and
    `DatabaseError` if the database is not writable at the start.

    Example: ``bssearch.run_worker("templates.yaml", bssearch.Launch(db="sqlite:///team.db"))``
    """
    offered = load_templates(Path(templates), serving.overrides)
    with open_store(launch.db, notify=tell) as store:
        QueueWorker(offered, serving, store, launch, tell).run()


class QueueWorker:
    """Serves the queue in one process."""

    def __init__(self, templates: Templates, serving: Serving, store: Store, launch: Launch, tell: Tell) -> None:
        self._templates, self._serving, self._store, self._launch = templates, serving, store, launch
        self._tell = tell
        self._record = _record(templates, serving)
        self._name = self._record.name
        self._alone_until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._next_settling = time.monotonic()
        self._unsettled: dict[str, str] = {}
        self._shift = Shift()
        self._stop = Stop(self._obey, lambda: self._shift.kill())

    def run(self) -> None:
        self._store.queue.keep_worker(self._record)
        offered = ", ".join(self._templates)
        tags = ", ".join(self._record.tags) or "no tags"
        self._tell(f"serving {self._store.masked_url}: templates {offered}; {tags}")
        with self._stop:
            with heartbeat(partial(self._store.queue.beat, self._name)):
                self._serve()
            try:
                self._store.queue.beat(self._name, left=True)
            except DatabaseError as error:
                self._tell(f"cannot mark this worker as stopped in the queue: {error}")
        self._tell("the worker has stopped")

    def _serve(self) -> None:
        while not self._stop.is_asked:
            try:
                self._settle()
                if self._serve_next():
                    continue
                if self._serving.until_empty and not self._may_come():
                    self._tell("the queue has no study that this worker can serve soon")
                    return
                self._stop.wait(LOOK_SECONDS)
            except Exception as error:  # one bad row must not block the queue
                is_away = isinstance(error, DatabaseError)
                problem = f"the queue is unavailable: {error}" if is_away else f"{type(error).__name__}: {error}"
                self._tell(f"retrying in {AWAY_FOR_S:g} s: {problem}")
                self._stop.wait(AWAY_FOR_S)

    def _settle(self) -> None:
        if time.monotonic() >= self._next_settling:
            # If settling fails, the worker still serves the queue and settles again later.
            self._next_settling = time.monotonic() + AWAY_FOR_S + SETTLE_SECONDS
            problems = settle_left_behind(self._store)
            for study, problem in problems.items():
                if problem != self._unsettled.get(study):
                    self._tell(f"{study}: cancelled, but ending the remaining trials failed: {problem}")
            self._unsettled = problems
            self._next_settling = time.monotonic() + SETTLE_SECONDS

    def _obey(self) -> None:
        self._tell("stop requested: pausing the trials")
        self._shift.interrupt()
        if self._store.patience.is_waiting:
            self._store.patience.end()

    def _serve_next(self) -> bool:
        one = self._store.queue.begin_shift(self._name, self._eligible())
        if one is None:
            return False
        meter = Meter(lambda line: self._tell(f"{one.name}: {line}"))
        before = self._record
        end = self._served(one, meter)
        self._failures[one.name] = self._failures.get(one.name, 0) + 1 if end.failed_here else 0
        alone_seconds = end.alone_after(self._failures[one.name])
        self._alone_until[one.name] = time.monotonic() + alone_seconds
        is_left = end.reason and end.state is SubmissionState.WAITING
        reason = f"on {self._record.host}: {end.reason}" if is_left else end.reason
        self._store.queue.end_shift(self._name, meter.take(), end.state, reason)
        if self._record != before:
            self._store.queue.keep_worker(self._record)  # the device is now known
        found = self._found(one.name)
        if found is None:
            self._tell(f"{one.name}: deleted")
            return True
        if found.state is SubmissionState.CANCELLED:
            settle_cancelled(self._store, one.name)
        reason = end.reason or found.reason
        alone = f" (this worker skips the study for {alone_seconds:g} s)" if alone_seconds else ""
        self._tell(f"{one.name}: {found.state}{reason and f': {reason}'}{alone}")
        return True

    def _eligible(self) -> set[str]:
        now = time.monotonic()
        self._alone_until = {name: until for name, until in self._alone_until.items() if until > now}
        return {one.name for one in self._servable() if one.name not in self._alone_until}

    def _servable(self) -> list[Submission]:
        tags = {*self._record.tags}
        return [
            one
            for one in self._store.queue.submissions()
            if one.state is SubmissionState.WAITING and one.template in self._templates and tags >= {*one.tags}
        ]

    def _may_come(self) -> bool:
        soon = time.monotonic() + BACK_AFTER_S
        return any(self._alone_until.get(one.name, 0.0) <= soon for one in self._servable())

    def _served(self, one: Submission, meter: Meter) -> End:
        template = self._templates[one.template]
        try:
            load_spec(template.spec, self._serving.overrides)
        except (SpecError, NotFoundError) as error:  # the operator changed the file since the start
            return End(
                SubmissionState.WAITING, f"template {one.template!r} is unusable: {with_hint(error)}", REFUSED_FOR_S
            )
        try:
            spec = template.study(one.name, one.values, self._serving.overrides)
        except UsageError as error:
            return self._refused(one, error)
        self._shift = shift = Shift()
        if self._stop.is_asked:
            return End(SubmissionState.WAITING)
        self._tell(f"{one.name}: serving (template {one.template}, owner {one.owner})")
        launch = replace(
            self._launch, folder=template.spec.resolve().parent, listener=meter, progress=False, shift=shift
        )
        study = ServedStudy(spec, launch, lambda line: self._tell(f"{one.name}: {line}"))
        study.start()
        alone = self._watch(one, study, shift, meter)
        self._record = replace(self._record, device_name=study.device_name or self._record.device_name)
        end = study.end or End(SubmissionState.WAITING)
        return replace(end, alone_seconds=max(alone, end.alone_seconds))

    def _refused(self, one: Submission, error: UsageError) -> End:
        others = [worker for worker in self._store.queue.workers() if worker.is_here and worker.name != self._name]
        if not others or why_not_offered(others, one.template, one.values) is not None:
            return End(SubmissionState.FAILED, with_hint(error))
        return End(SubmissionState.WAITING, with_hint(error), REFUSED_FOR_S)

    def _watch(self, one: Submission, study: ServedStudy, shift: Shift, meter: Meter) -> float:
        turn_ends = math.inf  # the turn begins when the study is open, so that loading takes no part of the turn
        next_look = time.monotonic() + LOOK_SECONDS
        alone, is_stopping = 0.0, False
        while not study.is_over(_TICK_SECONDS):
            now = time.monotonic()
            if turn_ends == math.inf and study.device_name is not None:
                turn_ends = now + self._serving.turn_seconds
            if self._stop.is_asked:
                shift.interrupt()  # repeated, because a loading study may have started a process since
                continue
            if now < next_look and now < turn_ends:
                continue
            next_look = now + LOOK_SECONDS
            try:
                found = self._found(one.name)
                is_another = found is not None and found.submitted_at != one.submitted_at
                if found is None or is_another or found.state is not SubmissionState.WAITING:
                    if not is_stopping:
                        what = "submitted again" if is_another else found.state if found else "deleted"
                        self._tell(f"{one.name}: {what}; pausing or stopping the running trials")
                    is_stopping = True
                    shift.interrupt()
                elif shift.is_ending:
                    continue
                elif now >= turn_ends:
                    turn_ends += self._serving.turn_seconds
                    if not self._store.queue.renew_shift(self._name, self._eligible(), meter.take()):
                        self._tell(f"{one.name}: yields to another study")
                        shift.end()
                elif shift.seconds_waited > WAITS_AT_MOST_S and self._eligible() - {one.name}:
                    self._tell(f"{one.name}: other drivers run the remaining trials")
                    alone = BACK_AFTER_S
                    shift.end()
            except DatabaseError as error:
                self._tell(f"{one.name}: the queue is unavailable: {error}")
                next_look = now + AWAY_FOR_S
        return alone

    def _found(self, name: str) -> Submission | None:
        try:
            return self._store.queue.submission(name)
        except NotFoundError:
            return None


def _record(templates: Templates, serving: Serving) -> WorkerRecord:
    return WorkerRecord(
        name=this_driver(),
        user=user_name(),
        host=socket.gethostname(),
        tags=serving.tags,
        slots=str(serving.slots or "as each spec says"),
        device_name=None,
        templates=templates.offered(),
        seen_at=datetime.now(UTC),
        left_at=None,
        serving=None,
        serving_since=None,
        is_here=True,
    )
