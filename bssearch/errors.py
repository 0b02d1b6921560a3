"""All errors of bssearch, with exit codes.

* BSSearchError                      1
  x UsageError                       2
    - SpecError
      - UnknownFieldError
      - QuestionChangedError
    - WorkloadError
    - OtherDeviceError
  x NotFoundError                    3
  x DatabaseError                    4
    - SchemaError
  x TargetNotReachedError            5
  x LaunchError                      6
    - CheckpointError
  x TrialStopped                     1
  x InterruptedRunError            130
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

Required = TypeVar("Required")


class BSSearchError(Exception):
    """The base class of all errors, with a message, a hint and an exit code.

    Example: ``except bssearch.BSSearchError as error: print(error, error.hint)``
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(BSSearchError):
    """An argument, option, file or setting is wrong.

    Example: ``except bssearch.UsageError as error: print(error.hint)``
    """

    exit_code = 2


class SpecError(UsageError):
    """The study spec is invalid. The message names the file, line and field if known.

    Example: ``except bssearch.SpecError as error: print(error)  # study.yaml:14``
    """


class UnknownFieldError(SpecError):
    """The spec or a ``--set`` option has an unknown field.

    Example: ``except bssearch.UnknownFieldError as error: print(error.hint)``
    """


class QuestionChangedError(SpecError):
    """The spec changes fields that the stored study of the same name has fixed.

    ``changes`` maps each dotted field name to the pair (stored value, given value).

    Example: ``except bssearch.QuestionChangedError as error: print(error.changes)``
    """

    def __init__(self, message: str, *, changes: dict[str, tuple[object, object]], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.changes = changes


class WorkloadError(UsageError):
    """The workload cannot be imported, lacks a required member, returns a wrong value, or fails.

    Example: ``except bssearch.WorkloadError as error: print(error)``
    """


class OtherDeviceError(UsageError):
    """The study is bound to another device, precision or compile mode.

    Example: ``except bssearch.OtherDeviceError as error: print(error.hint)``
    """


class NotFoundError(BSSearchError):
    """A study, trial, queued study or file does not exist.

    Example: ``except bssearch.NotFoundError: answer = bssearch.run_study(spec)``
    """

    exit_code = 3


class DatabaseError(BSSearchError):
    """The database cannot be reached, read or written.

    Example: ``except bssearch.DatabaseError as error: print(error.hint)``
    """

    exit_code = 4


class SchemaError(DatabaseError):
    """The database schema is missing or has another version.

    Example: ``except bssearch.SchemaError as error: print(error.hint)``
    """


class TargetNotReachedError(BSSearchError):
    """The study has no answer, usually because no trial reached the target.

    Example: ``except bssearch.TargetNotReachedError: print(bssearch.advise_target(spec).proposed)``
    """

    exit_code = 5


class LaunchError(BSSearchError):
    """A device or package is missing, memory is too small, or a process failed.

    Example: ``except bssearch.LaunchError as error: print(error.hint)``
    """

    exit_code = 6


class CheckpointError(LaunchError):
    """A paused trial's checkpoint cannot be saved, restored or deleted.

    Example: ``except bssearch.CheckpointError as error: print(error)``
    """


class TrialStopped(BSSearchError):  # noqa: N818 - like Optuna's TrialPruned, it is not a failure
    """A training loop continued after the trial's end. A script may ignore this error.

    Example: ``except bssearch.TrialStopped: pass``
    """


class InterruptedRunError(BSSearchError):
    """Ctrl-C or a signal stopped the run.

    Example: ``except bssearch.InterruptedRunError: answer = bssearch.run_study(spec)  # resumes``
    """

    exit_code = 130


def require(is_so: object, message: str, *, hint: str | None = None, error: type[BSSearchError] = UsageError) -> None:
    if not is_so:
        raise error(message, hint=hint)


def required(
    value: Required | None, message: str, *, hint: str | None = None, error: type[BSSearchError] = UsageError
) -> Required:
    if value is None:
        raise error(message, hint=hint)
    return value


# Pydantic's phrases and their replacements.
PHRASES = {
    "String should match pattern '^[A-Za-z0-9][A-Za-z0-9_.-]*$'": "must have only letters, digits, '_', '.' and '-', "
    "and start with a letter or digit",
    r"String should match pattern '^(auto|cpu|cuda(:\d+)?)$'": "must be auto, cpu, cuda or cuda:NUMBER",
    "Input should be ": "must be ",
    "Input should ": "must ",
    "String should ": "must ",
    "a valid dictionary": "a mapping of fields",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "less than": "<",
}


def hint_of(error: BaseException) -> str | None:
    return error.hint if isinstance(error, BSSearchError) else None


def with_hint(error: BSSearchError) -> str:
    return "; ".join(filter(None, (error.message, error.hint)))


def remedy_of(error: BaseException) -> str:
    """Return a remedy if a module or a relative path is missing, else ""."""
    path = error.filename if isinstance(error, FileNotFoundError) else None
    if path is not None and not Path(str(path)).is_absolute():
        return f"; give an absolute path, or a path relative to the current folder {Path.cwd()}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    return f"; install the package of module {error.name.partition('.')[0]!r}, or put the module beside the workload"


def problem_in_words(problem: Mapping[str, Any]) -> str:
    """Return a pydantic error's message in plain words."""
    message: str = problem["msg"].partition(" or instance of ")[0]
    if message.startswith(("Input should", "String should")):
        for theirs, ours in PHRASES.items():
            message = message.replace(theirs, ours)
    return message.removeprefix("Value error, ")
