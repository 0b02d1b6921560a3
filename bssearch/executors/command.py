"""A command of the user's own, in any language: described, measured and trained by what it reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.base import Program
from bssearch.executors.command_process import CommandProcess
from bssearch.executors.failures import describe_exit, judge_exit, kernel_memory_kills
from bssearch.executors.messages import (
    Load,
    Measured,
    MeasureMemory,
    MeasureNoise,
    MeasureStepTime,
    MemoryMeasured,
    StepTimeMeasured,
)
from bssearch.executors.reported_trial import ReportedTrial
from bssearch.executors.reports import LOSS, Report
from bssearch.records import (
    Configuration,
    MemoryUse,
    MetricInfo,
    ModelDescription,
    Observation,
    StepTime,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
    is_metric,
)
from bssearch.spec.command_line import filled, places_of, values_of

if TYPE_CHECKING:
    from bssearch.training.loop import Stop

TICK_SECONDS = 0.05
"""How often it is looked at whether a program is to stop: a choice, small beside a trial."""

REPORTS_TIMED = 4
"""Reports between which steps are timed, at least: a choice."""

SECONDS_TIMED = 1.0
"""Seconds of reports between which steps are timed, at least: a choice; the clock is that of another process."""

FEW_STEPS, MANY_STEPS = 2, 20
"""Steps between the evaluations of the two runs that tell the time of a step from that of an evaluation: a choice."""

MEMORY_STEPS = 3
"""Steps after which a micro-batch size fits: those of bssearch's own loop."""

OWN = "own"
"""Stands for the precision and the compile mode of a program, which are its own business."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the steps of a run took, by its reports: all that it did, and whose seconds they are."""

    seconds: float
    steps: int
    is_own: bool


class LoadedCommand:
    """A command on a device, for a worker as `bssearch.executors.loaded.LoadedWorkload` is.

    Raises `WorkloadError` where a file that the command names has changed since the run began, `UsageError` for a name
    in braces that the study does not have, and `LaunchError`.
    """

    def __init__(self, load: Load) -> None:
        from bssearch.executors.devices import choose_device

        assert load.program is not None and load.program.command, "a worker loads a command where there is one"
        self._program = load.program
        self._folder = Path(load.folder)
        self._threads = load.threads
        self.memory_limit_bytes = load.memory_limit_bytes
        self.device = str(choose_device(load.device, load.slot, load.allow_busy))
        self.revision = revision_of(load.program, self._folder)
        self._takes = places_of(load.program.command)
        if load.revision not in {None, self.revision}:
            raise WorkloadError(
                f"a file that the command names has changed since the run began ({load.revision} → {self.revision}): "
                "what it trains now does not compare with the trials before",
                hint="undo the change and run it again, or give the study another name; "
                "`run --allow-changed-workload` where the change does not matter",
            )

    def describe(self) -> WorkloadDescription:
        """Run the default until it reports the target's metric; return what it offers. Raises `WorkloadError`."""
        import torch

        from bssearch.training.environment import describe_device

        metrics: dict[str, float] = {}
        first: Report | None = None
        for report in self._until_it_ends(self._program.default, evaluate_every=1):
            first = first or report
            metrics |= {name: value for name, value in report.values.items() if name != LOSS}
            if self._program.metric in metrics:
                break
        if first is None:
            raise WorkloadError(f"the command ended without a report{self._hint_of_reports()}")
        if self._program.metric not in metrics:
            offered = ", ".join(sorted(metrics)) or "no metric"
            raise WorkloadError(f"the command reports {offered}; the study's target is of {self._program.metric!r}")
        untrained = {name: value if is_metric(value) else None for name, value in metrics.items()}
        return WorkloadDescription(
            train_samples=None,
            validation_samples=None,
            test_samples=None,
            metrics={name: MetricInfo() for name in metrics},
            environment=describe_device(
                torch.device(self.device),
                precision=OWN,
                compile_mode=OWN,
                memory_limit_bytes=self.memory_limit_bytes,
                workload_revision=self.revision,
            ),
            model=ModelDescription(
                parameters=None, batch_norm_layers=0, initial_metrics=untrained if first.step == 0 else {}
            ),
        )

    def measure(self, command: MeasureStepTime | MeasureMemory | MeasureNoise) -> Measured:
        """Measure what is asked; raise `WorkloadError` where the program fails, and for a gradient noise scale."""
        match command:
            case MeasureStepTime(request=request):
                return StepTimeMeasured(step_time=self._step_time(request.configuration))
            case MeasureMemory(request=request):
                return MemoryMeasured(memory=self._memory(request.configuration))
            case _:
                raise WorkloadError(
                    "the gradient noise scale is measured of a workload: a program of your own keeps its loss to itself"
                )

    def trial(
        self, request: TrialRequest, *, stop: Stop, on_progress: Callable[[], None] = lambda: None
    ) -> CommandTrial:
        """Return a trial to run; ``stop`` is asked again and again, ``on_progress`` called where there is some."""
        return CommandTrial(self, request, stop, on_progress)

    def started(self, configuration: Configuration, *, seed: int, evaluate_every: int, threads: int) -> CommandProcess:
        """Start the command with a configuration's values.

        Raises `UsageError` where a batch takes several micro-batches and the command cannot be told.
        """
        if configuration.accumulation_steps > 1 and "micro_batch_size" not in self._takes:
            raise UsageError(
                f"batch size {configuration.batch_size} takes {configuration.accumulation_steps} micro-batches a step, "
                "and the command does not take {micro_batch_size}"
            )
        values = values_of(
            configuration,
            self._program.parameters(configuration),
            seed=seed,
            evaluate_every=evaluate_every,
            threads=threads,
            device=self.device,
        )
        return CommandProcess(filled(self._program.command, values), self._folder, self._program.report, {})

    def failure(self, code: int, kernel_kills: int | None, steps: int) -> TrialOutcome:
        """Return the outcome of a program that failed."""
        state, reason = judge_exit(code, kernel_kills)
        return TrialOutcome(state=state, reason=f"{reason.replace('worker', 'the command', 1)} after {steps} steps")

    def _until_it_ends(self, configuration: Configuration, evaluate_every: int) -> Iterator[Report]:
        """Yield the reports of a run; raise `WorkloadError`, or `MemoryError`, where it fails."""
        kills = kernel_memory_kills()
        with self.started(configuration, seed=0, evaluate_every=evaluate_every, threads=self._threads) as process:
            while process.exit_code is None or not process.has_said_all():
                yield from process.reports(TICK_SECONDS)
            code = process.exit_code
        if code:
            state, reason = judge_exit(code, kills)
            if state is TrialState.OOM:
                raise MemoryError(reason.replace("worker", "the command", 1))
            raise WorkloadError(f"{describe_exit(code).replace('worker', 'the command', 1)}, see what it printed")

    def _step_time(self, configuration: Configuration) -> StepTime:
        """Time steps by what is reported; where evaluations are in that time, by two runs that evaluate differently."""
        try:
            few = self._pace(configuration, FEW_STEPS)
            evaluation = 0.0
            seconds = few.seconds / few.steps
            if not few.is_own and "evaluate_every" in self._takes:
                many = self._pace(configuration, MANY_STEPS)
                slope = 1 / FEW_STEPS - 1 / MANY_STEPS
                evaluation = max(0.0, (few.seconds / few.steps - many.seconds / many.steps) / slope)
                seconds = max(1e-9, many.seconds / many.steps - evaluation / MANY_STEPS)
        except MemoryError:
            return StepTime.where_memory_ran_out(configuration)
        return StepTime(
            batch_size=configuration.batch_size,
            micro_batch_size=configuration.micro_batch_size,
            step_seconds=seconds,
            evaluation_seconds=evaluation,
            steps_timed=few.steps,
            peak_memory_bytes=None,
        )

    def _pace(self, configuration: Configuration, evaluate_every: int) -> Pace:
        """Return how long the steps between some reports took. Raises `WorkloadError` where there are too few."""
        began = 0.0
        first: Report | None = None
        count = 0
        for report in self._until_it_ends(configuration, evaluate_every):
            now = time.monotonic()
            if first is None:
                first, began = report, now
                continue
            count += 1
            is_own = report.seconds is not None and first.seconds is not None
            seconds = report.seconds - first.seconds if is_own else now - began  # type: ignore[operator]
            steps = report.step - first.step
            if steps > 0 and count >= REPORTS_TIMED and now - began >= SECONDS_TIMED and seconds > 0:
                return Pace(seconds, steps, is_own)
        if first is not None and count >= 1 and steps > 0 and seconds > 0:
            return Pace(seconds, steps, is_own)
        raise WorkloadError(
            f"batch size {configuration.batch_size}: the command ended after {count + (first is not None)} reports, "
            f"too few to time a step{self._hint_of_reports()}"
        )

    def _memory(self, configuration: Configuration) -> MemoryUse:
        micro = configuration.micro_batch_size
        try:
            for report in self._until_it_ends(configuration, evaluate_every=MEMORY_STEPS):
                if report.step >= MEMORY_STEPS:
                    break
        except MemoryError as error:
            return MemoryUse(micro_batch_size=micro, fits=False, peak_memory_bytes=None, reason=str(error))
        return MemoryUse(micro_batch_size=micro, fits=True, peak_memory_bytes=None)

    def _hint_of_reports(self) -> str:
        if self._program.report:
            return f": no line of it gave all of {', '.join(self._program.report)}"
        example = f'{{"step": 100, "{self._program.metric}": 0.9}}'
        return f": it must print lines such as {example}, or report: say how its log is read"


class CommandTrial:
    """One trial of a command."""

    def __init__(
        self, command: LoadedCommand, request: TrialRequest, stop: Stop, on_progress: Callable[[], None]
    ) -> None:
        self._command = command
        self._request = request
        self._stop = stop
        self._on_progress = on_progress

    def run(self, on_observation: Callable[[Observation], None]) -> TrialOutcome:
        """Run to the end, whichever it is; the program is ended where its trial is."""
        request, kills = self._request, kernel_memory_kills()
        trial = ReportedTrial(request, on_observation, time.monotonic())
        with self._command.started(
            request.configuration,
            seed=request.seed,
            evaluate_every=request.eval_every_steps,
            threads=request.threads,
        ) as process:
            while process.exit_code is None or not process.has_said_all():
                for report in process.reports(TICK_SECONDS):
                    self._on_progress()
                    trial.take(report, time.monotonic())
                    if trial.ending is not None:
                        break
                trial.look(self._stop(), time.monotonic())
                if trial.ending is not None:
                    break
            code = process.end()
        if trial.ending is None:
            trial.left(code)
        if trial.ending is None:
            return replace(self._command.failure(code, kills, trial.steps), wall_seconds=trial.wall_seconds)
        return trial.outcome()


def revision_of(program: Program, folder: Path) -> str:
    """Return 12 hex digits of the SHA-256 of a command, how it is read, and the files in the folder that it names."""
    told = hashlib.sha256("\0".join(program.command).encode())
    told.update(repr(sorted(program.report.items())).encode())
    for file in files_of(program.command, folder):
        told.update(file.read_bytes())
    return told.hexdigest()[:12]


def files_of(command: Sequence[str], folder: Path) -> list[Path]:
    """Return the files that a command names, relative to the folder."""
    paths = (folder / token for token in command if token and len(token) < 1000)
    return [path for path in paths if _is_file(path) and not _is_program(path, folder)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _is_program(path: Path, folder: Path) -> bool:
    """Return whether a file lies elsewhere, such as an interpreter: it is none of the user's code."""
    return not path.resolve().is_relative_to(folder.resolve())
