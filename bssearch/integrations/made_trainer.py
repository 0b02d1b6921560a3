"""A trial whose trainer a function of the user's own makes: ``workload: module.py:make_trainer`` in the spec.

::

    def make_trainer(trial):
        loader = DataLoader(data, batch_size=trial.micro_batch_size, shuffle=True)
        return lightning.Trainer(max_epochs=20), Module(), (loader, validation_loader)

The function runs in a process of its own, as a script does. A library is known by the class of what comes first in
what is returned; no other library is imported.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from bssearch.errors import UsageError
from bssearch.integrations.current import current_trial
from bssearch.integrations.own_loop import LoopTrial
from bssearch.records import MAKE_TRAINER, Configuration
from bssearch.workloads.base import import_file

FITTERS = {
    ("lightning", "Trainer"): "bssearch.integrations.lightning",
    ("pytorch_lightning", "Trainer"): "bssearch.integrations.lightning",
    ("transformers", "Trainer"): "bssearch.integrations.transformers",
}
"""Of each library and class that a trainer may be of, the module whose ``fit_made(trial, made)`` trains with it."""


def train_made(name: str, default: Configuration) -> None:
    """Train with what ``make_trainer(trial)`` of a file returns; ``name`` is the workload's.

    The batch size and the learning rate of ``default`` are those for which the code stands as it is. Raises
    `WorkloadError` where the file does not import, and `UsageError` where it has no such function, or that returns
    something else than a trainer and what it trains.
    """
    file, function = Path(name.removesuffix(MAKE_TRAINER)), MAKE_TRAINER.removeprefix(":")
    make = getattr(import_file(name, file), function, None)
    if not callable(make):
        raise UsageError(f"{file.name} has no function {function}", hint=f"def {function}(trial): return trainer, ...")
    trial = current_trial(batch_size=default.batch_size, learning_rate=default.learning_rate)
    fit_made(trial, make(trial))


def fit_made(trial: LoopTrial, made: Any) -> None:
    """Train a trial with what a ``make_trainer`` has returned; raise `UsageError` where it is of no known kind."""
    trainer = made[0] if isinstance(made, tuple) and made else made
    names = [(one.__module__.partition(".")[0], one.__name__) for one in type(trainer).__mro__]
    found = next((FITTERS[name] for name in names if name in FITTERS), None)
    if found is None:
        known = ", ".join(sorted(".".join(name) for name in FITTERS))
        raise UsageError(
            f"make_trainer(trial) returned a {type(trainer).__name__} where a trainer must stand",
            hint=f"the trainers that are known: {known}",
        )
    importlib.import_module(found).fit_made(trial, made)
