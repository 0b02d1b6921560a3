"""A trial that is a branch of a longer run: the checkpoint that a script begins with, and where the branch ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bssearch.errors import UsageError
from bssearch.integrations.assignment import Assignment
from bssearch.integrations.growing.stages import LoopStages
from bssearch.records import TrialRequest
from bssearch.training.own.optimizers import take_over_states


class RequestedBranch:
    """What a request says of a branch; of one without a branch there is no checkpoint and no last step."""

    def __init__(self, request: TrialRequest) -> None:
        branch = request.branch
        self._path = None if branch is None else branch.checkpoint
        self._was_asked = False
        self.last_step = None if branch is None else branch.samples // request.configuration.batch_size

    @property
    def checkpoint(self) -> str | None:
        """Return the path of the checkpoint, which the script has then asked for."""
        self._was_asked = True
        return self._path

    def check_begins(self, stages: LoopStages) -> None:
        """Raise `UsageError` where a branch begins in a script that has not asked for its checkpoint, or would grow."""
        if self._path is not None:
            stages.refuse("a branch of a longer run", "it ends after as many steps of one size")
        if self._path is not None and not self._was_asked:
            raise UsageError(
                f"the script is to go on from the checkpoint {self._path}, and has not read trial.checkpoint",
                hint="if trial.checkpoint is not None: load the model, and the optimizer by trial.load_optimizer()",
            )


class FromCheckpoint:
    """The part of a script's trial that has to do with checkpoints of longer runs (`bssearch probe branch`)."""

    _assignment: Assignment

    @property
    def checkpoint(self) -> str | None:
        """Return the path of the checkpoint to begin with: the training is a branch of a longer run. Else None."""
        branch = self._assignment.branch
        return None if branch is None else branch.checkpoint

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Give an optimizer a saved state, and let it keep its learning rate and all other options.

        ``load_state_dict`` would restore the rate of the run, which is not the branch's. Raises `UsageError` where the
        state is that of another kind of optimizer, or of other parameters.
        """
        try:
            take_over_states((optimizer,), state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"load_optimizer(): the state is not that of this optimizer: {error}") from error
