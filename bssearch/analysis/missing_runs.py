"""Runs that an imported study lacks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from bssearch.analysis.answer import Batch
from bssearch.records import Configuration, TrialRecord, learning_rate_factor, rule_of_optimizer
from bssearch.records.text import plural

MOST = 3
RATES_TRIED = 3  # a batch size with fewer learning rates counts as untuned
ENOUGH_RUNS = 3  # this many runs of a configuration show the seed-to-seed spread
NEXT_RATE, FARTHEST_RATE = 2.0, 4.0  # factor to the next learning rate without a grid, and the largest factor
ALIKE = 1.1  # learning rates within this factor count as equal


@dataclass(frozen=True, slots=True)
class MissingRun:
    """A run to make; ``learning_rate`` is None if unknown."""

    batch_size: int
    learning_rate: float | None
    why: str

    @property
    def values(self) -> dict[str, int | float]:
        rate = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        return {"batch_size": self.batch_size, **rate}

    @property
    def in_words(self) -> str:
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:g}"
        return f"batch {self.batch_size}{rate} ({self.why})"


def missing_runs(
    trials: Sequence[TrialRecord], batches: Sequence[Batch], best: int, worse: Sequence[int]
) -> list[MissingRun]:
    """Return at most `MOST` runs to make, the most useful first.

    ``worse`` has the batch sizes shown to be worse than ``best``.
    """
    by_number = {one.number: one.configuration for one in trials}
    reached = [row for row in batches if row.best is not None and row.objective_value is not None]
    rows = sorted(reached, key=lambda row: (row.batch_size != best, row.objective_value and row.objective_value.median))
    known = {row.batch_size: by_number[row.best.trial] for row in rows if row.best is not None}
    rates = {size: rates_tried(trials, one) for size, one in known.items()}
    few = [size for size, tried in rates.items() if 0 < len(tried) < RATES_TRIED]
    rivals = [size for size in known if size not in worse or size in few]
    found: dict[tuple[int, float | None], MissingRun] = {}
    for one in _wanted(trials, {size: known[size] for size in rivals}, rates):
        found.setdefault((one.batch_size, one.learning_rate), one)
    return list(islice(found.values(), MOST))


def _wanted(
    trials: Sequence[TrialRecord], rivals: Mapping[int, Configuration], rates: Mapping[int, Sequence[float]]
) -> Iterator[MissingRun]:
    # the most useful first; the best batch size is the first rival
    best, own = next(iter(rivals.items()))
    sizes = {one.configuration.batch_size for one in trials}
    if len(sizes) > 1 and best in (min(sizes), max(sizes)):
        size, end = (2 * best, "largest") if best == max(sizes) else (best // 2, "smallest")
        if size:
            yield MissingRun(size, _carried(own, size), f"{best} is the {end} tried batch size")
    for size in (size for size in rivals if rates[size]):
        tried, rate, carried = rates[size], rivals[size].learning_rate, _carried(own, size)
        is_new = carried is not None and not any(1 / ALIKE < carried / one < ALIKE for one in tried)
        if len(tried) < RATES_TRIED and is_new:
            yield MissingRun(
                size,
                carried,
                f"batch {best}'s learning rate, scaled; batch {size} has {plural(len(tried), 'tried learning rate')}",
            )
        elif rate in (tried[0], tried[-1]):
            at = "only" if len(tried) == 1 else "highest" if rate == tried[-1] else "lowest"
            yield MissingRun(size, _beyond(rate, tried), f"{rate:g} is the {at} tried learning rate")
    for size, configuration in rivals.items():
        count = sum(one.configuration == configuration for one in trials)
        if count < ENOUGH_RUNS:
            again = configuration.learning_rate if rates[size] else None
            yield MissingRun(size, again, f"{plural(count, 'run')} so far")


def rates_tried(trials: Sequence[TrialRecord], like: Configuration) -> list[float]:
    """Return the ascending learning rates tried with the batch size and the optimizer of ``like``.

    The list is empty if the learning rate of ``like`` is unknown.
    """
    here = (one.configuration for one in trials if one.configuration.batch_size == like.batch_size)
    alike = {one.learning_rate for one in here if one.optimizer == like.optimizer and is_rate_known(one)}
    return sorted(alike) if is_rate_known(like) else []


def is_rate_known(configuration: Configuration) -> bool:
    """True unless the logs of an imported run left out the learning rate."""
    return "learning_rate" not in configuration.parameters


def _carried(configuration: Configuration, size: int) -> float | None:
    rule = rule_of_optimizer(configuration.optimizer.lower())
    factor = learning_rate_factor(rule, size, configuration.batch_size)
    return _short(configuration.learning_rate * factor) if is_rate_known(configuration) else None


def _beyond(rate: float, rates: Sequence[float]) -> float:
    if len(rates) == 1:
        return _short(rate * NEXT_RATE)
    factor = rates[-1] / rates[-2] if rate == rates[-1] else rates[0] / rates[1]
    return _short(rate * min(max(factor, 1 / FARTHEST_RATE), FARTHEST_RATE))


def _short(rate: float) -> float:
    return float(f"{rate:.2g}")
