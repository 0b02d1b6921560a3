"""Figures of whole trainings are not those to a target: how a table shows them, and how a user says which they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low
from typing import Literal

from bssearch.errors import UsageError
from bssearch.importers.imported_run import Run


class FiguresAt(StrEnum):
    """The moment at which the seconds and steps of a run that reached the target were taken."""

    TARGET = "target"
    END = "end"


Measure = Literal["steps", "train_seconds"]
TOLERANCE = {"steps": 0.0, "train_seconds": 0.01}
"""Relative difference up to which two runs ended at the same moment: clocks differ, counts of steps do not."""

MOST_ROUNDING = 1.25
"""Largest ratio of the samples of two sizes in as many epochs: a last batch may be smaller, or be left out."""

SAME_PACE, OTHER_PACE = 1.05, 1.25
"""Ratios of the seconds of as many steps: of repeats on a quiet device at most, of other configurations at least."""

REMEDY = (
    "put the steps and train_seconds until the first evaluation that met the target into the columns steps and "
    f"train_seconds; --figures-at {FiguresAt.TARGET} says that they hold these already"
)


def check_figures(runs: Sequence[Run], figures_at: FiguresAt | None) -> None:
    """Raise `UsageError` if the steps or seconds of a table may be those of whole trainings.

    A user may say that they are those to the target.
    """
    if figures_at is FiguresAt.TARGET:
        return
    if figures_at is FiguresAt.END:
        raise UsageError(
            f"--figures-at {FiguresAt.END}: a table does not tell when a run reached the target before its end",
            hint=REMEDY,
        )
    measures: tuple[Measure, ...] = ("steps", "train_seconds")
    for measure in measures:
        evidence = _evidence(runs, measure)
        if evidence and not (measure == "steps" and _seconds_differ(runs)):
            raise UsageError(
                f"{measure} may be those of whole trainings, not to the target: {evidence}",
                hint=REMEDY,
            )


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of one batch size, device and number of epochs, by the figures at which they ended."""

    batch_size: int
    reached: list[float]
    missed: list[float]
    configurations: int
    tolerance: float

    @property
    def end(self) -> float:
        """The figure at which the runs that reached the target ended, or most of them."""
        if self.tolerance:
            return median_low(self.reached)
        return Counter(self.reached).most_common(1)[0][0]

    def at_end(self, figures: Sequence[float]) -> int:
        """Return how many of some figures are at the end."""
        return sum(math.isclose(one, self.end, rel_tol=self.tolerance, abs_tol=0.0) for one in figures)


def _evidence(runs: Sequence[Run], measure: Measure) -> str:
    """Return what shows that runs did not end at the target; "" if some ended earlier than others of their size."""
    groups = list(_groups(runs, measure))
    reached = sum(len(one.reached) for one in groups)
    if reached < 2 or sum(one.at_end(one.reached) for one in groups) < 0.9 * reached:
        return ""
    if any(missed > one.end * (1 + one.tolerance) for one in groups for missed in one.missed):
        return ""  # a run that missed the target was given more time than those that reached it took
    with_missed = [one for one in groups if one.at_end(one.missed)]
    if with_missed:
        first = max(with_missed, key=lambda one: len(one.reached))
        return (
            f"at batch size {first.batch_size}, {_ended(first.at_end(first.reached), 'reached')} and "
            f"{_ended(first.at_end(first.missed), 'missed')} it ended at {measure} = {first.end:g}"
        )
    sizes = {one.batch_size for one in groups}
    fewest = min(len(one.reached) for one in groups)
    same = _same_budget(groups, measure) if len(sizes) > 1 else ""
    if same and (fewest > 1 or len(sizes) > 2):
        return f"all {reached} runs that reached it, at {len(sizes)} batch sizes, have {same}"
    if len(sizes) > 1 and fewest > 2 and all(one.configurations > 1 for one in groups):
        return (
            f"at each of {len(sizes)} batch sizes all runs that reached it ended at the same {measure}, whatever their "
            "parameters"
        )
    return ""


def _ended(count: int, how: str) -> str:
    return f"{count} run{'s' * (count > 1)} that {how}"


def _groups(runs: Sequence[Run], measure: Measure) -> Iterator[_Group]:
    """Yield the runs whose figure is known, by size, device and number of epochs, if any of them reached the target."""
    groups: dict[tuple[int, str, str], list[Run]] = {}
    for run in runs:
        if getattr(run, measure):
            groups.setdefault(_key(run), []).append(run)
    for (batch_size, *_), group in groups.items():
        reached = [run for run in group if run.reached]
        if reached:
            yield _Group(
                batch_size=batch_size,
                reached=[getattr(run, measure) for run in reached],
                missed=[getattr(run, measure) for run in group if not run.reached],
                configurations=len({run.configuration.key for run in reached}),
                tolerance=TOLERANCE[measure],
            )


def _key(run: Run) -> tuple[int, str, str]:
    parameters = run.configuration.parameters
    epochs = {name: value for name, value in parameters.items() if "epoch" in name.lower()}
    return run.configuration.batch_size, run.device or "", repr(sorted(epochs.items()))


def _seconds_differ(runs: Sequence[Run]) -> bool:
    """Return whether the seconds at a batch size differ by configuration, and not by seed, as those to a target do.

    Then equal steps may be a setting of all runs, and the seconds still those to the target.
    """
    seconds: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        if run.reached and run.train_seconds:
            sizes = seconds.setdefault(run.configuration.batch_size, {})
            sizes.setdefault(run.configuration.key, []).append(run.train_seconds)
    repeated = [list(one.values()) for one in seconds.values() if any(len(times) > 1 for times in one.values())]
    noise = max((max(times) / min(times) for one in repeated for times in one), default=math.inf)
    apart = max((max(map(min, one)) / min(map(max, one)) for one in repeated), default=1.0)
    return noise < SAME_PACE and apart > OTHER_PACE


def _same_budget(groups: Sequence[_Group], measure: Measure) -> str:
    """Return what the runs of all batch sizes have in common: steps, seconds or samples; "" if nothing."""
    ends = [one.end for one in groups]
    if max(ends) <= min(ends) * (1 + TOLERANCE[measure]):
        return f"{measure} = {ends[0]:g}"
    if measure == "steps" and _are_same_epochs({one.batch_size: int(one.end) for one in groups}):
        samples = [one.batch_size * one.end for one in groups]
        low, high = min(samples), max(samples)
        return f"the same samples, steps × batch_size = {low:,.0f}" + (f" to {high:,.0f}" if high > low else "")
    return ""


def _are_same_epochs(steps: dict[int, int]) -> bool:
    """Return whether steps by batch size are the same epochs of the same data, with or without partial batches."""
    samples = [size * count for size, count in steps.items()]
    if max(samples) > MOST_ROUNDING * min(samples):
        return False
    common = math.gcd(*steps.values())
    divisors = {one for low in range(1, math.isqrt(common) + 1) if common % low == 0 for one in (low, common // low)}
    for epochs in divisors:
        whole = [(size * count // epochs, size) for size, count in steps.items()]
        last_is_kept = max(end - size for end, size in whole) < min(end for end, _ in whole)
        last_is_left_out = max(end for end, _ in whole) < min(end + size for end, size in whole)
        if last_is_kept or last_is_left_out:
            return True
    return False
