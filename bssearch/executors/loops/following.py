"""Checks that a loop uses its trial's values, and counts steps and samples."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from bssearch.errors import require
from bssearch.executors.loops.assignment import Assignment
from bssearch.records import Configuration, ParameterValue
from bssearch.records.batch_schedule import PARAMETERS

MOST_RATES = 3  # the most learning rates that a message names


class AskedParameters(Mapping[str, ParameterValue]):
    """A trial's parameters. ``asked`` holds the names that the script read."""

    def __init__(self, values: Mapping[str, ParameterValue]) -> None:
        self.asked: set[str] = set()
        self._values = dict(values)

    def __getitem__(self, name: str) -> ParameterValue:
        value = self._values[name]
        self.asked.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return repr(self._values)


def rates_of(optimizers: Iterable[Any], *names: str) -> set[float]:
    return {float(group[name]) for one in optimizers for group in one.param_groups for name in names if name in group}


def in_words(rates: Iterable[float]) -> str:
    return ", ".join(f"{one:.4g}" for one in sorted(rates)[:MOST_RATES])


@dataclass(slots=True)
class FieldsRead:
    """The fields of a trial that a loop has read. ``lately`` holds the fields read since the stage began."""

    configuration: Configuration
    searched: Collection[str]
    optimizers: Sequence[Optimizer] = ()
    fields: set[str] = field(default_factory=set)
    lately: set[str] = field(default_factory=set)

    def note(self, name: str) -> None:
        self.fields.add(name)
        self.lately.add(name)

    def check_begins(self, *, has_sampler: bool) -> None:
        """Raise `UsageError` if the loop has read no batch or micro-batch size, unless a sampler reads the batch size.

        To accumulate gradients, the loop must read the micro-batch size.
        """
        require(
            self.fields & {"batch_size", "micro_batch_size"} or has_sampler,
            "the script trains without reading trial.batch_size or trial.micro_batch_size",
            hint="use DataLoader(..., batch_size=trial.micro_batch_size)",
        )
        require(
            self.configuration.accumulation_steps <= 1 or "micro_batch_size" in self.fields,
            f"{self._accumulation}, but the script does not read trial.micro_batch_size",
            hint="use DataLoader(..., batch_size=trial.micro_batch_size), and step the optimizer after every "
            "trial.accumulation_steps micro-batches",
        )

    def check_accumulates(self) -> None:
        require(
            self.configuration.accumulation_steps <= 1 or tells_accumulation(self.fields),
            f"{self._accumulation}, but the script does not read trial.accumulation_steps",
            hint="divide each loss by trial.accumulation_steps, and step the optimizer after the last micro-batch",
        )

    def first_step(self, parameters: AskedParameters, rate: float) -> list[str]:
        """Return warnings about unread searched parameters and a wrong learning rate at the first step.

        Raises `UsageError` only if a searched learning rate is unread, because other parameters may be conditional.
        """
        require(
            "learning_rate" not in self.searched or "learning_rate" in self.fields,
            "the study searches learning_rate, but the loop took a step without reading trial.learning_rate",
            hint="make the optimizer with lr=trial.learning_rate",
        )
        asked = {*parameters.asked, *PARAMETERS}  # the trial's fields already follow the schedule
        found = [
            f"the study searches {name}, but the loop has not read trial.parameters[{name!r}]; use the value, or "
            f"remove {name} from the space"
            for name in self.searched
            if name in parameters and name not in asked
        ]
        if "learning_rate" in self.searched and not self.has_rate(rate):
            others = in_words(self.rates)
            found.append(
                f"no optimizer of trial.state has the trial's learning rate {rate:.4g} (found: {others}); make the "
                "optimizer with lr=trial.learning_rate"
            )
        return found

    def has_rate(self, rate: float) -> bool:
        """True if an optimizer has the learning rate ``rate``, or if no optimizer is known."""
        return not self.rates or any(math.isclose(one, rate) for one in self.rates)

    @property
    def rates(self) -> set[float]:
        return rates_of(self.optimizers, "lr", "initial_lr")

    @property
    def _accumulation(self) -> str:
        size, accumulation = self.configuration.batch_size, self.configuration.accumulation_steps
        return f"batch size {size} takes {accumulation} micro-batches per step"


def tells_accumulation(fields: Set[str]) -> bool:
    """True if these fields imply the accumulation steps."""
    return "accumulation_steps" in fields or fields >= {"batch_size", "micro_batch_size"}


SEE = 'see "Batches that grow" in `bssearch guide own-training`'


class Followed:
    """Checks that a loop follows a batch size schedule.

    ``awaits_batch`` says whether the next micro-batch may have a new size.
    """

    def __init__(self, assignment: Assignment, asked: FieldsRead) -> None:
        self.awaits_batch = True
        self._assignment = assignment
        self._stages = assignment.stages
        self._asked = asked
        self._before: Configuration | None = None
        self._rates_before: set[float] = set()
        self._has_warned = False

    def resume(self, steps: int) -> None:
        """Resume after ``steps`` steps. Fields that the loop has already read count for the first stage."""
        if self._stages.grows and steps:
            self._before = self._stages.at(0)
            self._asked.lately.clear()

    def go_on(self, steps: int) -> None:
        """Begin the next stage if ``steps`` steps complete a stage."""
        if not self._stages.changes_at(steps):
            return
        self._before, self._rates_before = self._stages.last(steps), self._asked.rates
        self._asked.lately.clear()
        if self._stages.has_new_micro_batches(steps):
            self.awaits_batch = True
            self._assignment.pass_ended()

    def check_step(self, now: Configuration) -> None:
        """Warn once if the optimizers lack the stage's learning rate.

        Raises `UsageError` if the loop has not read the stage's sizes.
        """
        before, self._before = self._before, None
        if before is None:
            return
        lately = self._asked.lately
        is_whole = now.accumulation_steps == 1 and "batch_size" in lately
        for field_name, is_read in (
            ("micro_batch_size", is_whole or "micro_batch_size" in lately),
            ("accumulation_steps", tells_accumulation(lately)),
        ):
            value, old = getattr(now, field_name), getattr(before, field_name)
            require(
                value == old or is_read,
                f"the batch has grown to {now.batch_size}, but the loop has not read the new trial.{field_name} = "
                f"{value} (before: {old})",
                hint=f"read trial.{field_name} again for each step; {SEE}",
            )
        if self._has_warned or math.isclose(now.learning_rate, before.learning_rate):
            return
        if (lacks := self._lacks_rate(now.learning_rate)) is not None:
            self._has_warned = True
            self._assignment.warned(
                f"the batch has grown to {now.batch_size}, and {lacks}; set the optimizer's learning rate to "
                "trial.learning_rate before each step"
            )

    def check_size(self, batch: Any, size: int, steps: int) -> None:
        """Warn if a stage's first micro-batch has a wrong size.

        Raises `UsageError` if the micro-batch still has the previous stage's size.
        """
        self.awaits_batch = False
        shapes = [tuple(one.shape[:2]) for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim]
        if not shapes or any(size in shape for shape in shapes):
            return
        found = ", ".join(sorted({str(shape[0]) for shape in shapes}))
        old = self._stages.last(steps).micro_batch_size
        require(
            not self._stages.has_new_micro_batches(steps) or not any(old in shape for shape in shapes),
            f"the batch has grown to {self._stages.at(steps).batch_size}, but the loader's micro-batches still have "
            f"{found} samples; trial.micro_batch_size is {size}",
            hint=f"make the loader with batch_size=trial.micro_batch_size; {SEE}",
        )
        self._assignment.warned(
            f"the loader's first batch has {found} samples instead of {size}; make the loader with "
            "batch_size=trial.micro_batch_size"
        )

    def watch(self, is_within_step: Callable[[], bool]) -> None:
        """If the batch grows, raise `UsageError` at an optimizer step within an accumulation."""

        def check(*given: object) -> None:
            require(
                not is_within_step(),
                "an optimizer of trial.state took a step before the batch's last micro-batch, in a trial whose batch "
                "grows",
                hint=f"count the micro-batches from 0 after each step, up to trial.accumulation_steps; {SEE}",
            )

        for one in self._asked.optimizers if self._stages.grows else ():
            one.register_step_post_hook(check)

    def _lacks_rate(self, rate: float) -> str | None:
        has_asked, rates = "learning_rate" in self._asked.lately, self._asked.rates
        if not rates:
            return None if has_asked else "the loop has not read the new trial.learning_rate"
        if self._asked.has_rate(rate) or (has_asked and rates != self._rates_before):
            return None
        return f"no optimizer of trial.state has the new learning rate {rate:.4g} (found: {in_words(rates)})"


class SampleAxis(NamedTuple):
    """The batch part with one row per sample. ``axis`` is None if the part is a list."""

    keys: tuple[Any, ...]
    axis: int | None
    length: int


class BatchRows:
    """Counts samples by the batch part that had the expected size in the first micro-batch."""

    # If no part had the expected size, the first tensor counts, or else the first list. A longer part than expected
    # does not count.
    _place: SampleAxis | None = None

    def first(self, batch: Any, size: int) -> None:
        """Choose the part to count, given a first micro-batch of ``size`` samples."""
        self._place = _chosen(list(_places(batch)), size)

    def count(self, batch: Any, size: int) -> int | None:
        length = None if self._place is None else _length_at(batch, self._place)
        if length is None:
            self.first(batch, size)
            length = None if self._place is None else self._place.length
        return length


def _places(batch: Any, keys: tuple[Any, ...] = ()) -> Iterator[SampleAxis]:
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        yield from (SampleAxis(keys, axis, int(length)) for axis, length in enumerate(shape[:2]))
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _places(value, (*keys, key))
    elif isinstance(batch, list | tuple):
        yield SampleAxis(keys, None, len(batch))
        for index, value in enumerate(batch):
            yield from _places(value, (*keys, index))


def _chosen(places: list[SampleAxis], size: int) -> SampleAxis | None:
    tensors = [place for place in places if place.axis == 0]
    lists = [place for place in places if place.axis is None]
    second = [place for place in places if place.axis == 1]
    full = next((place for place in (*tensors, *lists, *second) if place.length == size), None)
    # Without a part of the expected size, the columns of a tuple come before the tuple itself.
    first = full or next(iter((*tensors, *sorted(lists, key=lambda place: not place.keys))), None)
    # A longer part, such as a flat tensor of tokens, does not count samples. Rows of packed tokens do not, either.
    if first is None or first.length > size:
        return None
    is_long = any(place.keys == first.keys and place.length >= size for place in second)
    return None if first.axis == 0 and first.length == 1 and size > 1 and is_long else first


def _length_at(batch: Any, place: SampleAxis) -> int | None:
    try:
        for key in place.keys:
            batch = batch[key]
        return len(batch) if place.axis is None else int(batch.shape[place.axis])
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def has_rows_of_ids(batch: Any, rows: int) -> bool:
    """True if a batch has a table of ``rows`` rows of integers, such as token ids."""
    tables = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim == 2]
    return any(one.shape[0] == rows and one.shape[1] > 1 and not one.is_floating_point() for one in tables)


_TAKEN: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps of every optimizer in the process
_WATCHED: WeakSet[Optimizer] = WeakSet()


def _count(optimizer: Optimizer, *given: object) -> None:
    not_finite = getattr(optimizer, "found_inf", None)  # tensor while a scaler steps a fused optimizer
    if not_finite is None or optimizer not in _WATCHED or not bool(not_finite):  # `bool` waits for the device
        _TAKEN[optimizer] = _TAKEN.get(optimizer, 0) + 1


@cache
def _count_all() -> None:
    register_optimizer_step_post_hook(_count)


class OptimizerSteps:
    """Counts optimizer steps, except steps that a gradient scaler skips.

    Of several optimizers, the largest count applies.
    """

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Optimizer, int]] = {}
        _count_all()

    def watch(self, objects: Mapping[str, Any]) -> None:
        found = {name: one for name, owner in objects.items() if isinstance(one := _inner(owner), Optimizer)}
        self._watched |= {name: (one, _TAKEN.get(one, 0)) for name, one in found.items()}
        _WATCHED.update(found.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._watched)

    @property
    def taken(self) -> int:
        return max((_TAKEN.get(one, 0) - before for one, before in self._watched.values()), default=0)

    def begin(self) -> None:
        self._before = _TAKEN.copy()

    def other_than(self, steps: int) -> int | None:
        """Return the largest step count if `watch` got no optimizer.

        Returns None if no optimizer has stepped, or if a count equals ``steps``.
        """
        counts = {count - self._before.get(one, 0) for one, count in _TAKEN.items()} - {0}
        return None if self._watched or not counts or steps in counts else max(counts)


def _inner(owner: Any) -> Any:
    # Wrappers of Accelerate and Fabric skip steps within an accumulation, and SAM takes two steps per batch.
    for name in ("optimizer", "base_optimizer") * 2:  # such as accelerate's wrapper of SAM's
        inner = getattr(owner, name, None)
        owner = inner if isinstance(inner, Optimizer) else owner
    return owner
