"""What a loop has asked its trial for: what it does not ask for it ignores."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from torch.optim import Optimizer

from bssearch.batch_schedule import PARAMETERS
from bssearch.errors import UsageError
from bssearch.records import Configuration, ParameterValue

MOST_RATES = 3
"""Of an optimizer's learning rates so many are named: a choice."""


class AskedParameters(Mapping[str, ParameterValue]):
    """Values by name; ``asked`` are the names whose value has been read."""

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


class Asked:
    """Which fields of its trial a loop has asked for; ``searched`` names what the study searches.

    ``lately`` are those asked for since it was cleared.
    """

    def __init__(self, configuration: Configuration, searched: Collection[str]) -> None:
        self.optimizers: Sequence[Optimizer] = ()
        self._configuration = configuration
        self._searched = searched
        self._fields: set[str] = set()
        self.lately: set[str] = set()

    def note(self, field: str) -> None:
        """Take note that a field of the trial is asked for."""
        self._fields.add(field)
        self.lately.add(field)

    def has(self, field: str) -> bool:
        """Return whether a field of the trial was asked for."""
        return field in self._fields

    def check_begins(self, *, has_sampler: bool) -> None:
        """Raise `UsageError` where a loop is to begin that cannot have the batch size of its trial."""
        if not self._fields & {"batch_size", "micro_batch_size"} and not has_sampler:
            raise UsageError(
                "the script trains without having asked for trial.batch_size or trial.micro_batch_size",
                hint="DataLoader(..., batch_size=trial.micro_batch_size)",
            )
        if self._configuration.accumulation_steps > 1 and not self.has("micro_batch_size"):
            raise UsageError(
                f"{self._accumulation}, and the script has not asked for trial.micro_batch_size",
                hint="DataLoader(..., batch_size=trial.micro_batch_size), and an optimizer step after every "
                "trial.accumulation_steps of them",
            )

    def check_accumulates(self) -> None:
        """Raise `UsageError` where a script takes a step after each micro-batch, as far as that can be told."""
        if self._configuration.accumulation_steps > 1 and not tells_accumulation(self._fields):
            raise UsageError(
                f"{self._accumulation}, and the script has not asked for trial.accumulation_steps",
                hint="an optimizer step after every trial.accumulation_steps micro-batches, their losses divided by it",
            )

    def first_step(self, parameters: AskedParameters, rate: float) -> list[str]:
        """Return a sentence on each parameter that is searched, and was not asked for by the end of the first step.

        One of these may be asked for in some trials alone, by the value of another. The learning rate is not: raises
        `UsageError` where that is searched and was not asked for. A sentence says where no optimizer
        that is known has the ``rate`` of the step.
        """
        if "learning_rate" in self._searched and not self.has("learning_rate"):
            raise UsageError(
                "the study searches learning_rate, and the loop took a step without asking for trial.learning_rate",
                hint="optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)",
            )
        asked = {*parameters.asked, *PARAMETERS}  # of a schedule the trial's fields tell
        ignored = [name for name in self._searched if name in parameters and name not in asked]
        found = [
            f"the study searches {name}, and the loop has not asked for trial.parameters[{name!r}]" for name in ignored
        ]
        if "learning_rate" in self._searched and not self.has_rate(rate):
            found.append(f"no optimizer of trial.state has the trial's learning rate {rate:.4g}, but {self.said_rates}")
        return found

    def has_rate(self, rate: float) -> bool:
        """Return whether an optimizer has a learning rate, or none is known."""
        return not self.rates or any(math.isclose(one, rate) for one in self.rates)

    @property
    def said_rates(self) -> str:
        """Return some of the rates, as they are told."""
        return ", ".join(f"{one:.4g}" for one in sorted(self.rates)[:MOST_RATES])

    @property
    def rates(self) -> set[float]:
        """Return the learning rates of the optimizers, and those with which schedules have them begin."""
        groups = [group for one in self.optimizers for group in one.param_groups]
        return {float(group[name]) for group in groups for name in ("lr", "initial_lr") if name in group}

    @property
    def _accumulation(self) -> str:
        size, accumulation = self._configuration.batch_size, self._configuration.accumulation_steps
        return f"batch size {size} takes {accumulation} micro-batches a step"


def tells_accumulation(fields: Set[str]) -> bool:
    """Return whether who asks for these fields knows how many micro-batches make a step."""
    return "accumulation_steps" in fields or fields >= {"batch_size", "micro_batch_size"}


def refuse_state(has_state: bool) -> None:
    """Raise `UsageError` where a script with a library's Trainer has named a state.

    The Trainer's own count of steps and its schedules would begin anew.
    """
    if has_state:
        raise UsageError(
            "trial.state(...) beside a Trainer: it trains a trial from its start, and cannot go on from a pause",
            hint="leave trial.state(...) out: the trial is then stopped where others are paused",
        )
