"""What a loop is asked to do, from the message that asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from bssearch.executors.loaded import failed, program_refused
from bssearch.executors.messages import Assign, MeasureMemory, MeasureStepTime, Reply, Run, TrialEnded
from bssearch.integrations.line import Line
from bssearch.integrations.measuring import AnswerLine, DescribedLoop, Looked, MeasuredMemory, TimedLoop
from bssearch.integrations.trial_run import TrialRun
from bssearch.records import ParameterValue


class WorkLine(Line, AnswerLine, Protocol):
    """A line for trials and for answers."""


def work_of(assign: Assign, parameters: Mapping[str, ParameterValue], line: WorkLine) -> TrialRun | Looked:
    """Return what a loop is asked to do; ``parameters`` are all but batch size and learning rate, by bare names."""
    assign = replace(assign, parameters=parameters)
    match assign.work:
        case Run(request=request):
            return TrialRun(request, parameters, assign.device, line, assign.revision)
        case MeasureStepTime(request=request):
            return TimedLoop(request, assign, line)
        case MeasureMemory():
            return MeasuredMemory(assign, line)
        case _:
            return DescribedLoop(assign, line)


def failure_of(assign: Assign, error: BaseException) -> Reply:
    """Return what is said of work in which the user's code has failed."""
    if isinstance(assign.work, Run):
        return TrialEnded(number=assign.work.request.number, outcome=failed(error))
    return program_refused(error, assign.memory_limit_bytes)
