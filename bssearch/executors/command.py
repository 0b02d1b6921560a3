"""A command of the user's own, in any language: described, measured and trained by what it reports."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.command_files import revision_of
from bssearch.executors.command_process import CommandProcess
from bssearch.executors.failures import judge_exit, kernel_memory_kills, programs_words_of_no_memory
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

SECONDS_ENOUGH = 10.0
"""Seconds after which fewer reports tell the time of a step, too: a choice."""

FEW_STEPS, MANY_STEPS = 2, 20
"""Steps between the evaluations of the two runs that tell the time of a step from that of an evaluation: a choice."""

MEMORY_STEPS = 3
"""Steps after which a micro-batch size fits: those of bssearch's own loop."""

MOST_METRICS = 100
"""Metrics of a program that are taken note of: a choice."""

LAST_LINES = 10
"""Lines of what a program printed last that an error shows: a choice."""

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
        self._hang_seconds = load.hang_seconds
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

        metric, began = self._program.metric, time.monotonic()
        offered: set[str] = set()
        untrained: dict[str, float] = {}
        with closing(self._until_it_ends(self._program.default, evaluate_every=1)) as reports:
            for report in reports:
                found = {name: value for name, value in report.values.items() if name != LOSS}
                if metric in found or len(offered) < MOST_METRICS:
                    offered |= found.keys()
                    untrained |= found if report.step == 0 else {}
                if metric in found:
                    break
                if time.monotonic() - began > self._hang_seconds:
                    raise self._other_metric(offered, f" for {self._hang_seconds:g} s")
            else:
                raise self._other_metric(offered)
        names = [metric, *sorted(offered - {metric})[: MOST_METRICS - 1]]
        initial = {name: untrained[name] if is_metric(untrained[name]) else None for name in names if name in untrained}
        return WorkloadDescription(
            train_samples=None,
            validation_samples=None,
            test_samples=None,
            metrics={name: MetricInfo() for name in names},
            environment=describe_device(
                torch.device(self.device),
                precision=OWN,
                compile_mode=OWN,
                memory_limit_bytes=self.memory_limit_bytes,
                workload_revision=self.revision,
            ),
            model=ModelDescription(parameters=None, batch_norm_layers=0, initial_metrics=initial),
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
        split = {"batch_size", "micro_batch_size", "accumulation_steps"}
        if configuration.accumulation_steps > 1 and len(self._takes & split) < 2:
            raise UsageError(
                f"batch size {configuration.batch_size} takes {configuration.accumulation_steps} micro-batches a step, "
                "and the command does not take two of {batch_size}, {micro_batch_size} and {accumulation_steps}"
            )
        values = values_of(
            configuration,
            self._program.parameters(configuration),
            seed=seed,
            evaluate_every=evaluate_every,
            threads=threads,
            device=self.device,
        )
        return CommandProcess(filled(self._program.command, values), self._folder, self._program.report)

    def _until_it_ends(self, configuration: Configuration, evaluate_every: int) -> Generator[Report, None, None]:
        """Yield the reports of a run, which ends where this is closed.

        Raises `WorkloadError`, or `MemoryError`, where it fails, and where no report comes for as long as a trial would
        count as hung.
        """
        kills, last = kernel_memory_kills(), time.monotonic()
        with self.started(configuration, seed=0, evaluate_every=evaluate_every, threads=self._threads) as process:
            while process.goes_on():
                for report in process.reports(TICK_SECONDS):
                    yield report
                    last = time.monotonic()
                if time.monotonic() - last > self._hang_seconds:
                    raise WorkloadError(
                        f"the command made no report for {self._hang_seconds:g} s{self._hint_of_reports()}"
                        f"{_shown(process.last_lines)}",
                        hint="executor.hang_seconds is how long it may take",
                    )
            code = process.end()
        if code:
            state, reason = judge_command(code, kills, process.last_lines)
            if state is TrialState.OOM:
                raise MemoryError(reason)
            raise WorkloadError(f"{reason}{_shown(process.last_lines)}")

    def _other_metric(self, offered: set[str], how_long: str = "") -> WorkloadError:
        if not offered:
            return WorkloadError(f"the command ended without a report{self._hint_of_reports()}")
        names = ", ".join(sorted(offered)[:LAST_LINES])
        return WorkloadError(
            f"the command reports {names}{how_long}; the study's target is of {self._program.metric!r}"
        )

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
                # No less than if nearly all of it were evaluation: the two runs are not alike.
                all_of_it = many.seconds / many.steps
                seconds = max(all_of_it / MANY_STEPS, all_of_it - evaluation / MANY_STEPS)
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
        began, count, pace = 0.0, 0, None
        first: Report | None = None
        with closing(self._until_it_ends(configuration, evaluate_every)) as reports:
            for report in reports:
                now = time.monotonic()
                if first is None:
                    first, began = report, now
                    continue
                count += 1
                pace = _pace_between(first, report, now - began) or pace
                is_enough = count >= REPORTS_TIMED or now - began >= SECONDS_ENOUGH
                if pace is not None and is_enough and now - began >= SECONDS_TIMED:
                    break
        if pace is None:
            raise WorkloadError(
                f"batch size {configuration.batch_size}: the command ended after {count + (first is not None)} "
                f"reports, too few to time a step{self._hint_of_reports()}"
            )
        return pace

    def _memory(self, configuration: Configuration) -> MemoryUse:
        micro = configuration.micro_batch_size
        try:
            with closing(self._until_it_ends(configuration, evaluate_every=MEMORY_STEPS)) as reports:
                for report in reports:
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
            try:
                self._follow(process, trial)
                code = process.end()
                if trial.ending is None:
                    trial.left(code)
            except UsageError as error:
                return trial.failed(TrialState.FAILED, str(error))
        if trial.ending is None:
            state, reason = judge_command(code, kills, process.last_lines)
            outcome = trial.failed(state, f"{reason} after {trial.steps} steps")
            return replace(outcome, traceback=process.last_lines or None)
        return trial.outcome()

    def _follow(self, process: CommandProcess, trial: ReportedTrial) -> None:
        """Take in what a program reports until it ends, or its trial does."""
        while process.goes_on():
            for report in process.reports(TICK_SECONDS):
                self._on_progress()
                trial.take(report, time.monotonic())
                if trial.ending is not None:
                    return
            trial.look(self._stop(), time.monotonic())
            if trial.ending is not None:
                return


def judge_command(code: int, kernel_kills: int | None, printed: str) -> tuple[TrialState, str]:
    """Return the state and the reason of a command that failed, by its exit code and what it printed last.

    A shell tells that its program was killed by 128 and the signal's number.
    """
    if code == 128 + signal.SIGKILL:
        code = -signal.SIGKILL
    state, reason = judge_exit(code, kernel_kills, programs_words_of_no_memory(printed))
    return state, reason.replace("worker", "the command", 1)


def _pace_between(first: Report, last: Report, wall_seconds: float) -> Pace | None:
    """Return how long the steps between two reports took, None where that cannot be told."""
    is_own = first.seconds is not None and last.seconds is not None
    seconds = last.seconds - first.seconds if is_own else wall_seconds  # type: ignore[operator]
    steps = last.step - first.step
    return Pace(seconds, steps, is_own) if steps > 0 and seconds > 0 else None


def _shown(printed: str) -> str:
    """Return the last lines of what a program printed, to stand under an error."""
    lines = [line[:500] for line in printed.splitlines() if line.strip()][-LAST_LINES:]
    return "; it printed:\n" + "\n".join(lines) if lines else "; it printed nothing"
