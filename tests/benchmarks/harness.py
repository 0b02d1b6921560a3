"""Shared by the benchmarks: options from a function's parameters, timing in turns, ratios with intervals."""

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.errors import BSSearchError
from bssearch.records import ProbeRecord, StudyRecord, TrialRecord
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN
from tests.factories import EPOCH, make_environment

TEMPORARY = Path(tempfile.gettempdir())


def script(main: Callable[..., bool | int | None], about: str | None = None) -> None:
    """Run a benchmark with options named after its parameters; exit with 1 if it returns False, or with its number."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help=about)
    @functools.wraps(main)
    def command(**options: Any) -> None:
        result = main(**options)
        raise typer.Exit(int(not result) if isinstance(result, bool) else result or 0)

    try:
        app()
    except BSSearchError as error:
        typer.echo(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)


def one_of(names: Sequence[str] | Mapping[str, object], about: str = "") -> Any:
    """Return an option with a choice of names."""

    def parse(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"unknown {text!r}; choose from {', '.join(names)}")
        return text

    return typer.Option(parser=parse, metavar="|".join(names), help=about)


def verdict(is_met: bool) -> bool:
    """Print and return whether all bars are met."""
    print("met" if is_met else "missed")
    return is_met


def holds(interval: Any, truth: float) -> bool | None:
    """Return whether an interval with ``low`` and ``high`` contains the truth; None without both ends."""
    if interval is None or interval.low is None or interval.high is None:
        return None
    return bool(interval.low <= truth <= interval.high)


def answer_of(spec: StudySpec, trials: Collection[TrialRecord], probes: Mapping[int, ProbeRecord]) -> Answer:
    """Return the answer of a real study with these trials; raise `TargetNotReachedError` without one."""
    study = StudyRecord.created(spec.new_study("simulation"), EPOCH, make_environment())
    return build_answer(study, spec, list(trials), dict(probes), UNKNOWN, [], [])


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def timed_in_turns(
    work: Mapping[str, Callable[[], object]], pairs: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Do each piece of work once, then time each ``pairs`` times in turns; return the seconds by name."""
    for piece in work.values():
        piece()
    times: dict[str, list[float]] = {name: [] for name in work}
    for pair in range(pairs):
        for name in turned(list(work), pair):
            times[name].append(seconds_of(work[name], clock))
    return times


def turned(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round: each name is first as often as last."""
    order = [*names[number % len(names) :], *names[: number % len(names)]]
    return order if number % 2 else order[::-1]


def ratio(mine: Sequence[float], bare: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the pairs' ratios with its 95 % bootstrap interval."""
    ratios = [one / other for one, other in zip(mine, bare, strict=True)]
    draws = np.random.default_rng(0).choice(ratios, size=(2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return statistics.median(ratios), float(low), float(high)
