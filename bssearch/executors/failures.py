"""Answers to the driver if the user's code fails."""

import gc
import traceback
from dataclasses import replace

from bssearch.errors import BSSearchError, LaunchError, WorkloadError, hint_of, with_hint
from bssearch.executors.base import Measurement, Refused
from bssearch.executors.process import describe_exception
from bssearch.records import (
    MemoryRequest,
    NoiseRequest,
    StepTimeRequest,
    TrialEnded,
    TrialOutcome,
    TrialState,
    to_json,
)


def refused(error: BaseException, memory_limit_bytes: int | None) -> Refused:
    """Return the answer to a failed load or description."""
    lacks_memory = _ran_out_of_memory(error)
    message, hint = describe_exception(error), hint_of(error)
    if lacks_memory:
        allowed = "" if memory_limit_bytes is None else f" under the limit of {memory_limit_bytes / 2**30:.3g} GiB"
        message = f"out of memory{allowed}: {message}"
        if memory_limit_bytes is not None and hint is None:
            hint = "raise or remove executor.memory_limit_gib; if slots share a GPU, lower executor.slots"
    return Refused(
        error="workload" if isinstance(error, WorkloadError) and not lacks_memory else "launch",
        message=message,
        hint=hint,
        out_of_memory=lacks_memory,
    )


def program_refused(error: BaseException, memory_limit_bytes: int | None) -> Refused:
    traceback.print_exception(error)
    found = refused(error, memory_limit_bytes)
    return found if found.out_of_memory or isinstance(error, LaunchError) else replace(found, error="workload")


def not_measured(error: BaseException, request: Measurement) -> Refused:
    what = {StepTimeRequest: "step time", MemoryRequest: "memory", NoiseRequest: "noise"}[type(request)]
    return Refused(
        error="launch" if isinstance(error, LaunchError) else "workload",
        message=f"measuring the {what} of batch size {request.configuration.batch_size} failed: "
        f"{describe_exception(error)}",
        hint=hint_of(error),
        out_of_memory=_ran_out_of_memory(error),
    )


def failed(error: BaseException) -> TrialOutcome:
    """Print a failed trial's traceback and return the outcome."""
    from bssearch.training.memory import is_out_of_memory

    traceback.print_exception(error)
    return TrialOutcome(
        state=TrialState.OOM if is_out_of_memory(error) else TrialState.FAILED,
        reason=with_hint(error) if isinstance(error, BSSearchError) else describe_exception(error),
        traceback="".join(traceback.format_exception(error)),
    )


def trial_ended(number: int, outcome: TrialOutcome) -> TrialEnded:
    """Free device memory and return a `TrialEnded`. The trial fails if JSON cannot hold the outcome."""
    broken = not _device_works()
    try:
        to_json(outcome)
    except (TypeError, ValueError) as error:
        outcome = failed(error)
    return TrialEnded(number, outcome, broken=broken)


def _ran_out_of_memory(error: BaseException | None) -> bool:
    from bssearch.training.memory import is_out_of_memory

    causes: list[BaseException] = []
    while error is not None and error not in causes:  # user code may raise an error from itself
        causes.append(error)
        error = error.__cause__
    return any(map(is_out_of_memory, causes))


def _device_works() -> bool:
    import torch

    gc.collect()  # tensors in an exception's frames form cycles
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()  # repeats an earlier error such as an illegal address
        torch.cuda.empty_cache()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True
