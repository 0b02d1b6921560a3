"""Every error bssearch raises on purpose.

The tree, with the exit code the command line gives each branch:

* BSSearchError                      1
  x UsageError                       2   the command, the spec or the workload is wrong
    - SpecError                          the study spec is wrong
      - UnknownFieldError                it gives a field that no spec has
      - QuestionChangedError             another question under the name of an existing study
    - WorkloadError                      the workload does not import, or lacks a part
    - OtherDeviceError                   the study was measured on another kind of device
  x NotFoundError                    3   no such study, trial or file
  x DatabaseError                    4   the database cannot be reached, read or written
    - SchemaError                        its schema is not the one this version speaks
  x TargetNotReachedError            5   no trial reached the target
  x LaunchError                      6   the device, the memory or a worker process failed
    - CheckpointError                    a paused trial cannot go on from its file, or a store has it not
  x TrialStopped                     1   a trial of one's own loop has ended
  x InterruptedRunError            130   stopped by the user; everything finished is stored
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BSSearchError(Exception):
    """Base of all; carries what the command line prints and the code it exits with."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(BSSearchError):
    """The request itself is wrong."""

    exit_code = 2


class SpecError(UsageError):
    """A study spec that is not valid; the message names file, line and field."""


class UnknownFieldError(SpecError):
    """A spec that gives a field that no spec has, or an option that its part lacks."""


class QuestionChangedError(SpecError):
    """A spec that asks another question than the stored study of the same name.

    ``changes`` maps each dotted field to its (stored, given) values.
    """

    def __init__(self, message: str, *, changes: dict[str, tuple[object, object]], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.changes = changes


class WorkloadError(UsageError):
    """A workload that does not import, or does not offer what the protocol asks."""


class OtherDeviceError(UsageError):
    """A study that was measured on another kind of device than this one."""


class NotFoundError(BSSearchError):
    """Something named by the user does not exist."""

    exit_code = 3


class DatabaseError(BSSearchError):
    """The database cannot be reached, read or written."""

    exit_code = 4


class SchemaError(DatabaseError):
    """The database's schema is missing, behind, or newer than this version."""


class TargetNotReachedError(BSSearchError):
    """No trial of the study reached its target."""

    exit_code = 5


class LaunchError(BSSearchError):
    """The device, its memory, or a worker process failed."""

    exit_code = 6


class CheckpointError(LaunchError):
    """The file of a paused trial is missing, damaged or that of another trial, or its store is away."""


class TrialStopped(BSSearchError):  # noqa: N818 - as Optuna's TrialPruned, it is no failure
    """A loop goes on although its trial has ended; the script may let it through."""


class InterruptedRunError(BSSearchError):
    """The user stopped the run."""

    exit_code = 130


PHRASES = {
    "Input should be ": "must be ",
    "Input should ": "must ",
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "less than": "<",
}
"""What pydantic says of a value, and what bssearch says instead."""


def problem_in_words(problem: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, of one of the ``errors()`` of a pydantic ``ValidationError``."""
    message: str = problem["msg"]
    if message.startswith("Input should"):
        for theirs, ours in PHRASES.items():
            message = message.replace(theirs, ours)
    return message.removeprefix("Value error, ")
