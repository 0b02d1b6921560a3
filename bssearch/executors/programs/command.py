"""Trials of user commands."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from bssearch.errors import UsageError, WorkloadError, require, required, with_hint
from bssearch.executors.base import Answer, AskStop, Load, Program, Work
from bssearch.executors.process import check_unchanged, judge_command
from bssearch.executors.programs.command_process import (
    LAST_LINES,
    TICK_SECONDS,
    CommandProcess,
    Conversation,
    LoadedProgram,
    SilenceLimit,
    answer_in,
    outcome_of,
    relaying,
)
from bssearch.executors.programs.reports import (
    LARGEST_STEP,
    LOSS,
    NORMS,
    REPORTS_TIMED,
    SAMPLES,
    Report,
    ReportPace,
    pace_of,
)
from bssearch.records import (
    BATCH_SCHEDULE,
    Configuration,
    MemoryRequest,
    MemoryUse,
    NoiseRequest,
    Observation,
    SecondsBasis,
    StepTime,
    StepTimeRequest,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
    is_metric,
)
from bssearch.records.noise_scale import ENDLESS, Norms, Pass, gradient_noise
from bssearch.records.text import plural
from bssearch.spec.model import check_places, filled, launched_ranks, places_of, values_of
from bssearch.training.course import Approach, Course, Ending, not_finite, paused, where

MOST_OBSERVATIONS = 100_000  # the most evaluations of a trial, because bssearch stores each evaluation

EPOCH, EPOCHS_SEEN = "epoch", 3  # reports that show whether steps are epochs

STILL_REPORTS = 5  # the most reports with equal seconds, because more mean that seconds do not count from the start

AHEAD = 1.1  # largest ratio of reported to wall seconds, because the first report may come late
AHEAD_SECONDS = 1.0

FEWEST_BURSTS = 4  # bursts: with over 2 x 4 reports, a wait exceeds 1/4 of the total time


class ReportedTrial:
    """Collects a program's reports. ``ending`` is None while the trial runs.

    If the program reports no seconds, the pace between the first two reports gives the time of the steps before the
    first report.
    """

    def __init__(
        self,
        request: TrialRequest,
        on_observation: Callable[[Observation], None],
        started: float,
        *,
        needs_samples: bool = False,
    ) -> None:
        self._needs_samples, self._assumed_samples = needs_samples, False
        self.ending: Ending | None = None
        self.steps = self._samples = self._counted = 0
        self._request, self._plan = request, request.plan
        self._on_observation = on_observation
        self._course = Course(request, None)
        self._started = started
        self._ended = started
        self._basis: SecondsBasis | None = None
        self._first: tuple[Report, float] | None = None
        self._waiting: Report | None = None
        self._zero = 0.0
        self._seconds = 0.0
        self._observations = 0
        self._reports = 0
        self._last_came = started
        self._longest_wait = 0.0
        self._epochs: set[tuple[int, float]] = set()
        self._approach, self._is_near = Approach(request.target), False
        self._passes: list[Pass] = []
        self._still, self._moved = 0, started  # reports with the same seconds, and the time of the first

    def take(self, report: Report, now: float) -> None:
        """Add a report received at ``now``, unless the trial has ended."""
        if self.ending is not None:
            return
        self._check(report, now)
        if self._first is not None:
            self._longest_wait = max(self._longest_wait, now - self._last_came)
        self._reports, self._last_came = self._reports + 1, now
        if self._first is None:
            self._first = report, now
            self._basis = SecondsBasis.WALL if report.seconds is None else SecondsBasis.REPORTED
            self._zero = now
            if self._basis is SecondsBasis.WALL and report.step > 0:
                self._waiting = report  # the step time is still unknown
                self.steps = report.step
                return
        elif self._waiting is not None:
            first, began = self._first
            self._zero = began - first.step * (now - began) / (report.step - first.step)
            waiting, self._waiting = self._waiting, None
            self._observe(waiting, began - self._zero)
        if self.ending is None:
            self._observe(report, now - self._zero if report.seconds is None else report.seconds)

    def look(self, asked: tuple[TrialState, str] | None, now: float) -> None:
        """End the trial if ``asked`` is set, or if train seconds on the wall clock exceed the limit."""
        if self.ending is not None:
            return
        if asked is not None:
            self._end(paused(Ending(*asked, asked=True), "", lambda _: "bssearch cannot checkpoint a command"))
        elif self._basis is SecondsBasis.WALL:
            self._end(self._course.limited(now - self._zero))

    def left(self, code: int) -> None:
        """End the trial if the exit ``code`` is 0. Raises `UsageError` instead if no report had the metric."""
        self._observe_waiting()
        if self.ending is None and code == 0:
            require(
                self._course.progress.last is not None,
                f"the command ended without a report of {self._request.target.metric}: "
                "let the command report each evaluation",
            )
            self._end(Ending(TrialState.EXHAUSTED, f"the command ended at step {self.steps}"))

    def failed(self, state: TrialState, reason: str) -> TrialOutcome:
        self._observe_waiting()
        self.ending, self._ended = Ending(state, reason, asked=True), time.monotonic()
        return self.outcome()

    def outcome(self) -> TrialOutcome:
        assert self.ending is not None, "the trial has not ended"
        progress, wall = self._course.progress, self._ended - self._started
        return self._course.with_target(
            TrialOutcome(
                state=self.ending.state,
                reason=self.ending.reason,
                steps=self.steps,
                samples=self._samples,
                train_seconds=self._seconds,
                other_seconds=max(0.0, wall - self._seconds),
                wall_seconds=wall,
                seconds_basis=self._basis,
                final_metric=None if progress.last is None else progress.last.metric,
                best_metric=progress.best,
                warnings=tuple(self._warnings()),
                noise=gradient_noise(self._passes),
            )
        )

    def _warnings(self) -> Iterator[str]:
        if len(self._epochs) >= EPOCHS_SEEN and all(step == epoch for step, epoch in self._epochs):
            yield (
                f"step and epoch are the same in {len(self._epochs)} reports; if an epoch has several optimizer steps, "
                "report the optimizer steps as step"
            )
        if self._needs_samples and self._assumed_samples:
            yield (
                f"a report has no {SAMPLES}, so samples_to_target counts batch_size samples per step; "
                f"let the command report {SAMPLES} each time"
            )
        wall = self._ended - self._started
        if self._basis is SecondsBasis.REPORTED and self._seconds > AHEAD * wall + AHEAD_SECONDS:
            yield (
                f"the command reports {self._seconds:.3g} seconds of training within {wall:.3g} s: report "
                "the seconds of one device, not milliseconds"
            )
        if self._basis is not SecondsBasis.WALL or self._first is None or self._reports <= 2 * FEWEST_BURSTS:
            return
        if self._longest_wait > (self._last_came - self._first[1]) / FEWEST_BURSTS:
            yield (
                f"reports came in bursts up to {self._longest_wait:.3g} s apart, so the times are "
                "imprecise; flush each line, or report seconds"
            )

    def _check(self, report: Report, now: float) -> None:
        require(
            report.seconds != 0 or report.step <= 0,
            f"the command reports 0 seconds of training after step {report.step}: report seconds from the start of "
            "training, or no seconds",
        )
        if self._first is None:
            return
        require(
            report.step > self.steps,
            f"the command reports step {report.step} after step {self.steps}: steps must rise; count from the start of "
            "training",
        )
        require(
            (report.seconds is None) == (self._basis is SecondsBasis.WALL),
            f"the command reports seconds only sometimes: step {report.step} differs from earlier steps; "
            "report seconds always or never",
        )
        require(
            report.seconds is None or report.seconds >= self._seconds,
            f"the command reports {report.seconds or 0:g} seconds after {self._seconds:g} seconds: seconds must never "
            "fall; count from the start of training",
        )
        self._still = self._still + 1 if report.seconds is not None and report.seconds == self._seconds else 0
        self._moved = self._moved if self._still else now
        require(
            self._still < STILL_REPORTS or now - self._moved <= self._seconds,
            f"the command reports the same {self._seconds:g} seconds in {self._still + 1} reports, up to step "
            f"{report.step}",
            hint="count the seconds from the start of training, over all epochs",
        )

    def _note_norms(self, report: Report) -> None:
        metric = report.values.get(self._request.target.metric)
        if metric is not None and is_metric(metric):
            self._is_near = self._approach.is_near(metric)
        now, norms = self._plan.configuration, [report.values.get(name, math.nan) ** 2 for name in NORMS]
        micro_batches = now.batch_size // now.micro_batch_size
        if self._is_near and micro_batches > 1 and Norms(*norms).are_finite:
            one = Pass(
                small_batch=now.micro_batch_size,
                small_batches=micro_batches,
                samples=ENDLESS,
                plain=Norms(*norms),
            )
            self._passes.append(one)

    def _observe(self, report: Report, seconds: float) -> None:
        target, configuration = self._request.target, self._plan.configuration
        if len(self._epochs) < EPOCHS_SEEN and (epoch := report.values.get(EPOCH)) is not None:
            self._epochs.add((report.step, epoch))
        self._samples = self._samples_after(report)
        self.steps = self._counted = report.step
        self._seconds = seconds
        loss = report.values.get(LOSS)
        metric = report.values.get(target.metric)
        self._note_norms(report)
        for name, value in ((target.metric, metric), ("the loss", loss)):
            if value is not None and not is_metric(value):
                self._end(Ending(TrialState.DIVERGED, f"{not_finite(name, value)}: {where(configuration, self.steps)}"))
                return
        if metric is not None:
            self._observations += 1
            require(
                self._observations <= MOST_OBSERVATIONS,
                f"the command reports {target.metric} more than {MOST_OBSERVATIONS} times in a trial",
                hint="report every {evaluate_every} steps",
            )
            observation = Observation(
                step=report.step,
                samples=self._samples,
                train_seconds=seconds,
                metric=metric,
                loss=loss,
                learning_rate=configuration.learning_rate,
            )
            ending = self._course.observe(observation)
            self._on_observation(observation)
            self._end(ending)
        self._end(self._course.limited(seconds))

    def _samples_after(self, report: Report) -> int:
        # Steps without reported samples count as full batches.
        samples = report.values.get(SAMPLES)
        if samples is None:
            self._assumed_samples = True
            return self._samples + (report.step - self._counted) * self._plan.configuration.batch_size
        require(
            self._samples <= samples <= LARGEST_STEP and samples == int(samples),
            f"the command reports {samples:g} samples at step {report.step}, after {self._samples} samples: samples "
            f"must be whole, at most {LARGEST_STEP:g}, and never fall",
            hint="count samples from the start of training",
        )
        return int(samples)

    def _observe_waiting(self) -> None:
        # The time of a single report counts from the program's start.
        if self._waiting is not None and self._first is not None:
            waiting, self._waiting = self._waiting, None
            self._observe(waiting, self._first[1] - self._started)

    def _end(self, ending: Ending | None) -> None:
        if ending is None or self.ending is not None:
            return
        self._observe_waiting()
        if self.ending is None:
            self.ending = self._course.reached_before(ending)
            self._ended = time.monotonic()


LARGEST_FILE = 2**26  # bytes of a file that counts as code, because larger files are data


def revision_of(program: Program, folder: Path) -> str:
    """Hash a command, its report format and its files in ``folder`` to 12 hex digits of SHA-256."""
    parts = ["\0".join(program.command), repr(sorted(program.report.items()))]
    for path in files_of(program.command, folder).values():
        # Files outside the folder are interpreters, which differ by machine.
        if path.resolve().is_relative_to(folder.resolve()):
            parts.append(digest_of(path))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


def files_of(command: Sequence[str], folder: Path) -> dict[str, Path]:
    """Find the files that the command's arguments name, also after ``=``."""
    return {
        name: folder / name
        for token in command
        for name in (token, token.partition("=")[2])
        if name and os.path.isfile(folder / name)  # noqa: PTH113 - False for an invalid name
    }


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, or of the file's size if the size exceeds `LARGEST_FILE`."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        return hashlib.sha256(f"{size} bytes".encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FEW_STEPS, MANY_STEPS = 2, 20  # evaluation intervals of the two runs that separate step from evaluation time

MEMORY_STEPS = 3  # steps after which a micro-batch size fits, as in bssearch's own loop

UNREAD_LINES = 20  # lines without a match, after which ``report`` does not fit the log

UNREAD_SHARE = 0.1  # share of ``hang_seconds`` before `UNREAD_LINES` counts; output before training takes less time

MOST_METRICS = 100

Reports = Generator[Report, None, None]


def _no_noise(process: CommandProcess) -> Answer:
    raise WorkloadError(
        "bssearch cannot measure the gradient noise scale of a command that only reports",
        hint="call bssearch.current_trial() in the program",
    )


class LoadedCommand(LoadedProgram):
    """A user's command."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._threads, self._hang_seconds = load.settings.threads, load.settings.hang_seconds
        self.revision = revision_of(self._program, self._folder)
        self._takes = places_of(self._program.command)
        ranks = launched_ranks(self._program.command) or ""
        require(
            load.settings.devices[-1] > 1 or not ranks.isdecimal() or int(ranks) == 1,
            f"command: torchrun starts {ranks} processes, but executor.devices = 1",
            hint=f"set executor.devices: {ranks} in the spec, and --nproc-per-node={{devices}} in the command",
        )
        check_unchanged("a file that the command names", load.revision, self.revision)

    def _answer(self, work: Work) -> Answer:
        match work:
            case StepTimeRequest(configuration=at):
                return self._asked(work, at, FEW_STEPS, lambda process: self._reported_step_time(at, process))
            case MemoryRequest(configuration=at):
                return self._asked(work, at, MEMORY_STEPS, lambda process: self._reported_memory(at, process))
            case NoiseRequest(configuration=at):
                return self._asked(work, at, work.eval_every_steps, _no_noise)
            case _:
                return self._asked("describe", self._program.default, 1, self._description)

    def _description(self, process: CommandProcess) -> WorkloadDescription:
        import torch

        from bssearch.training.environment import describe_program

        metric, began = self._program.metric, time.monotonic()
        # A program that evaluates after each step reports soon.
        patience = self._hang_seconds * (UNREAD_SHARE if "evaluate_every" in self._takes else 1.0)
        offered: set[str] = set()
        untrained: dict[str, float] = {}
        with closing(self._until_it_ends(process)) as reports:
            for report in reports:
                found = {name: value for name, value in report.values.items() if name not in {LOSS, SAMPLES}}
                if metric in found or len(offered) < MOST_METRICS:
                    offered |= found.keys()
                    untrained |= found if report.step == 0 else {}
                if metric in found:
                    break
                if time.monotonic() - began > patience:
                    raise self._other_metric(offered, process, f" within {patience:g} s")
            else:
                raise self._other_metric(offered, process)
        names = [metric, *sorted(offered - {metric})[: MOST_METRICS - 1]]
        files = [path.resolve() for path in files_of(self._program.command, self._folder).values()]
        return describe_program(
            torch.device(self.device),
            names,
            {name: untrained[name] for name in names if name in untrained},
            memory_limit_bytes=self.memory_limit_bytes,
            revision=self.revision,
            source=next((path for path in files if path.is_relative_to(self._folder.resolve())), None),
        )

    def run(
        self,
        request: TrialRequest,
        on_observation: Callable[[Observation], None],
        *,
        stop: AskStop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> TrialOutcome:
        trial = ReportedTrial(request, on_observation, time.monotonic(), needs_samples=self._program.needs_samples)

        def is_over() -> bool:
            trial.look(stop(), time.monotonic())
            return trial.ending is not None

        with self.started(
            request.plan.configuration,
            seed=request.plan.seed,
            evaluate_every=request.plan.eval_every_steps,
            threads=request.plan.threads,
        ) as process:
            try:
                if process.connects(is_over):
                    take = relaying(on_progress, on_observation)
                    found = Conversation(process, stop, take, process.kernel_kills).hold(self.assigned(request))
                    state, reason = judge_command(found.exit_code, found.kernel_kills, process.last_lines)
                    failed = TrialOutcome(state=state, reason=reason, traceback=process.last_lines or None)
                    return outcome_of(found, request, stop(), failed, "the command")
                if process.has_reported:
                    self.check_places(request.plan.configuration)
                while not is_over() and process.goes_on():
                    for report in process.reports(TICK_SECONDS):
                        on_progress()
                        trial.take(report, time.monotonic())
                code = process.end()
                if trial.ending is None and code == 0:
                    for report in process.last_reports():
                        trial.take(report, time.monotonic())
                if trial.ending is None:
                    trial.left(code)
            except UsageError as error:
                return trial.failed(TrialState.FAILED, with_hint(error))
        if trial.ending is None:
            state, reason = judge_command(code, process.kernel_kills, process.last_lines)
            return replace(
                trial.failed(state, f"{reason} after step {trial.steps}"), traceback=process.last_lines or None
            )
        return trial.outcome()

    def started(self, configuration: Configuration, *, seed: int, evaluate_every: int, threads: int) -> CommandProcess:
        program = self._program
        values = values_of(
            configuration,
            program.parameters(configuration),
            seed=seed,
            evaluate_every=evaluate_every,
            threads=threads,
            device=self.device,
        )
        return CommandProcess(filled(program.command, values), self._folder, program.report, program.metric)

    def check_places(self, configuration: Configuration) -> None:
        require(
            configuration.world_size == 1 or "devices" in self._takes,
            f"the trial has {configuration.world_size} devices, but the command has no placeholder {{devices}}",
            hint="use torchrun --nproc-per-node={devices}, or set executor.devices: 1",
        )
        require(
            not configuration.grows,
            f"{BATCH_SCHEDULE} = {configuration.parameters.get(BATCH_SCHEDULE)!r}: the batch size of a command "
            "cannot grow",
            hint="use a Python program that calls bssearch.current_trial(...)",
        )
        check_places(self._takes, self._program.searched)
        require(
            configuration.accumulation_steps <= 1
            or len(self._takes & {"batch_size", "micro_batch_size", "accumulation_steps"}) >= 2,
            f"batch size {configuration.batch_size} takes {configuration.accumulation_steps} micro-batches per step, "
            "but the command has fewer than two of {batch_size}, {micro_batch_size} and {accumulation_steps}",
            hint="let the command take two of these placeholders",
        )

    def _asked(
        self,
        work: Work,
        configuration: Configuration,
        evaluate_every: int,
        read: Callable[[CommandProcess], Answer],
    ) -> Answer:
        with self.started(configuration, seed=0, evaluate_every=evaluate_every, threads=self._threads) as process:
            patience = SilenceLimit(self._hang_seconds, process.began)
            if process.connects(lambda: patience.is_over() or self._is_unread(process)):
                found = Conversation(process, patience.stop, patience.take, process.kernel_kills).hold(
                    self.assigned(work)
                )
                answer = answer_in(found)
                if answer is None:
                    raise process.failure(found.exit_code)
                return answer
            if process.has_reported:
                self.check_places(configuration)
            return read(process)

    def _until_it_ends(self, process: CommandProcess) -> Reports:
        last, has_reported = process.began, False
        with process:
            while process.goes_on():
                for report in process.reports(TICK_SECONDS):
                    has_reported = True
                    yield report
                    last = time.monotonic()
                if not has_reported and self._is_unread(process):
                    raise WorkloadError(
                        f"the command makes no report{self._hint_of_reports(process)}",
                        hint="if setup takes long, raise executor.hang_seconds to ten times the seconds before the "
                        "first report",
                    )
                if time.monotonic() - last > self._hang_seconds:
                    # a command that has reported needs no advice about reports
                    advice = process.shown_lines if has_reported else self._hint_of_reports(process)
                    raise WorkloadError(
                        f"the command made no report for {self._hang_seconds:g} s{advice}",
                        hint="raise executor.hang_seconds if a report may take longer",
                    )
            code = process.end()
        if code:
            raise process.failure(code)
        for report in process.last_reports():
            has_reported = True
            yield report
        require(
            has_reported,
            f"the command ended without a report{self._hint_of_reports(process)}",
            error=WorkloadError,
        )

    def _is_unread(self, process: CommandProcess) -> bool:
        is_late = time.monotonic() - process.began > UNREAD_SHARE * self._hang_seconds
        return bool(self._program.report) and is_late and process.log_reader.lines >= UNREAD_LINES

    def _other_metric(self, offered: set[str], process: CommandProcess, how_long: str = "") -> WorkloadError:
        metric = self._program.metric
        names = ", ".join(sorted(offered)[:LAST_LINES]) or "no metric"
        hint = self._hint_of_reports(process) if metric in process.log_reader.unmatched else ""
        return WorkloadError(
            f"the command reports {names}{how_long}; the study's target metric is {metric!r}{hint}",
            hint=f"report {metric!r}, or correct target.metric in the spec",
        )

    def _reported_step_time(self, configuration: Configuration, process: CommandProcess) -> StepTime:
        # Two runs with different evaluation intervals separate step from evaluation time.
        few = self._pace(configuration, process)
        evaluation = 0.0
        seconds = few.seconds / few.steps
        if not few.is_own and "evaluate_every" in self._takes:
            again = self.started(configuration, seed=0, evaluate_every=MANY_STEPS, threads=self._threads)
            many = self._pace(configuration, again)
            in_all = many.seconds / many.steps
            evaluation = max(0.0, (seconds - in_all) / (1 / FEW_STEPS - 1 / MANY_STEPS))
            # The step takes at least 1/MANY_STEPS of the time, even if chance makes the two runs differ more.
            seconds = max(in_all / MANY_STEPS, in_all - evaluation / MANY_STEPS)
        return StepTime(
            batch_size=configuration.batch_size,
            micro_batch_size=configuration.micro_batch_size,
            world_size=configuration.world_size,
            step_seconds=seconds,
            evaluation_seconds=evaluation,
            steps_timed=few.steps,
            peak_memory_bytes=None,
        )

    def _pace(self, configuration: Configuration, process: CommandProcess) -> ReportPace:
        with closing(self._until_it_ends(process)) as reports:
            pace, count = pace_of(reports)
        return required(
            pace,
            f"batch size {configuration.batch_size}: the command ended after {plural(count, 'report')}, "
            + ("whose steps or seconds do not rise" if count > 1 else "too few to time a step"),
            hint=f"let the command make more than {REPORTS_TIMED} reports, with rising steps and seconds",
            error=WorkloadError,
        )

    def _reported_memory(self, configuration: Configuration, process: CommandProcess) -> MemoryUse:
        with closing(self._until_it_ends(process)) as reports:
            next((report for report in reports if report.step >= MEMORY_STEPS), None)
        return MemoryUse(micro_batch_size=configuration.micro_batch_size, fits=True, peak_memory_bytes=None)

    def _hint_of_reports(self, process: CommandProcess) -> str:
        reader = process.log_reader
        if reader.unmatched:
            said = ", ".join(f"report.{name}: {text}" for name, text in reader.unmatched.items())
            return f": {said} found no number in any line; correct the regular expression{process.shown_lines}"
        return (
            f': let the command print lines such as {{"step": 100, "{self._program.metric}": 0.9}}, or set report: to '
            f"regular expressions for the log{process.shown_lines}"
        )
