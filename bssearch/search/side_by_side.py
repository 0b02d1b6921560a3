"""Step times on all devices of a node side by side, once a visit to one batch size shows that the devices agree."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from bssearch.errors import LaunchError
from bssearch.executors.base import Executor, TimesSideBySide
from bssearch.intervals import FLAT_RATIO
from bssearch.records import ProbeRecord, StepTimeRequest

Tell = Callable[[str], None]


def devices_that_agree(
    executor: Executor, request: StepTimeRequest, alone: ProbeRecord, tell: Tell
) -> TimesSideBySide | None:
    """Return the executor where steps timed in all of its slots at once take what they take ``alone``; else None.

    That is within `FLAT_RATIO`, on each device, and with nothing else at work. A device apart from the others is told
    of. Slots that share a device, or the CPU, are never timed side by side.
    """
    if not isinstance(executor, TimesSideBySide) or not executor.slots_apart or executor.slots < 2:
        return None
    try:
        found = executor.step_times_by_device(request)
    except LaunchError as error:
        tell(f"step times are taken on one device: on another they cannot be: {error}")
        return None
    seconds = {device: one.step_seconds for device, one in found.items() if one.step_seconds and not one.contended}
    if len(seconds) < len(found) or alone.step_seconds is None:
        return None
    usual = statistics.median(seconds.values())
    for device, ratio in apart(seconds, usual).items():
        tell(f"step times are taken on one device: a step on {device} takes {ratio:.3g} times as long as on the others")
    slower = apart({"all": usual}, alone.step_seconds)
    if slower:
        tell(f"step times are taken on one device: with all at work a step takes {slower['all']:.3g} times as long")
    return None if slower or apart(seconds, usual) else executor


def apart(seconds: Mapping[str, float], usual: float) -> dict[str, float]:
    """Return the ratio to the usual seconds of those that are further from them than `FLAT_RATIO`."""
    ratios = {name: one / usual for name, one in seconds.items()}
    return {name: ratio for name, ratio in ratios.items() if max(ratio, 1 / ratio) > FLAT_RATIO}
