"""A study that runs the user's function or loop, for notebooks and frameworks."""

import hashlib
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from bssearch.commands.best import Answer
from bssearch.commands.launch import HERE, Launch
from bssearch.commands.opening import GivenSpec, loaded, opened, program_of
from bssearch.errors import TrialStopped, UsageError, require, required
from bssearch.executors.base import Executor
from bssearch.executors.loops.called import CalledExecutor, Piece
from bssearch.executors.loops.own_loop import Trial
from bssearch.search.driver import Driver, Interrupts
from bssearch.search.finding import answer
from bssearch.spec import GIVEN_IN_PYTHON, OBJECTIVE, StudySpec

Objective = Callable[[Trial], object]


class Study:
    """A study in this process. ``objective``, or your code between `ask` and `tell`, trains each trial.

    ``spec``, a `StudySpec`, dict or path, must name no workload. Trials run one by one in the calling thread.

    ::

        def train(trial):
            model, loader = make_model(), make_loader(trial.micro_batch_size)
            for x, y in trial.batches(loader, evaluate=lambda: {"accuracy": accuracy(model)}):
                step(model, x, y, trial.learning_rate)

        answer = bssearch.Study("study.yaml", objective=train).run()
    """

    def __init__(self, spec: GivenSpec, objective: Objective | None = None, launch: Launch = HERE) -> None:
        spec, launch = loaded(spec, launch)
        require(
            spec.workload in {GIVEN_IN_PYTHON, OBJECTIVE},
            f"the spec of study {spec.name!r} names the workload {spec.workload!r}, but a Study runs an objective",
            hint="run a workload with bssearch.run_study(spec)",
        )
        self.spec = spec.model_copy(update={"workload": OBJECTIVE})
        self._objective = objective
        self._search = _Search(self.spec, launch, _revision(objective))
        self._asked: Piece | None = None
        # An unreferenced `Study` must end, because its trial would block other drivers.
        weakref.finalize(self, self._search.abandon).atexit = False

    def run(self) -> Answer:
        """Run the objective until the study ends; return the answer.

        Ctrl-C, SIGTERM or a kernel interrupt raises `InterruptedRunError`. The trial pauses at the next step if the
        loop calls `trial.state`; otherwise the trial ends. A new `Study` resumes the search.
        """
        objective = required(
            self._objective, "study.run() needs an objective", hint="give an objective: Study(spec, objective=train)"
        )
        with Interrupts(on_second=lambda: None, at_once=lambda: not self._search.stops_in_order()):
            return self._run(objective)

    def _run(self, objective: Objective) -> Answer:
        try:
            while (trial := self.ask()) is not None:
                try:
                    objective(trial)
                except TrialStopped:
                    self.tell(trial)
                except Exception as error:
                    self.tell(trial, error)
                else:
                    self.tell(trial)
        except KeyboardInterrupt:
            self.close()
            self._search.raise_error()
            raise
        except BaseException:
            self.close()
            raise
        return self.answer

    def ask(self) -> Trial | None:
        """Return the next trial, with all random generators seeded, or None once the study has ended.

        Trials that only time the loop can come first. Train these trials until ``trial.should_stop``, too. Raises
        any error that ends the study, and `UsageError` unless `tell` has ended the last trial.
        """
        require(self._asked is None, "call tell() before ask(), because only one trial runs at a time")
        piece = self._search.next_piece()
        if piece is None:
            self._search.join()
            self._search.raise_error()
            return None
        self._asked = piece
        return piece.begin()

    def tell(self, trial: Trial, error: BaseException | None = None) -> None:
        """Report a trial's end, or its ``error``; raise `UsageError` unless this is the running trial from `ask`."""
        if self._asked is None or self._asked.trial is not trial:
            raise UsageError(
                "tell() got a trial that has ended, or that ask() did not return last; call tell() once for each trial"
            )
        piece, self._asked = self._asked, None
        piece.end(error)

    @property
    def answer(self) -> Answer:
        """The answer of the ended study; raises `UsageError` if the study has not ended with an answer."""
        return required(
            self._search.answer,
            f"study {self.spec.name!r} has not ended with an answer",
            hint=f"for the answer so far, call bssearch.best({self.spec.name!r})",
        )

    def close(self) -> None:
        """Stop the search now, and keep the ended trials."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.let_go()
        self._search.interrupt()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Search:
    # Has no reference to `Study`, so that Python can collect a `Study`.
    def __init__(self, spec: StudySpec, launch: Launch, revision: str) -> None:
        self.answer: Answer | None = None
        self._spec = spec
        self._launch = replace(launch, make_executor=self._make_executor)
        self._revision = revision
        self._thread: threading.Thread | None = None
        self._executor: CalledExecutor | None = None
        self._driver: Driver | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None

    def next_piece(self) -> Piece | None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drive, name=f"bssearch study {self._spec.name}", daemon=True)
            self._thread.start()
        self._ready.wait()
        return None if self._executor is None else self._executor.next_piece()

    def stops_in_order(self) -> bool:
        if self._driver is None:
            return False
        self._driver.interrupts.ask()
        return True

    def interrupt(self) -> None:
        if self._thread is not None:
            self._ready.wait()
            self.abandon()
            self.join()

    def abandon(self) -> None:
        if self._executor is not None:
            self._executor.interrupt()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error from None

    def _drive(self) -> None:
        try:
            with opened(self._spec, self._launch, reports=True) as study:
                self._driver = study.driver()
                self._driver.run()
                self.answer = answer(study.store, self._spec.name)
        except BaseException as error:
            self._error = error
        finally:
            if self._executor is not None:
                self._executor.leave()
            self._ready.set()

    def _make_executor(self, spec: StudySpec, folder: Path) -> Executor:
        program = program_of(spec)
        assert program is not None, "an objective is a program"
        self._executor = CalledExecutor(
            program, spec.executor.device, spec.executor.threads, self._revision, self._launch.allow_busy
        )
        self._ready.set()
        return self._executor


def _revision(objective: Objective | None) -> str:
    if objective is None:
        return ""
    try:
        source = inspect.getsource(objective)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:12]
